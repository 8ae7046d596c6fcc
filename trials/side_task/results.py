"""What the search worker hears of a group's trials when an epoch has ended, and which of them stay in the group."""

import signal
import time
from collections.abc import Callable, Sequence

from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.gate.base import HOST_UNIT, Gate
from trials.search.client import Search
from trials.side_task.checkpoints import Checkpoints
from trials.side_task.cohort import Cohort
from trials.side_task.endings import Endings, idle_share
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.scores.objectives import Score

LOOK_AGAIN_S = 0.2
"""How often a side task that waits for verdicts looks whether it is asked to end."""

MOST_SHORT_WAITS = 31
"""After waits in vain, at most so many are shorter."""


class Results:
    """Reports scores and failures of trials.

    Args:
        study: the user's.
        gate: asked before the host's work.
        search: takes them.
        checkpoints: knows which trials pause, and writes the weights of those that have ended.

    Attributes:
        dropped: trials that were pruned, or lost to another worker.
        endings: how many will be pruned soon.
    """

    def __init__(self, study: Study, gate: Gate, search: Search, checkpoints: Checkpoints) -> None:
        self._study, self._gate, self._search, self._checkpoints = study, gate, search, checkpoints
        self.dropped: set[int] = set()
        self.endings = Endings([rung for rung in study.rungs if rung < study.epochs])
        self._in_vain = self._short_waits = 0

    def healthy(self, group: TrialGroup) -> list[int]:
        """Return the rows of a group that train on: those with a finite loss that have not been dropped."""
        finite = group.finite_K().tolist()
        for number, epoch, is_finite in zip(group.numbers, group.epochs_done, finite, strict=True):
            if not is_finite:
                self._search.send(fail=number, reason=f"the loss is not finite in epoch {epoch + 1}")
                self._checkpoints.work.ended(number)
        return [row for row, number in enumerate(group.numbers) if finite[row] and number not in self.dropped]

    def report(self, group: TrialGroup, scores: Sequence[Score]) -> list[int]:
        """Report the scores that are due. Returns the rows of the trials that neither have ended nor pause."""
        last, rungs = self._study.epochs, self._study.rungs
        self._gate.enter(HOST_UNIT)
        for row, (number, epoch) in enumerate(zip(group.numbers, group.epochs_done, strict=True)):
            if epoch == last or epoch in rungs:
                if epoch != last:
                    self.endings.reported(number)
                report = {"report": number, "epoch": epoch, "value": scores[row], "final": epoch == last}
                weights = self._checkpoints.ended(group, row, scores[row]) if epoch == last else None
                self._search.send(**report, weights=weights, history=group.history(row))
        leaves = map(self._checkpoints.pauses, group.numbers, group.epochs_done)
        return [r for r, gone in enumerate(leaves) if not gone and group.epochs_done[r] < last]

    def await_verdicts(self, cohort: Cohort, listen: Callable[[float], None]) -> None:
        """Wait until it is known which trials of `cohort` are pruned, if that costs less than to train them in vain.

        On a single core the search worker needs the same bubbles at any rate, so that it costs nothing there, unless
        that waits for others, as for a lock or a database. So after one that was in vain, some waits are shorter, the
        more the more often that was so.

        Args:
            cohort: what trains next.
            listen: takes the search worker's answers, and waits up to that many seconds for a first one.
        """
        if self._study.promotes or not self.endings.undecided(cohort.numbers):
            return
        share = 1.0 if self._short_waits else idle_share()
        self._short_waits = max(0, self._short_waits - 1)
        worth_s = self.endings.worth_s(cohort.numbers, cohort.epoch_s, share)
        until_s = time.monotonic() + worth_s
        while self.endings.undecided(cohort.numbers) and END_SIGNAL not in signal.sigpending():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            self._gate.rest()
            listen(min(left_s, LOOK_AGAIN_S))
        if worth_s and not share:
            self._in_vain = 2 * self._in_vain + 1 if self.endings.undecided(cohort.numbers) else 0
            self._short_waits = min(self._in_vain, MOST_SHORT_WAITS)
