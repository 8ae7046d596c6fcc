"""What the raw runs of `bubble_utilization` show: slowdown and harvest per class of scenario, with 95% intervals.

**Slowdown, against an awake core.** An idle core sleeps, and computes more slowly for a while when it wakes: beside
nothing at all, the main job is slower than beside a process in the kernel's idle class. Compared with an idle core, any
side task looks better than it is, and small costs vanish. So the baseline here is the idle class's window of the same
cycle. What the idle class itself costs the main job, by its use of the caches for one, is hidden in turn.

Within a scenario each cycle gives one log ratio: its mean step beside the side task ÷ its mean step beside the idle
class. Their mean is the scenario's estimate, with Student's t interval over the cycles. A cycle, not a window, is the
unit, because all windows of a cycle share its idle windows.

**Over scenarios.** The estimates of a class's scenarios are averaged with equal weights, and the interval is Student's
t over the scenarios. Weights by precision would give one quiet scenario 60% of the total. Scenarios are treated as
independent; they share one machine and one day.

**Harvest.** A scenario's harvest is its work ÷ what a dedicated device would do in the same bubbles. For a class the
mean and interval are over its scenarios; for a class of one scenario, over the cycles.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.utilization.scenario_classes import (
    GHOST_STAGES,
    LONG_BUBBLES,
    REAL_JOB,
    REPEATS,
    SHORT_BUBBLES,
    ScenarioClass,
)
from benchmarks.windows.figures import Window
from benchmarks.windows.modes import ALONE, COOPERATIVE, NAIVE, PREEMPTIVE, SCHED_IDLE, STEP_GRAIN
from squeezer.reports.student_t import t_quantile_975

FEW = 5
"""With fewer scenarios in a class the table shows the lowest and the highest instead of an interval."""

LABELS = {
    COOPERATIVE: "**ours, cooperative** (the only mode on a GPU)",
    PREEMPTIVE: "**ours, preemptive** (CPU, the default)",
    STEP_GRAIN: "whole training steps that fit, as FreeRide gates",
    SCHED_IDLE: "the kernel's idle class (CPU only)",
    NAIVE: "naive co-location",
    ALONE: "nothing: the core sleeps in bubbles",
}
"""Rows of the table, in this order."""


class Estimate(NamedTuple):
    """A mean of `units` (cycles or scenarios) with its 95% interval; `low` and `high` are infinite for one unit."""

    mean: float
    low: float
    high: float
    units: int

    def map(self, function: Callable[[float], float]) -> "Estimate":
        """Of another scale, such as of ratios instead of their logarithms. `function` must increase."""
        return Estimate(function(self.mean), function(self.low), function(self.high), self.units)


class ClassFigure(NamedTuple):
    """One figure of one class of scenarios."""

    estimate: Estimate
    by_scenario: Mapping[str, float]
    repeats: Sequence[float] = ()
    """From runs that repeat one of these scenarios: they widen the range that is shown, and count for nothing else."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest of all runs."""
        values = [*self.by_scenario.values(), *self.repeats]
        return min(values), max(values)


