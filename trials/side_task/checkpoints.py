"""When trials are saved, and from where they resume."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trials.fusion.errors import FuseError
from trials.gate.base import HOST_UNIT, Gate
from trials.own_logger import own_logger
from trials.search.client import Search
from trials.search.files import checkpoint_files
from trials.side_task.checkpoint_format import CheckpointError, load, save, save_weights
from trials.study import Study
from trials.training.batches import Reader
from trials.training.group import TrialGroup
from trials.training.member import Member, build_member
from trials.training.scores.history import History
from trials.training.scores.objectives import Score, every
from trials.training.trial_state import TrialState

PERIOD_S = 60.0
"""A trial is saved at the first end of an epoch after this time: what a crash may cost."""

MOST_COST, MOST_COST_AT_RUNGS = 0.05, 0.01
"""Saving all trials of a group takes at most this share of the time since they were last saved. At rungs trials are
saved earlier if that is cheap: for small networks a file takes as long as some steps of all trials."""

log = own_logger(__name__)


class Checkpoints:
    """Writes trials of one side task to files, behind the gate, and reads them.

    Args:
        study: the user's.
        directory: the study's; None: nothing is saved.
        gate: asked before each file.
        search: takes the files over.
        clock_s: the time.
    """

    def __init__(
        self,
        study: Study,
        directory: Path | None,
        gate: Gate,
        search: Search,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study, self._directory, self._gate, self._search, self._clock_s = study, directory, gate, search, clock_s
        self._saved_s: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        self._milestones: dict[int, int] = {}
        self._paused: dict[int, TrialState] = {}  # the longest first
        self._cost_s = 0.0
        self._bar: float | None = None
        self._warned: set[str] = set()

    def take(self, answer: dict[str, Any]) -> None:
        """Learn from the search worker's answer which checkpoints trials have, and what the best ones scored."""
        self._bar = answer.get("bar", self._bar)
        for trial in answer["trials"]:
            self._epochs[trial["number"]] = trial.get("epoch", 0)
            self._milestones[trial["number"]] = trial.get("milestone", self._study.epochs)

    def milestone(self, number: int) -> int:
        """The epoch at which a trial leaves: the last, or one at which it pauses and waits for its promotion."""
        return self._milestones.get(number, self._study.epochs)

    def pauses(self, number: int, epoch: int) -> bool:
        """Whether a trial pauses after so many epochs."""
        return self.milestone(number) <= epoch < self._study.epochs

    def build(self, number: int, params: dict[str, Any]) -> Member | None:
        """Build a trial, where it was saved last or from its start. None if it was saved where it pauses.

        Exceptions of the study's code pass through.

        Raises:
            FuseError: its model cannot be fused with any other.
        """
        self._saved_s.setdefault(number, self._clock_s())
        reached = self._epochs.get(number, 0)
        for source in self._sources(number, reached):
            try:
                state = load(source) if isinstance(source, Path) else source
                if not _are_alike(state.params, params) or state.number != number:
                    self._warn(f"trial {number}: {source} is of another trial")
                    continue
                if state.epoch >= self._study.epochs:  # the user has lowered them since
                    self._warn(f"trial {number}: {source} is too late: trials now have {self._study.epochs} epochs")
                    continue
                pauses = self.pauses(number, state.epoch)
                if pauses and state.epoch not in state.history.get("scores", {}):
                    continue  # it was saved by another kind of search
                member = None if pauses else state.member(self._study, moves=True)
            except (CheckpointError, FuseError, OSError) as error:
                self._warn(f"trial {number}: {error}")
                continue
            self._began(state)
            if pauses:
                self._keep_paused(state)
            return member
        if reached:
            self._search.send(began=number, epoch=0)
        return build_member(self._study, number, params)

    def epoch_ended(self, group: TrialGroup) -> None:
        """Save the trials of `group` for which it is time."""
        self._search.send(trained=dict(zip(group.numbers, group.epochs_done, strict=True)))
        for row, (number, epoch) in enumerate(zip(group.numbers, group.epochs_done, strict=True)):
            self._paused.pop(number, None)  # it has trained on
            pauses = self.pauses(number, epoch)
            if pauses or self._is_due(number, epoch, group.size):
                self._gate.enter(HOST_UNIT)
                state = group.export(row)
                self._save(state)
                if pauses:
                    self._keep_paused(state)

    def save(self, group: TrialGroup) -> None:
        """Save the trials of `group`, unless they were just saved or have no epoch behind them."""
        for row, (number, epoch) in enumerate(zip(group.numbers, group.epochs_done, strict=True)):
            if epoch > self._epochs.get(number, 0):
                self._gate.enter(HOST_UNIT)
                self._save(group.export(row))

    def unsaved_epochs(self, readers: Iterable[Reader]) -> int:
        """How many epochs of these trials no checkpoint holds."""
        return sum(max(0, reader.epoch - self._epochs.get(reader.number, 0)) for reader in readers)

    def ended(self, group: TrialGroup, row: int, score: Score) -> str | None:
        """Write the weights of a trial that has ended, if it is among the best so far. Returns the file."""
        keep, sign = self._study.keep_best, 1 if self._study.direction == "maximize" else -1
        self._saved_s.pop(group.numbers[row], None)
        if self._directory is None or not keep or not all(map(math.isfinite, every(score))):
            return None
        if not isinstance(score, list):
            if self._bar is not None and sign * score <= sign * self._bar:
                return None
            if keep == 1:
                self._bar = score  # of more than one, the search worker knows which is the last
        self._gate.enter(HOST_UNIT)
        path = checkpoint_files.temporary_weights_path(self._directory, group.numbers[row])
        try:
            save_weights(group.export(row).model, path)
        except OSError as error:
            self._warn(f"no weights of trial {group.numbers[row]}: {error}")
            path.unlink(missing_ok=True)
            return None
        return str(path)

    def _is_due(self, number: int, epoch: int, trials: int) -> bool:
        if epoch == self._study.epochs or self._directory is None:
            return False
        now_s = self._clock_s()
        since_s = now_s - self._saved_s.setdefault(number, now_s)
        cost_s = self._cost_s * trials
        if epoch in self._study.rungs and cost_s <= since_s * MOST_COST_AT_RUNGS:
            return True
        return since_s >= PERIOD_S and cost_s <= since_s * MOST_COST

    def _save(self, state: TrialState) -> None:
        if self._directory is None:
            return
        began_s = self._clock_s()
        self._saved_s[state.number] = began_s
        path = None
        try:
            path = checkpoint_files.temporary_path(self._directory, state.number, state.epoch)
            save(state, path)
        except (FuseError, OSError) as error:
            self._warn(f"trials are not saved: {error}")
            if path is not None:
                path.unlink(missing_ok=True)
            return
        self._read_back(path)
        self._cost_s = self._clock_s() - began_s
        self._epochs[state.number] = state.epoch
        self._search.send(checkpoint=state.number, file=str(path))

    def _read_back(self, path: Path) -> None:
        """Try the first file: something in it may be what PyTorch does not read."""
        if not self._cost_s:
            try:
                load(path)
            except CheckpointError as error:
                self._warn(f"checkpoints cannot be read: {error}")

    def _keep_paused(self, state: TrialState) -> None:
        """Keep a paused trial in memory, as it may be promoted here soon; without files, until it is."""
        self._saved_s.pop(state.number, None)
        try:
            self._paused[state.number] = state if state.device.type == "cpu" else state.on_host()
        except FuseError as error:
            self._warn(f"paused trials are not kept: {error}")
        if self._directory is not None and len(self._paused) > self._study.rows:
            del self._paused[next(iter(self._paused))]

    def _began(self, state: TrialState) -> None:
        """Say from where a trial goes on, with its score there: whoever saved it may have ended before its report."""
        is_scored = state.epoch in self._study.rungs or self.pauses(state.number, state.epoch)
        score = state.history.get("scores", {}).get(state.epoch) if is_scored else None
        history = None if score is None else History.of(state.history).shown()
        self._search.send(began=state.number, epoch=state.epoch, score=score, history=history)

    def _sources(self, number: int, reached: int) -> list[TrialState | Path]:
        """Return where a trial may go on from, the latest first."""
        paused = self._paused.get(number)
        found: list[TrialState | Path] = [paused] if paused is not None and paused.epoch == reached else []
        if self._directory is not None:
            files = checkpoint_files.found(checkpoint_files.trial_directory(self._directory, number))
            found += [file for file in files if checkpoint_files.epoch_of(file) <= reached]
        return found

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether these are the same hyperparameters. NaN is not equal to itself."""
    return one == other or repr(one) == repr(other)
