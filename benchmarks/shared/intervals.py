"""Means and ratios with their 95% intervals."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev, variance

from squeezer.policy.slowdown import DEVIATION_OF_MAD, FAR, NEVER_FAR
from squeezer.reports.student_t import t_quantile_975


def winsorized(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Logarithms of step times, in which those far from the median of their group count as less far.

    What is far is judged by the deviations in all groups, and by the constants of a report's estimator.
    """
    levels = [median(group) for group in groups]
    away = [abs(log - level) for group, level in zip(groups, levels, strict=True) for log in group]
    far = max(NEVER_FAR, FAR * DEVIATION_OF_MAD * median(away))
    return [
        [min(max(log, level - far), level + far) for log in group] for group, level in zip(groups, levels, strict=True)
    ]


def round_log_ratios(steps: Iterable[tuple[int, str, float]], of: str, over: str, block_steps: int) -> list[float]:
    """Per round, the log ratio of the mean step (geometric) in the block of one mode to that of another.

    Args:
        steps: (round, mode, ms) of each that counts. Those far from others of their round count as less far.
        of: the mode that is judged.
        over: the mode that it is compared with.
        block_steps: how many steps of a block count. A round counts if it has as many of both.
    """
    rounds: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for round_, mode, ms in steps:
        rounds[round_].append((mode, math.log(ms)))
    near = winsorized([[log for _, log in own] for own in rounds.values()])
    ratios = []
    for own, logs in zip(rounds.values(), near, strict=True):
        by_mode: dict[str, list[float]] = defaultdict(list)
        for (mode, _), log in zip(own, logs, strict=True):
            by_mode[mode].append(log)
        if len(by_mode[of]) == len(by_mode[over]) == block_steps:
            ratios.append(fmean(by_mode[of]) - fmean(by_mode[over]))
    return ratios


Pairs = Sequence[tuple[float, float]]


def ratio_with_ci95(pairs: Pairs) -> tuple[float, list[float]]:
    """(mean of a ÷ b, less 1, and its 95% t-interval) over independent pairs, by their log ratios.

    The interval of a single pair is not a number.
    """
    ratios = [math.log(a / b) for a, b in pairs]
    middle = fmean(ratios)
    if len(ratios) == 1:
        return math.expm1(middle), [math.nan, math.nan]
    half = t_quantile_975(len(ratios) - 1) * math.sqrt(variance(ratios) / len(ratios))
    return math.expm1(middle), [math.expm1(middle - half), math.expm1(middle + half)]


def mean_and_ci95(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """The mean and its 95% interval; None for a single value."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, None
    half = t_quantile_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, [mean - half, mean + half]
