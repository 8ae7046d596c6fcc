"""Ratio of one mode's harvest to another's, at equal speed of the machine.

The speed of a shared machine changes by tens of percent within seconds, so two windows rarely meet the same machine.
The main job's own compute time (its steps less their bubbles) shows the speed in a window. Over the windows of one
scenario it explains most of the variation of the work, and is taken out: each window's work is multiplied by (its
compute time ÷ the mean one) to a power that a regression finds (analysis of covariance, Cochran 1957, Biometrics 13,
261-281). Squeezing itself changes that compute time by about a percent.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.windows.figures import Window
from benchmarks.windows.modes import ALONE, COOPERATIVE, NAIVE, ORACLE, PREEMPTIVE, STEP_GRAIN
from squeezer.reports.student_t import t_quantile_975

COMPARED = {ORACLE: (COOPERATIVE,), STEP_GRAIN: (PREEMPTIVE, COOPERATIVE)}
"""Maps a mode to those whose harvest is compared with it."""


def harvest_ratios(windows: Sequence[Window], mode: str) -> dict[str, Any]:
    """All reported ratios of `mode`, by key."""
    return {
        f"harvest_over_{other}": harvest_ratio(windows, mode, other)
        for other, modes in COMPARED.items()
        if mode in modes
    }


def harvest_ratio(windows: Sequence[Window], mode: str, other: str) -> dict[str, Any] | None:
    """Work per bubble time of `mode` ÷ that of `other`, with jackknife intervals over the cycles that have both.

    Returns:
        `ratio` and `ci95` at equal speed, `plain_ratio` and `plain_ci95` as the windows were, and the `speed_power`; or
        None if fewer than two cycles have both, or `other` got nothing.
    """
    modes: dict[int, set[str]] = defaultdict(set)
    for window in windows:
        modes[window.cycle].add(window.mode)
    cycles = sorted(cycle for cycle, present in modes.items() if {mode, other} <= present)
    known = [window for window in windows if window.cycle in cycles and window.mode not in (ALONE, NAIVE)]

    def at_equal_speed(chosen: Sequence[Window]) -> float:
        return _ratio(chosen, mode, other, speed_power(chosen))

    def plain(chosen: Sequence[Window]) -> float:
        return _ratio(chosen, mode, other, 0.0)

    adjusted = _with_ci95(known, cycles, at_equal_speed)
    beside = _with_ci95(known, cycles, plain)
    if adjusted is None or beside is None:
        return None
    return {
        **{"ratio": adjusted[0], "ci95": adjusted[1], "plain_ratio": beside[0], "plain_ci95": beside[1]},
        "speed_power": speed_power(known),
    }


def speed_power(windows: Sequence[Window]) -> float:
    """How work falls as compute time rises: −1 × the slope of their logarithms within modes.

    Windows without work are left out. 0 where the compute time does not vary.
    """
    by_mode: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for window in windows:
        if window.work > 0:
            by_mode[window.mode].append((math.log(window.computing_ms), math.log(window.work / window.bubble_ms)))
    rows = np.concatenate([np.zeros((0, 2)), *(np.array(own) - np.mean(own, axis=0) for own in by_mode.values())])
    spread = float(rows[:, 0] @ rows[:, 0])
    return -float(rows[:, 0] @ rows[:, 1]) / spread if spread > MINIMUM_SPREAD else 0.0


MINIMUM_SPREAD = 1e-9
"""Squared logarithms; less is rounding."""


def _ratio(windows: Sequence[Window], mode: str, other: str, power: float) -> float:
    mean_ms = fmean(window.computing_ms for window in windows)
    rates = []
    for each in (mode, other):
        own = [window for window in windows if window.mode == each]
        work = sum(window.work * (window.computing_ms / mean_ms) ** power for window in own)
        rates.append(work / sum(window.bubble_ms for window in own))
    return rates[0] / rates[1] if rates[1] else math.inf


def _with_ci95(
    windows: Sequence[Window], cycles: Sequence[int], figure: Callable[[Sequence[Window]], float]
) -> tuple[float, list[float]] | None:
    """`figure` and its jackknife interval over `cycles`."""
    n = len(cycles)
    if n < 2:
        return None
    whole = figure(windows)
    without = [figure([window for window in windows if window.cycle != cycle]) for cycle in cycles]
    pseudo = [n * whole - (n - 1) * part for part in without]
    if not all(map(math.isfinite, pseudo)):
        return None
    half = t_quantile_975(n - 1) * stdev(pseudo) / n**0.5
    return whole, [whole - half, whole + half]
