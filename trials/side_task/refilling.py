"""How many trials must wait before they begin beside others: as few as pay."""

from math import ceil

JOINING, APART = 0.25, 0.5
"""Trials that fill these shares of the rows begin at once: they join a group, or are a group of their own. The latter
costs nearly as much as a full one in each step, however few they are."""

NEWEST = 0.3
"""The weight of the newest measurement in a mean."""


class Refilling:
    """What joining a group has cost so far, against an epoch of it.

    A row that stands empty for an epoch wastes its share of that epoch, and joining takes a while that does not depend
    much on how many join. So `m` trials begin at once if their rows' share of an epoch is worth more than that.
    """

    def __init__(self) -> None:
        self._joining_ns = self._epoch_ns = 0.0

    def joined(self, ns: int) -> None:
        """Trials have joined a group, which took this time."""
        self._joining_ns = _mean(self._joining_ns, ns)

    def trained(self, ns: int) -> None:
        """A group has trained for an epoch, which took this time."""
        self._epoch_ns = _mean(self._epoch_ns, ns)

    def least(self, rows: int) -> int:
        """Return how many trials begin beside others, of which a group may hold `rows`."""
        most = ceil(JOINING * rows)
        if not self._joining_ns or not self._epoch_ns:
            return most
        return min(most, max(1, ceil(rows * self._joining_ns / self._epoch_ns)))


def _mean(before: float, newest: float) -> float:
    return newest if not before else before + NEWEST * (newest - before)
