"""Slowdown, harvest, fill and overrun of every mode in one windowed run.

A window is compared with the windows alone next to it. Its first step does not count, because it still feels the window
before it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.shared.intervals import Pairs, ratio_with_ci95
from benchmarks.windows.modes import ALONE, GATED, MODES, Windows, WindowStep
from squeezer.records.reader import RankRun
from squeezer.reports.metrics import resumes
from squeezer.reports.student_t import t_quantile_975

Log = Sequence[tuple[int, int, int]]
"""(end_ns, trial-samples, CPU time in ns) of every training step of a baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLog:
    """One rank's data: the daemon's records, the baselines' logs, and the dedicated rate."""

    run: RankRun
    baselines: Mapping[str, Log]
    work_per_s: Mapping[int, float]
    """By cycle."""


@dataclass(kw_only=True, slots=True)
class Window:
    """One window, over all ranks. Its first step is left out of all times."""

    cycle: int
    mode: str
    step_ms: list[float] = field(default_factory=list)
    work: float = 0.0
    capacity: float = 0.0
    """Work of dedicated devices in the time of these bubbles."""
    whole: float = 0.0
    """Work of dedicated devices in all the time of these steps."""
    bubble_ms: float = 0.0
    busy_ms: float = 0.0
    """CPU time of the gated side task in these bubbles, or of a baseline in these steps."""
    computing_ms: float = 0.0
    """Mean time of a step on a rank without its bubbles."""

    def raw(self) -> dict[str, Any]:
        """The window as raw JSON."""
        keys = ("work", "capacity", "whole", "bubble_ms", "busy_ms", "computing_ms")
        numbers = {key: round(getattr(self, key), 3) for key in keys}
        return {"cycle": self.cycle, "mode": self.mode, "step_ms": [round(ms, 3) for ms in self.step_ms], **numbers}


def collect(windows: Windows, ranks: Sequence[RankLog]) -> list[Window]:
    """All windows in their order, the last one perhaps cut short."""
    found: dict[tuple[int, int], Window] = {}
    step_ms: dict[int, list[float]] = {}
    computing_ms: dict[tuple[int, int], list[float]] = {}
    for rank in ranks:
        steps = {record["step"]: record for record in rank.run.records["step"]}
        bubble_ns, busy_ns = Counter[int](), Counter[int]()
        for bubble in rank.run.records["bubble"]:
            bubble_ns[bubble["step"]] += bubble["end_ns"] - bubble["start_ns"]
            busy_ns[bubble["step"]] += bubble["side_ns"]
        ends = {name: np.array([step[0] for step in log]) for name, log in rank.baselines.items()}
        sums = {name: np.cumsum([(0, 0), *(step[1:] for step in log)], axis=0) for name, log in rank.baselines.items()}
        mean_per_s = fmean(rank.work_per_s.values())
        for number, step in sorted(steps.items()):
            position = windows.locate(number)
            if position.cycle < 0 or position.at == 0 or number - 1 not in steps:
                continue
            at = position.cycle, position.window
            window = found.setdefault(at, Window(cycle=position.cycle, mode=position.mode))
            step_ns = step["end_ns"] - step["start_ns"]
            step_ms.setdefault(number, []).append(step_ns / 1e6)
            computing_ms.setdefault(at, []).append((step_ns - bubble_ns[number]) / 1e6)
            window.bubble_ms += bubble_ns[number] / 1e6
            per_s = rank.work_per_s.get(
                position.cycle, mean_per_s
            )  # a cycle that was cut short may have no rate of its own
            window.capacity += per_s * bubble_ns[number] / 1e9
            window.whole += per_s * step_ns / 1e9
            if position.mode in GATED:
                window.work += step["work"] - steps[number - 1]["work"]
                window.busy_ms += busy_ns[number] / 1e6
            elif position.mode in rank.baselines:
                begin, end = np.searchsorted(ends[position.mode], (steps[number - 1]["end_ns"], step["end_ns"]))
                work, cpu_ns = sums[position.mode][end] - sums[position.mode][begin]
                window.work += float(work)
                window.busy_ms += float(cpu_ns) / 1e6
    for number, durations_ms in sorted(step_ms.items()):
        position = windows.locate(number)
        found[position.cycle, position.window].step_ms.append(fmean(durations_ms))
    for key, durations_ms in computing_ms.items():
        found[key].computing_ms = fmean(durations_ms)
    return [found[key] for key in sorted(found)]


def mode_figures(windows: Sequence[Window]) -> dict[str, dict[str, Any] | None]:
    """Map every mode to its figures, or to None where it has no window. `windows` as from `collect`."""
    present = {window.mode for window in windows}
    return {mode: _figures(windows, mode) if mode in present else None for mode in MODES}


