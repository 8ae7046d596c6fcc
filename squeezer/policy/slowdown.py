"""The slowdown: each block of steps left alone against the squeezed steps beside it. The guard and the report use this.

A block is compared with up to `NEAR_STEPS` squeezed steps on either side. So a steady drift cancels, and a slow phase
of the machine matters only where it begins or ends. No step counts twice: of few squeezed steps between two blocks each
block gets a half. The first step after a change does not count, as in a crossover trial, because it still feels what
was before: a core that a side task kept awake is faster in the next step too, and one that slept is slower. Both would
count against squeezing. Where few steps follow, it counts.

A comparison is the difference of mean log lengths, *winsorized*: a step that is far from the others beside it, squeezed
or alone, counts as less far. Single steps are treated so, not comparisons. So what makes some steps long, such as an
evaluation, changes both kinds alike, though a block has fewer steps than its neighbours. The slowdown is the mean.
"""

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from statistics import fmean, median
from typing import NamedTuple

NEAR_STEPS = 4
MOST_ALONE_STEPS = 16
"""A longer time without squeezing is no block: the machine may have changed meanwhile."""
FAR = 4.0
"""In standard deviations, as judged by median absolute deviations."""
NEVER_FAR = 0.01
"""As a share of a step: a smaller distance is never far, however equal the other steps are."""
MEMORY_PAIRS = 64
"""Far is judged by this many of the latest comparisons."""
FEW_SQUEEZED = 2
"""Of so few squeezed steps after a block the first counts, too."""
LEAST_PAIRS = 3
"""With fewer comparisons, nothing counts as far."""
LASTING_PAIRS = 3
"""If this many comparisons in a row agree, none is far: a slowdown has just begun, or ended."""
DEVIATION_OF_MAD = 1.4826
"""The standard deviation of normal noise ÷ its median absolute deviation."""


class Pair(NamedTuple):
    """One comparison.

    Attributes:
        log_ratio: above 0: squeezed steps are longer.
        alone: the length of the block's steps, as a geometric mean.
    """

    log_ratio: float
    alone: float


class Pairs:
    """Compares steps as they end."""

    def __init__(self) -> None:
        self._last_step = 0
        self._before: list[float] = []  # logarithms, as all below
        self._alone: list[float] = []
        self._after: list[float] = []
        self._ratios: deque[float] = deque(maxlen=MEMORY_PAIRS)
        self._deviations: deque[float] = deque(maxlen=MEMORY_PAIRS)

    def add(self, step: int, length: float, squeezed: bool | None) -> Pair | None:
        """Take a step that has ended; returns the comparison that it completes.

        Args:
            step: its number. Steps before a gap in the numbers are no neighbours of those after it.
            length: how long it was, in any unit. One that is not above 0 makes a gap.
            squeezed: None makes a gap, because such a step is of neither kind.
        """
        follows, self._last_step = step == self._last_step + 1, step
        pair = None if follows else self.divide()
        if squeezed is None or not 0 < length < math.inf:
            return pair or self.divide()
        log = math.log(length)
        if not squeezed:
            if self._after:
                pair = self._compare((len(self._after) + 1) // 2)
            self._alone.append(log)
        elif not self._alone:
            self._before = [*self._before[1 - NEAR_STEPS :], log]
        else:
            self._after.append(log)
            if len(self._after) > NEAR_STEPS + 1:  # one is left for the next block
                pair = self._compare(NEAR_STEPS + 1)
        return pair

    def divide(self) -> Pair | None:
        """Begin anew: what follows is no neighbour of the steps so far. Returns the comparison that ends here."""
        pair = self._compare(len(self._after)) if self._after else None
        self._before, self._alone, self._after = [], [], []
        return pair

    def _compare(self, count: int) -> Pair | None:
        """Compare the block with the steps before it and the first `count` after; the rest comes before the next."""
        before, alone, after = self._before, self._alone, self._after[:count]
        self._before, self._alone, self._after = self._after[count:] or after[-1:], [], []
        if not before or len(alone) > MOST_ALONE_STEPS:
            return None
        alone, after = alone[1:] or alone, after[1:] if len(after) > FEW_SQUEEZED else after
        level = median([*before, *after])
        ratio = (fmean(before) + fmean(after)) / 2 - fmean(alone)
        own_ms = math.exp(fmean(alone))
        if len(self._ratios) >= LEAST_PAIRS:
            far = max(NEVER_FAR, FAR * median(self._deviations))
            usual, last = median(self._ratios), [*islice(reversed(self._ratios), LASTING_PAIRS - 1), ratio]
            before, after = ([min(max(each, level - far), level + far) for each in some] for some in (before, after))
            low, high = level - max(usual, min(last), 0.0) - far, level - min(usual, max(last), 0.0) + far
            alone = [min(max(each, low), high) for each in alone]
        self._ratios.append(ratio)
        self._deviations.append(DEVIATION_OF_MAD * median([abs(each - level) for each in (*before, *after)]))
        return Pair((fmean(before) + fmean(after)) / 2 - fmean(alone), own_ms)


class Estimate(NamedTuple):
    """The mean of some comparisons, and their standard deviation: 0 of a single one."""

    mean: float
    deviation: float


def estimate(log_ratios: Iterable[float]) -> Estimate:
    """Estimate the slowdown, as a log ratio, by at least one comparison."""
    values = list(log_ratios)
    mean = fmean(values)
    squared = sum([(each - mean) ** 2 for each in values])
    return Estimate(mean, math.sqrt(squared / max(1, len(values) - 1)))


def pairs_of(steps: Iterable[tuple[int, float, bool | None]]) -> list[Pair]:
    """All comparisons among the steps of one job: (number, length, squeezed) of each, in order."""
    pairs = Pairs()
    found = [*[pairs.add(*step) for step in steps], pairs.divide()]
    return [pair for pair in found if pair is not None]
