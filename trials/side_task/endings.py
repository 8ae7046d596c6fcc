"""Which rows will soon be free, because their trials end: how many to expect, and whose verdict is worth a wait."""

import os
from collections.abc import Collection, Iterable, Sequence

import torch


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
        self._undecided: set[int] = set()
        self.scored = self.pruned = 0

    def reported(self, number: int) -> None:
        """A trial's score at a rung is on its way to the search worker."""
        self.scored += 1
        self._undecided.add(number)

    def heard(self, number: int, *, pruned: bool = False) -> None:
        """The search worker has decided about a trial, or has lost it."""
        self.pruned += pruned
        self._undecided.discard(number)

    def undecided(self, numbers: Collection[int]) -> int:
        """Return of how many of these trials the verdict is not known yet."""
        return len(self._undecided.intersection(numbers))

    def expected(self, epochs_done: Iterable[int], ahead: int) -> int:
        """Return how many of some trials, by the epochs that each has trained, pruning stops within `ahead` epochs."""
        return round(
            self._share() * sum(any(done < rung <= done + ahead for rung in self._rungs) for done in epochs_done)
        )

    def worth_s(self, numbers: Collection[int], epoch_s: float, idle_share: float) -> float:
        """Return how long to wait for the verdicts on trials that are trained together: no longer than that may save.

        Args:
            numbers: the trials.
            epoch_s: how long their last epoch took. Those that are pruned would train another one in vain.
            idle_share: see `idle_share`.
        """
        saved_s = epoch_s * self._share() * self.undecided(numbers) / max(1, len(numbers))
        return min(epoch_s, saved_s / idle_share) if idle_share else epoch_s * bool(saved_s)

    def _share(self) -> float:
        return min(1.0, self.pruned / max(1, self.scored))


def idle_share() -> float:
    """Return the share of the device that stands still while it waits for what the search worker computes on a core."""
    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_initialized() or torch.get_num_threads() < cores:
        return 1.0
    return 1.0 - 1.0 / cores