def pairs(windows: Sequence[Window], mode: str) -> Pairs:
    """(mean step with it, mean step alone) of every window of `mode` and the windows alone next to it, on both sides.

    Only neighbours, because a machine's speed drifts within a cycle by more than the effect.
    """
    found = []
    for at, window in enumerate(windows):
        if window.mode == mode and window.step_ms:
            beside = (_first_alone(reversed(windows[:at])), _first_alone(windows[at + 1 :]))
            alone_ms = [ms for each in beside if each is not None for ms in each.step_ms]
            if alone_ms:
                found.append((fmean(window.step_ms), fmean(alone_ms)))
    return found


def _first_alone(windows: Iterable[Window]) -> Window | None:
    return next((window for window in windows if window.mode == ALONE and window.step_ms), None)


def _figures(windows: Sequence[Window], mode: str) -> dict[str, Any]:
    own = [window for window in windows if window.mode == mode]
    compared = pairs(windows, mode)
    slowdown, slowdown_ci95 = ratio_with_ci95(compared)
    bubble_ms = sum(window.bubble_ms for window in own)
    work, capacity, whole = (sum(getattr(window, key) for window in own) for key in ("work", "capacity", "whole"))
    per_window = [window.work / window.capacity for window in own if window.capacity]
    return {
        "steps": sum(len(window.step_ms) for window in own),
        "pairs_ms": [[round(a, 3), round(b, 3)] for a, b in compared],
        "slowdown": slowdown,
        "slowdown_ci95": slowdown_ci95,
        "harvest": work / capacity if capacity else None,
        "harvest_ci95": _mean_ci95(per_window),
        "net_gain": work / whole + 1 / (1 + slowdown) - 1 if whole else None,
        "fill": sum(w.busy_ms for w in own) / bubble_ms if bubble_ms and mode in GATED else None,
    }


def _mean_ci95(values: Sequence[float]) -> list[float] | None:
    if len(values) < 2:
        return None
    half = t_quantile_975(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return [fmean(values) - half, fmean(values) + half]


def gate_figures(windows: Windows, ranks: Sequence[RankLog], mode: str) -> dict[str, Any]:
    """Overrun, resume latency and stops in the bubbles of one gated mode, over all ranks."""
    overruns_us: list[float] = []
    resumes_us: list[float] = []
    stops = 0
    for rank in ranks:
        bubbles = sorted(rank.run.records["bubble"], key=lambda bubble: bubble["start_ns"])
        start_ns, end_ns = (np.array([b[key] for b in bubbles], np.int64) for key in ("start_ns", "end_ns"))
        side = resumes(start_ns, end_ns, rank.run.units)
        for bubble, ran, resume_ns in zip(bubbles, side.ran, side.resume_ns, strict=True):
            position: WindowStep = windows.locate(bubble["step"])
            if position.mode != mode or position.cycle < 0 or bubble["permit_until_ns"] is None:
                continue
            stops += bubble["stopped"]
            if ran and bubble["overrun_ns"] is not None:
                overruns_us.append(bubble["overrun_ns"] / 1e3)
            if resume_ns >= 0:
                resumes_us.append(resume_ns / 1e3)
    return {
        **{f"overrun_us_p{p}": _percentile(overruns_us, p) for p in (50, 99)},
        **{f"resume_us_p{p}": _percentile(resumes_us, p) for p in (50, 99)},
        "stops": stops,
    }


def _percentile(sample: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(sample, percent)) if sample else None


def recovery(found: Sequence[Window], first_cycle: int, cycles: int, *, resized: bool = False) -> dict[str, Any]:
    """Harvest and fill of our modes before, in, and after the cycle that begins with a disturbance.

    The fill decides whether it recovered, because the harvest follows the machine's speed, which drifts by more.

    Args:
        found: all windows.
        first_cycle: the cycle that begins with the disturbance.
        cycles: how many after it count.
        resized: bubbles became half as long, and less of a short bubble can be filled. So the first cycle is
            compared with the later ones.
    """
    parts = {
        "before": [w for w in found if w.cycle < first_cycle],
        "in_the_first_cycle": [w for w in found if w.cycle == first_cycle],
        "after": [w for w in found if first_cycle < w.cycle <= first_cycle + cycles],
    }
    result: dict[str, Any] = {}
    for mode in GATED:
        chosen = {name: [w for w in part if w.mode == mode] for name, part in parts.items()}
        if not all(chosen.values()):
            continue
        harvests, fills = (
            {name: _quotient(part, over, under) for name, part in chosen.items()}
            for over, under in (("work", "capacity"), ("busy_ms", "bubble_ms"))
        )
        reached, reachable = ("in_the_first_cycle", "after") if resized else ("after", "before")
        recovered = fills[reached] >= RECOVERED * fills[reachable]
        result[mode] = {"harvest": harvests, "fill": fills, "recovered": recovered}
    return result


def _quotient(windows: Sequence[Window], over: str, under: str) -> float:
    return float(sum(getattr(w, over) for w in windows) / sum(getattr(w, under) for w in windows))


RECOVERED = 0.9
"""Fill has recovered when it is at least this share of what it was, or can be."""
