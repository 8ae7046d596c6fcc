"""What runs show: slowdowns, harvests and yields per class, with 95% intervals and their n.

Each round gives one log ratio of mean step times, without the first step of each block, which still feels the block
before; a slowdown is their mean. Steps far from others of their round and the two modes count as less far. Each round
gives one harvest, too: work ÷ what a dedicated device would do in the same bubbles. Intervals are Student's t over the
rounds, those of yields over the runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.shared.intervals import mean_and_ci95, round_log_ratios
from benchmarks.utilization.scenarios import ARMS, BLOCK_STEPS, CONFIGS, GHOSTS, NAIVE, YIELD
from benchmarks.windows.figures import Window
from benchmarks.windows.modes import (
    ALONE,
    AWAKE,
    CACHE_PLACEBO,
    COOPERATIVE,
    GATELESS,
    IDLE,
    LEAST_WEIGHT,
    NICENESS_19,
    PLACEBO,
    PREEMPTIVE,
    SCHED_IDLE,
    STEP_GRAINS,
)

COMPARED = {
    ARMS: {
        "slowdown": (PREEMPTIVE, AWAKE),
        "slowdown_idle": (IDLE, AWAKE),
        "slowdown_cooperative": (COOPERATIVE, AWAKE),
        "slowdown_from_asleep": (PREEMPTIVE, ALONE),
        "slowdown_from_idle_class": (PREEMPTIVE, SCHED_IDLE),
        "awake_from_asleep": (AWAKE, ALONE),
        "gate": (PLACEBO, AWAKE),
        "caches": (CACHE_PLACEBO, PLACEBO),
        "work": (PREEMPTIVE, PLACEBO),
        **{f"slowdown_{mode}": (mode, AWAKE) for mode in (SCHED_IDLE, *STEP_GRAINS)},
    },
    NAIVE: {
        "slowdown_beside_naive": (PREEMPTIVE, AWAKE),
        **{f"slowdown_{mode}": (mode, AWAKE) for mode in (NICENESS_19, LEAST_WEIGHT)},
    },
}
"""Kind of run -> name -> the mode that is judged, and the one that it is compared with."""
OURS = {IDLE: "ours", PREEMPTIVE: 'ours, `preemptive = "stop"`', COOPERATIVE: "ours, cooperative"}
TITLES = {"long": "long bubbles", "many": "M = 2P", "dualpipev": "DualPipeV"}
SLOWDOWNS = {
    "ours": "slowdown_idle",
    'ours, `preemptive = "stop"`': "slowdown",
    "ours, cooperative": "slowdown_cooperative",
    'ours, `preemptive = "stop"`, against a core that sleeps': "slowdown_from_asleep",
    "the same against the idle class": "slowdown_from_idle_class",
    "the gate: a placebo that only spins": "gate",
    "the caches: one that runs through a buffer, against the first": "caches",
    'the work: ours, `preemptive = "stop"`, against the placebo': "work",
    "the kernel's idle class": f"slowdown_{SCHED_IDLE}",
    "step grain, with the best of K = 16, 8 and 4": "slowdown_{best}",
    "naive, at niceness 19": f"slowdown_{NICENESS_19}",
    "naive, in a control group of the least weight": f"slowdown_{LEAST_WEIGHT}",
}
"""Row of the table -> figure; against a core that is awake unless it says otherwise."""
SHORT = (
    "ours",
    'ours, `preemptive = "stop"`',
    "ours, cooperative",
    "the kernel's idle class",
    "naive, at niceness 19",
    "harvest: ours",
    'harvest: ours, `preemptive = "stop"`',
    "harvest: ours, cooperative",
    "harvest: the kernel's idle class",
    "harvest: step grain, with the best of K = 16, 8 and 4",
    "yield with the defaults",
    "yield, cooperative",
)
"""The rows of the table that the README has."""
SHARES = {
    "harvest: ours": f"harvest_{IDLE}",
    'harvest: ours, `preemptive = "stop"`': f"harvest_{PREEMPTIVE}",
    "harvest: ours, cooperative": f"harvest_{COOPERATIVE}",
    "harvest: the kernel's idle class": f"harvest_{SCHED_IDLE}",
    "harvest: step grain, with the best of K = 16, 8 and 4": "harvest_{best}",
    "yield with the defaults": "yield",
    "yield, cooperative": "cooperative",
}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All figures, by class and name; each has its `_ci95` and its `_n`.

    `best_step_grain` names the number of fused trials with which step grain harvests most; it has the luck of the draw.
    """
    figures: dict[str, Any] = {}
    for run in runs:
        of, _, kind = run["scenario"].partition("_")
        if kind in COMPARED:
            windows = [Window(**raw) for raw in run["windows"]]
            own = slowdowns(windows, COMPARED[kind])
            own |= harvests(windows) if kind == ARMS else {}  # ours beside naive ones is not as it is elsewhere
            figures |= {f"{of}_{name}": value for name, value in own.items()}
    for of in GHOSTS:
        for kind in CONFIGS:
            own_runs = [run for run in runs if run["scenario"] == f"{of}_{kind}" and run["yield"] is not None]
            if own_runs:
                figures |= _figure(f"{of}_{kind}", [run["yield"] for run in own_runs], float)
                figures[f"{of}_{kind}_waterfall"] = {
                    share: round(fmean(run["waterfall"][share] for run in own_runs), 4)
                    for share in own_runs[0]["waterfall"]
                }
    return figures


