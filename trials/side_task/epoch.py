"""Trains a cohort for one epoch, and knows at any moment which groups are in one piece, and so can be saved."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ds_hooks.shared import statuses
from trials.gate.base import HOST_UNIT, SPARED_UNITS, Gate
from trials.side_task.accounts import Accounts
from trials.side_task.checkpoints import Checkpoints
from trials.side_task.cohort import Cohort, starved_status
from trials.side_task.offload import Offload
from trials.side_task.results import Results
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.inputs.batches import work_of


class EpochTraining:
    """Trains one cohort after another, each for an epoch.

    Args:
        study: the user's.
        gate: asked before every unit.
        accounts: count what is trained.
        checkpoints: save it.
        results: report it.
        offload: gives memory back to the main job, where that is short.
        report: sends a status to the daemon.
        report_progress: sends one of how far the study is.

    Attributes:
        in_use: the group whose units the gate numbers; None: unknown.
    """

    def __init__(
        self,
        study: Study,
        gate: Gate,
        accounts: Accounts,
        checkpoints: Checkpoints,
        results: Results,
        offload: Offload | None,
        report: Callable[[statuses.Status], None],
        report_progress: Callable[[], None],
    ) -> None:
        self._study, self._gate, self._accounts = study, gate, accounts
        self._checkpoints, self._results, self._offload = checkpoints, results, offload
        self._report, self._report_progress = report, report_progress
        self.in_use: TrialGroup | None = None
        self._in_pieces: TrialGroup | None = None

    def train(self, cohort: Cohort) -> None:
        """Train all trials of `cohort` to the end of their epoch, and report what is due there.

        Raises:
            StopRequested: see `save_at_the_end`.
        """
        with self._accounts.training():
            self._train_batches(cohort)
        self._end(cohort)

    def save_at_the_end(self, cohorts: Iterable[Cohort]) -> None:
        """Save what has been trained, after `StopRequested`, if no main job needs the device.

        What was in the middle of a step, or of its scores, is not: it continues from its last checkpoint.
        """
        if self._gate.is_alone():
            groups = [(group, cohort.mark) for cohort in cohorts for group in cohort.groups]
            self._checkpoints.save_at_the_end(each for each in groups if each[0] is not self._in_pieces)

    def _train_batches(self, cohort: Cohort) -> None:
        self._checkpoints.epoch_begins()
        for group, inputs, targets, per_trial in cohort.batches():
            self._use(group)
            work = work_of(self._study, group.size, inputs, targets, per_trial)
            with self._to_its_end(group):
                group.train_step(inputs, targets, per_trial)
                self._accounts.count(work, group.size)
                self._checkpoints.trained(group.numbers, work // group.size)
            self._gate.enter(HOST_UNIT)
            if self._checkpoints.step_ended(group, cohort.mark):
                self._report_progress()
            self._relieve(cohort, group)
            if self._offload is not None:
                self._offload.step_ended()

    def _end(self, cohort: Cohort) -> None:
        study = self._study
        self._accounts.epochs += len(cohort.numbers)
        for group in cohort.groups:
            self._keep(group, self._results.healthy(group))
        cohort.drop_empty()
        for group in tuple(cohort.groups):
            self._use(group)
            with self._to_its_end(group):
                scores = group.end_epoch()
                self._gate.enter(HOST_UNIT)
                if any(epoch == study.epochs or epoch in study.rungs for epoch in group.epochs_done):
                    scores = scores or group.evaluate()
                    group.note_scores(scores)
                    self._checkpoints.epoch_ended(group)
                    self._keep(group, self._results.report(group, scores))
                else:
                    self._checkpoints.epoch_ended(group)
            self._relieve(cohort, group)
        cohort.drop_empty()
        cohort.epoch_ended()

    @contextmanager
    def _to_its_end(self, group: TrialGroup) -> Iterator[None]:
        """Until this ends, `group` is in pieces. If the side task is asked to end meanwhile, it waits for a moment."""
        self._in_pieces, self._gate.finishes = group, True
        try:
            yield
        finally:
            self._gate.finishes = False
        self._in_pieces = None

    def _use(self, group: TrialGroup) -> None:
        """Let the gate number the units of `group`."""
        if group is not self.in_use:
            group.use_units()
            self.in_use = group

    def _relieve(self, cohort: Cohort, group: TrialGroup) -> None:
        """Split `group` if its last units were too long for every bubble, and report it to the daemon."""
        starved = [found for found in self._gate.take_starved() if not found.unit.startswith(SPARED_UNITS)]
        if not starved or not group.size:
            return
        longest = max(starved, key=lambda found: found.needs_ns)
        remedy = "split" if cohort.fit.may_halve(longest) else "nothing"
        if remedy == "split":
            cohort.halve(group)
            self.in_use = None
        elif not cohort.fit.is_news(longest.unit):
            return
        self._report(starved_status(longest, remedy))

    def _keep(self, group: TrialGroup, rows: list[int]) -> None:
        if len(rows) < group.size:
            group.keep(rows)
            self.in_use = group
