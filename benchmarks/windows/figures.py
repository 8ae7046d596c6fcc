"""The windows of one run: their steps' times, and the work done in their bubbles.

The first step of a window does not count, because it still feels the window before it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.windows.modes import GATED, Windows
from squeezer.records.reader import RankRun

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
    bubble_ms: float = 0.0

    def raw(self) -> dict[str, Any]:
        """The window as raw JSON."""
        keys = ("work", "capacity", "bubble_ms")
        numbers = {key: round(getattr(self, key), 3) for key in keys}
        return {"cycle": self.cycle, "mode": self.mode, "step_ms": [round(ms, 3) for ms in self.step_ms], **numbers}


def collect(windows: Windows, ranks: Sequence[RankLog]) -> list[Window]:
    """All windows in their order, the last one perhaps cut short."""
    found: dict[tuple[int, int], Window] = {}
    step_ms: dict[int, list[float]] = {}
    for rank in ranks:
        steps = {record["step"]: record for record in rank.run.records["step"]}
        bubble_ns = Counter[int]()
        for bubble in rank.run.records["bubble"]:
            bubble_ns[bubble["step"]] += bubble["end_ns"] - bubble["start_ns"]
        ends = {name: np.array([step[0] for step in log]) for name, log in rank.baselines.items()}
        sums = {name: np.cumsum([0, *(step[1] for step in log)]) for name, log in rank.baselines.items()}
        mean_per_s = fmean(rank.work_per_s.values())
        for number, step in sorted(steps.items()):
            position = windows.locate(number)
            if position.cycle < 0 or position.at == 0 or number - 1 not in steps:
                continue
            at = position.cycle, position.window
            window = found.setdefault(at, Window(cycle=position.cycle, mode=position.mode))
            step_ns = step["end_ns"] - step["start_ns"]
            step_ms.setdefault(number, []).append(step_ns / 1e6)
            window.bubble_ms += bubble_ns[number] / 1e6
            per_s = rank.work_per_s.get(
                position.cycle, mean_per_s
            )  # a cycle that was cut short may have no rate of its own
            window.capacity += per_s * bubble_ns[number] / 1e9
            if position.mode in GATED:
                window.work += step["work"] - steps[number - 1]["work"]
            elif position.mode in rank.baselines:
                begin, end = np.searchsorted(ends[position.mode], (steps[number - 1]["end_ns"], step["end_ns"]))
                window.work += float(sums[position.mode][end] - sums[position.mode][begin])
    for number, durations_ms in sorted(step_ms.items()):
        position = windows.locate(number)
        found[position.cycle, position.window].step_ms.append(fmean(durations_ms))
    return [found[key] for key in sorted(found)]