def slowdowns(windows: Sequence[Window], compared: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """By the names of the pairs of modes that are compared, with intervals and numbers of rounds."""
    figures: dict[str, Any] = {}
    for name, pair in compared.items():
        steps = ((each.cycle, each.mode, ms) for each in windows if each.mode in pair for ms in each.step_ms)
        ratios = round_log_ratios(steps, *pair, BLOCK_STEPS - 1)
        if ratios:
            figures |= _figure(name, ratios, math.expm1)
    return figures


def harvests(windows: Sequence[Window]) -> dict[str, Any]:
    """By mode: work ÷ what a dedicated device would do in the bubbles. A naive one's is not all done in bubbles."""
    figures: dict[str, Any] = {}
    by_mode = {
        mode: {each.cycle: each for each in windows if each.mode == mode and each.capacity}
        for mode in (*OURS, *GATELESS)
    }
    harvests = {mode: [each.work / each.capacity for each in own.values()] for mode, own in by_mode.items() if own}
    for mode, values in harvests.items():
        figures |= _figure(f"harvest_{mode}", values, float)
    grains = [mode for mode in STEP_GRAINS if mode in harvests]
    if grains:
        best = figures["best_step_grain"] = max(grains, key=lambda mode: fmean(harvests[mode]))
        for mode in OURS:
            ratios = _work_ratios(by_mode[mode], by_mode[best])
            if ratios:
                figures |= _figure(f"harvest_{mode}_over_step_grain", ratios, math.exp)
    return figures


def _work_ratios(own: Mapping[int, Window], other: Mapping[int, Window]) -> list[float]:
    """Per round, the log ratio of work per bubble time; none at all if one of the two got nothing in some round."""
    both = [(own[cycle], other[cycle]) for cycle in own if cycle in other]
    if not all(each.work > 0 for pair in both for each in pair):
        return []
    return [math.log(a.work / a.bubble_ms / (b.work / b.bubble_ms)) for a, b in both]


def _figure(name: str, values: Sequence[float], scale: Callable[[float], float]) -> dict[str, Any]:
    mean, interval = mean_and_ci95(values)
    bounds = None if interval is None else [scale(bound) for bound in interval]
    return {name: scale(mean), f"{name}_ci95": bounds, f"{name}_n": len(values)}


def table(figures: Mapping[str, Any]) -> str:
    """The summary in Markdown: a column per class; each cell has its interval and n."""
    lines = [*_head(), *_rows(figures, SLOWDOWNS, SHARES)]
    for mode, title in OURS.items():
        lines.append(_row(figures, f"harvest: {title}, ÷ step grain", f"harvest_{mode}_over_step_grain", "{:.2f}"))
    best = [str(figures.get(f"{of}_best_step_grain", "not measured")) for of in TITLES]
    lines.append(f"| the best step grain | {' | '.join(best)} |")
    waterfalls = [figures.get(f"{of}_{YIELD}_waterfall", {}) for of in TITLES]
    for share in dict.fromkeys(share for each in waterfalls for share in each):
        cells = [f"{each[share]:.0%}" if share in each else "not measured" for each in waterfalls]
        lines.append(f"| not yielded: {share.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table(figures: Mapping[str, Any]) -> str:
    """What the README has of `table`."""
    slowdowns, shares = ({title: of[title] for title in SHORT if title in of} for of in (SLOWDOWNS, SHARES))
    return "\n".join([*_head(), *_rows(figures, slowdowns, shares)])


def _head() -> list[str]:
    return [f"| 95% interval; n | {' | '.join(TITLES.values())} |", "|---" * (1 + len(TITLES)) + "|"]


def _rows(figures: Mapping[str, Any], slowdowns: Mapping[str, str], shares: Mapping[str, str]) -> list[str]:
    return [
        *(_row(figures, f"slowdown: {title}", name, "{:+.1%}") for title, name in slowdowns.items()),
        *(_row(figures, title, name, "{:.0%}") for title, name in shares.items()),
    ]


def _row(figures: Mapping[str, Any], title: str, name: str, shown: str) -> str:
    return f"| {title} | {' | '.join(_cell(figures, of, name, shown) for of in TITLES)} |"


def _cell(figures: Mapping[str, Any], of: str, name: str, shown: str) -> str:
    key = f"{of}_{name.format(best=figures.get(f'{of}_best_step_grain'))}"
    if key not in figures:
        return "not measured"
    of_runs = f"n = {figures[f'{key}_n']}"
    bounds = figures[f"{key}_ci95"]
    about = of_runs if bounds is None else f"{shown.format(bounds[0])} to {shown.format(bounds[1])}; {of_runs}"
    return f"{shown.format(figures[key])} ({about})".replace("-", "−")
