"""Are the main job's steps suddenly longer, or shorter, than they were? Two cumulative sums (Page 1954, Biometrika 41).

A mean over many steps needs many bad ones before it says so, and until then the budget is broken. A cumulative sum
takes three or four, if they are bad enough; a single one, such as a peer's stall, is not enough.
"""

from collections.abc import Sequence
from statistics import median

STRAYS_MOST = 4.0
"""In standard deviations: what one step adds, at most."""
SLACK = 1.0
"""And what every step takes away."""
LIMIT = 8.0
LEAST_DEVIATION = 0.02
"""As a share of a step: so much a machine drifts by itself for some steps."""
SHORTER = 0.1
"""Squeezing never makes steps shorter by so much: then they are other steps, and the baseline is stale."""
_DEVIATION_OF_MAD = 1.4826


class Cusum:
    """Follows squeezed steps against a baseline."""

    def __init__(self, budget: float) -> None:
        """A slowdown of `budget` is allowed, such as 0.01."""
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        """What came before tells nothing about what comes."""
        self._longer = self._shorter = 0.0
        self.run = 0
        """How many steps the sum for longer ones has been above 0."""

    def squeezed(self, duration_ns: float, alone_ns: Sequence[float]) -> str:
        """A squeezed step has ended; `longer`, `shorter` or nothing, against the steps alone before it.

        Args:
            duration_ns: how long it took.
            alone_ns: the latest steps alone.
        """
        level_ns = median(alone_ns)
        deviation = _DEVIATION_OF_MAD * median(abs(each - level_ns) for each in alone_ns) / level_ns
        # few steps tell their own deviation badly
        deviation = max(LEAST_DEVIATION, deviation * (1 + 4 / len(alone_ns)))
        ratio = duration_ns / level_ns - 1
        self._longer = _sum(self._longer, (ratio - self._budget) / deviation)
        self._shorter = _sum(self._shorter, (-SHORTER - ratio) / deviation)
        self.run = self.run + 1 if self._longer else 0
        if self._longer > LIMIT:
            return "longer"
        return "shorter" if self._shorter > LIMIT else ""


def _sum(before: float, strays: float) -> float:
    return max(0.0, before + min(strays, STRAYS_MOST) - SLACK)
