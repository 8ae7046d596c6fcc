"""Notices by two cumulative sums when steps become much longer or shorter (Page 1954, Biometrika 41).

A mean over many steps moves only after many bad ones, and the budget is broken meanwhile. A cumulative sum needs three
or four if they are bad enough. A single one, such as a peer's stall, never suffices.
"""

from collections.abc import Sequence
from statistics import median

DEVIATION_MAX = 4.0
"""The most that one step adds, in standard deviations."""
SLACK = 1.0
"""What each step takes off the sum, in standard deviations."""
LIMIT = 8.0
"""A sum above this is a change, in standard deviations."""
LEAST_DEVIATION = 0.02
"""As a share of a step: machines drift by this much on their own."""
SHORTER = 0.1
"""As a share of a step. Squeezing never shortens steps this much: the job has changed, and the baseline is stale."""
_DEVIATION_OF_MAD = 1.4826


class Cusum:
    """Compares squeezed steps with a baseline.

    Args:
        budget: the slowdown that is allowed, such as 0.01.

    Attributes:
        run: for how many steps the sum for longer steps has been above 0.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self.forget()

    def forget(self) -> None:
        """Start anew: past steps say nothing about the next ones."""
        self._longer = self._shorter = 0.0
        self.run = 0

    def squeezed(self, duration_ns: float, alone_ns: Sequence[float]) -> str:
        """Take a squeezed step that has ended.

        Args:
            duration_ns: how long it took.
            alone_ns: how long the latest alone steps took.

        Returns:
            "longer" or "shorter" if steps have become so, else "".
        """
        level_ns = median(alone_ns)
        deviation = _DEVIATION_OF_MAD * median(abs(each - level_ns) for each in alone_ns) / level_ns
        # few steps give a poor estimate
        deviation = max(LEAST_DEVIATION, deviation * (1 + 4 / len(alone_ns)))
        ratio = duration_ns / level_ns - 1
        self._longer = _sum(self._longer, (ratio - self._budget) / deviation)
        self._shorter = _sum(self._shorter, (-SHORTER - ratio) / deviation)
        self.run = self.run + 1 if self._longer else 0
        if self._longer > LIMIT:
            return "longer"
        return "shorter" if self._shorter > LIMIT else ""


def _sum(before: float, deviations: float) -> float:
    return max(0.0, before + min(deviations, DEVIATION_MAX) - SLACK)