def mean_with_ci95(values: Sequence[float]) -> Estimate:
    """The mean and Student's t interval of independent values."""
    n, mean = len(values), fmean(values)
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, n)
    half = t_quantile_975(n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def windows_of(run: Mapping[str, Any]) -> list[Window]:
    """The windows of one raw run."""
    return [Window(**raw) for raw in run["windows"]]


def cycle_ratios(windows: Sequence[Window], mode: str, baseline: str = SCHED_IDLE) -> list[float]:
    """Per cycle that has both: log(mean step of `mode` ÷ mean step of `baseline`)."""
    step_ms: dict[tuple[int, str], list[float]] = defaultdict(list)
    for window in windows:
        if window.step_ms:
            step_ms[window.cycle, window.mode].append(fmean(window.step_ms))
    cycles = sorted({cycle for cycle, _ in step_ms})
    return [
        math.log(fmean(step_ms[cycle, mode]) / fmean(step_ms[cycle, baseline]))
        for cycle in cycles
        if (cycle, mode) in step_ms and (cycle, baseline) in step_ms
    ]


def scenario_slowdown(run: Mapping[str, Any], mode: str) -> Estimate | None:
    """The slowdown beside `mode` against the idle class, over the cycles; None where the run lacks one of the two."""
    ratios = cycle_ratios(windows_of(run), mode)
    return mean_with_ci95(ratios).map(math.expm1) if ratios else None


def class_slowdown(runs: Sequence[Mapping[str, Any]], of: ScenarioClass, mode: str) -> ClassFigure | None:
    """The slowdown of a class against the idle class: over its scenarios, or over the cycles of its only one."""
    ratios = {run["scenario"]: cycle_ratios(windows_of(run), mode) for run in _members(runs, of)}
    ratios = {scenario: own for scenario, own in ratios.items() if own}
    return _figure(ratios, {name: fmean(own) for name, own in ratios.items()}, math.expm1)


def class_harvest(runs: Sequence[Mapping[str, Any]], of: ScenarioClass, mode: str) -> ClassFigure | None:
    """The harvest of a class: over its scenarios, or over the cycles of its only one."""
    by_cycle: dict[str, list[float]] = {}
    whole: dict[str, float] = {}
    for run in _members(runs, of):
        own = [window for window in windows_of(run) if window.mode == mode and window.capacity]
        if own:
            cycles = sorted({window.cycle for window in own})
            by_cycle[run["scenario"]] = [_harvest([w for w in own if w.cycle == cycle]) for cycle in cycles]
            whole[run["scenario"]] = _harvest(own)
    found = _figure(by_cycle, whole, float)
    if found is None:
        return None
    again = [run for run in runs if run["scenario"] in REPEATS and _repeated(run["scenario"]) in of.scenarios]
    repeats = [_harvest(own) for run in again if (own := [w for w in windows_of(run) if w.mode == mode])]
    return found._replace(repeats=repeats)


def intervals_above_zero(runs: Sequence[Mapping[str, Any]], mode: str) -> tuple[dict[str, Estimate], int]:
    """(the ghost stages whose own interval of the slowdown lies above zero, of how many)."""
    found = {run["scenario"]: scenario_slowdown(run, mode) for run in _members(runs, GHOST_STAGES)}
    known = {name: estimate for name, estimate in found.items() if estimate is not None}
    return {name: estimate for name, estimate in known.items() if estimate.low > 0}, len(known)


def harvest_ratio_range(runs: Sequence[Mapping[str, Any]], mode: str, other: str) -> tuple[float, float, int]:
    """(lowest, highest, how many) of the runs' harvest ratios at equal speed (`harvest_ratio.py`), repeats included."""
    figures = [run["baselines"][mode] for run in runs if "baselines" in run and run["baselines"][mode]]
    ratios_found = [own.get(f"harvest_over_{other}") for own in figures]
    ratios = [each["ratio"] for each in ratios_found if each is not None]
    return min(ratios), max(ratios), len(ratios)


def speed_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/benchmarks.md, in Markdown.

    Args:
        runs: the raw runs of benchmarks/results/bubble_utilization.json.
    """
    some = class_slowdown(runs, GHOST_STAGES, COOPERATIVE)
    stages = some.estimate.units if some else 0
    lines = [
        f"| in the bubbles | slowdown: real job | slowdown: {stages} ghost stages | harvest: real job | long bubbles | "
        "short bubbles |",
        "|---" * 6 + "|",
    ]
    lines += [f"| {label} | {' | '.join(speed_cells(runs, mode))} |" for mode, label in LABELS.items()]
    return "\n".join(lines)


def speed_cells(runs: Sequence[Mapping[str, Any]], mode: str) -> list[str]:
    """A mode's slowdown on the real job and on ghost stages; its harvest there, in long and in short bubbles."""
    slowdowns = [_slowdown_cell(class_slowdown(runs, of, mode), mode) for of in (REAL_JOB, GHOST_STAGES)]
    return slowdowns + [_harvest_cell(runs, of, mode) for of in (REAL_JOB, LONG_BUBBLES, SHORT_BUBBLES)]


def signed(estimate: Estimate) -> str:
    """A slowdown with its interval, in percent."""
    mean, low, high = (f"{100 * value + 0.0:+.1f}%".replace("-", "−") for value in estimate[:3])
    return f"{mean} ({low} to {high})"


def _slowdown_cell(figure: ClassFigure | None, mode: str) -> str:
    if mode == SCHED_IDLE:
        return "the baseline"
    return "" if figure is None else signed(figure.estimate)


def _harvest_cell(runs: Sequence[Mapping[str, Any]], of: ScenarioClass, mode: str) -> str:
    figure = class_harvest(runs, of, mode) if mode not in (NAIVE, ALONE) else None
    if figure is None:
        return ""
    low, high = figure.bounds
    if 1 < figure.estimate.units < FEW:
        return f"{100 * low:.0f}–{100 * high:.0f}%"
    mean, low, high = figure.estimate[:3]
    return f"{100 * mean:.0f}% ({100 * low:.0f} to {100 * high:.0f})"


def _members(runs: Sequence[Mapping[str, Any]], of: ScenarioClass) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["scenario"] in of.scenarios]


def _repeated(scenario: str) -> str:
    return scenario.removesuffix(f"_{REPEATS[scenario]}")


def _harvest(windows: Sequence[Window]) -> float:
    return sum(window.work for window in windows) / sum(window.capacity for window in windows)


def _figure(
    by_cycle: Mapping[str, Sequence[float]], by_scenario: Mapping[str, float], scale: Callable[[float], float]
) -> ClassFigure | None:
    if not by_scenario:
        return None
    if len(by_scenario) == 1:
        (cycles,) = by_cycle.values()
        estimate = mean_with_ci95(cycles)
    else:
        estimate = mean_with_ci95(list(by_scenario.values()))
    return ClassFigure(estimate.map(scale), {name: scale(value) for name, value in by_scenario.items()})
