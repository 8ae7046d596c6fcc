"""How many trials end soon: rows that will be free."""

from collections.abc import Iterable, Sequence


class Endings:
    """What pruning has stopped so far, and so is likely to stop.

    Args:
        rungs: the epochs after which trials may be pruned.

    Attributes:
        scored: how many scores of trials at rungs have been reported.
        pruned: how many trials were pruned.
    """

    def __init__(self, rungs: Sequence[int]) -> None:
        self._rungs = rungs
        self.scored = self.pruned = 0

    def expected(self, epochs_done: Iterable[int], ahead: int) -> int:
        """Return how many of some trials, by the epochs that each has trained, pruning stops within `ahead` epochs."""
        if not self.pruned:
            return 0
        share = min(1.0, self.pruned / max(1, self.scored))
        return round(share * sum(any(done < rung <= done + ahead for rung in self._rungs) for done in epochs_done))
