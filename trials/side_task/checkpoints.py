"""When trials are saved, and from where they resume."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trials.fusion.errors import FuseError
from trials.gate.base import HOST_UNIT, Gate
from trials.own_logger import own_logger
from trials.search.client import Search
from trials.search.files import checkpoint_files
from trials.side_task.checkpoint_format import CheckpointError, load, save, save_weights
from trials.side_task.saved_work import SavedWork
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.member import Member, build_member
from trials.training.scores.history import History
from trials.training.scores.objectives import Score, every
from trials.training.trial_state import TrialState

PERIOD_S = 60.0
"""A trial is saved at the first end of an epoch after this time; in an epoch that takes longer, between two steps."""

MOST_COST, MOST_COST_WITHIN, MOST_COST_AT_RUNGS = 0.05, 0.025, 0.01
"""Saving all trials of a group takes at most this share of the time since they were last saved at the end of an epoch;
of that, in the middle of epochs. At rungs trials are saved earlier if that is cheap: for small networks a file takes as
long as some steps of all trials."""

SUSPECT_PERIOD_S = 1.0
"""The same for trials in which a worker has died. The first time, they are saved after a step, whatever it costs: who
dies in one without getting that far counts against it, and it may only have trained beside another, or have been killed
from outside."""

SAVES_WITHIN_S = 5.0
"""When the side task is asked to end, no file is begun after this time."""

log = own_logger(__name__)


@dataclass(slots=True)
class _Saved:
    """When a trial was saved last, or begun.

    Attributes:
        at_s: at any place.
        end_s: at the end of an epoch.
        within: how often in the middle of epochs since then.
    """

    at_s: float
    end_s: float
    within: int = 0


class _Written(NamedTuple):
    """A trial's file, under the name that it has until the search worker takes it."""

    number: int
    epoch: int
    place: int
    path: Path


class Checkpoints:
    """Writes trials of one side task to files, behind the gate, and reads them.

    Args:
        study: the user's.
        directory: the study's; None: nothing is saved.
        gate: asked before each file.
        search: takes the files over.
        clock_s: the time.

    Attributes:
        work: what is trained, and what of it is safe.
        taking_cost_s: of a core, what the search worker needed to take the last file.
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
        self._saved: dict[int, _Saved] = {}
        self._began_s = 0.0  # the epoch under way
        self._changed: set[int] = set()
        self._suspects: dict[int, bool] = {}  # those in which workers have died -> whether they were saved here since
        self.work = SavedWork()
        self._epochs: dict[int, int] = {}
        self._handed: dict[int, _Written] = {}  # the last of each trial: the search worker may take it much later
        self._milestones: dict[int, int] = {}
        self._paused: dict[int, TrialState] = {}  # the longest first
        self._cost_s = self.taking_cost_s = 0.0
        self._bar: float | None = None
        self._warned: set[str] = set()

    def take(self, answer: dict[str, Any]) -> None:
        """Learn from the search worker's answer which checkpoints trials have, and what the best ones scored."""
        self._bar = answer.get("bar", self._bar)
        for trial in answer["trials"]:
            self._epochs[trial["number"]] = trial.get("epoch", 0)
            self._milestones[trial["number"]] = trial.get("milestone", self._study.epochs)
            if trial.get("deaths"):
                self._suspects[trial["number"]] = False

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
        self._saved_of(number)
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
                if not isinstance(source, Path) or source.exists():  # else the search worker has just renamed it
                    self._warn(f"trial {number}: {error}")
                continue
            self.work.continues(number, (state.epoch, state.place))
            self._began(state)
            if pauses:
                self._keep_paused(state)
            return member
        self.work.continues(number, None)
        if reached:
            self._search.send(began=number, epoch=0)
        return build_member(self._study, number, params)

    def epoch_begins(self) -> None:
        """Call it when trials begin an epoch, or continue in the middle of one."""
        self._began_s = self._clock_s()

    def trained(self, numbers: Collection[int], samples: int) -> None:
        """Count a step of these trials, in which each has trained on so many samples."""
        for number in numbers:
            self.work.trained(number, samples)

    def step_ended(self, group: TrialGroup, mark: Callable[[int], str]) -> bool:
        """Save all trials of `group` between two steps, if it is time for one of them. Returns whether it was.

        In an epoch that has just begun it is not: its end may be near, and what is saved there is good for more.

        Args:
            group: it must be in one piece.
            mark: returns that of what a trial has trained on in this epoch. Without one it cannot continue there.
        """
        if self._directory is None:
            return False
        now_s = self._clock_s()
        since_s = now_s - min(self._saved_of(number).at_s for number in group.numbers)
        is_first = any(self._is_first(number) for number in group.numbers)
        is_dear = self._file_cost_s() * group.size > since_s * MOST_COST_WITHIN and not is_first
        if is_dear or min(since_s, now_s - self._began_s) < min(map(self._period_s, group.numbers)):
            return False
        marks = [mark(number) for number in group.numbers]
        if not all(marks):
            self._warn("trials are saved at the ends of epochs only: their batches are on a device, or sparse")
            return False
        written = []
        for row, own in enumerate(marks):
            self._gate.enter(HOST_UNIT)
            written.append(self._write(group.export(row, own)))
        self._hand_over(written)
        return True

    def has_changed(self, numbers: Collection[int]) -> None:
        """Let these trials continue from the end of an epoch: the batches of the one that they were in have changed."""
        self._changed |= set(numbers)

    def epoch_ended(self, group: TrialGroup) -> None:
        """Save all trials of `group`, if it is time for one of them, and those that pause in any case."""
        self._search.send(trained=dict(zip(group.numbers, group.epochs_done, strict=True)))
        ends = list(zip(group.numbers, group.epochs_done, strict=True))
        pausing = [self.pauses(*end) for end in ends]
        is_due = any(not pauses and self._is_due(*end, group.size) for end, pauses in zip(ends, pausing, strict=True))
        written = []
        for row, (number, epoch) in enumerate(ends):
            self._paused.pop(number, None)  # it has trained on
            if pausing[row] or (is_due and epoch < self._study.epochs):
                self._gate.enter(HOST_UNIT)
                state = group.export(row)
                written.append(self._write(state))
                if pausing[row]:
                    self._keep_paused(state)
        self._hand_over(written)

    def save(self, group: TrialGroup) -> None:
        """Save the trials of `group`, which are at the end of an epoch, unless they were just saved."""
        for row in self._behind(group):
            self._gate.enter(HOST_UNIT)
            self._hand_over([self._write(group.export(row))])

    def save_at_the_end(self, groups: Iterable[tuple[TrialGroup, Callable[[int], str]]]) -> None:
        """Save what has been trained of these, without the gate: no main job is there, and the side task is to end.

        Args:
            groups: each in one piece, with what `step_ended` wants to know of it.
        """
        until_s = self._clock_s() + SAVES_WITHIN_S
        for group, mark in groups:
            for row in self._behind(group):
                own = mark(group.numbers[row])
                if (own or not group.place) and self._clock_s() <= until_s:
                    self._hand_over([self._write(group.export(row, own))])

    def _behind(self, group: TrialGroup) -> list[int]:
        """Return the rows of trials that are further than what is saved of them: by a step, or by an epoch's end."""
        trials = enumerate(zip(group.numbers, group.epochs_done, strict=True))
        return [
            row
            for row, (number, epoch) in trials
            if not self.work.is_written(number) or epoch > self._epochs.get(number, 0)
        ]

    def ended(self, group: TrialGroup, row: int, score: Score) -> str | None:
        """Write the weights of a trial that has ended, if it is among the best so far. Returns the file."""
        keep, sign = self._study.keep_best, 1 if self._study.direction == "maximize" else -1
        self._saved.pop(group.numbers[row], None)
        self._handed.pop(group.numbers[row], None)
        self.work.ended(group.numbers[row])
        if self._directory is None or not keep or not all(map(math.isfinite, every(score))):
            return None
        if not isinstance(score, list) and self._bar is not None and sign * score < sign * self._bar:
            return None
        self._gate.enter(HOST_UNIT)
        path = None
        try:
            path = checkpoint_files.temporary_weights_path(self._directory, group.numbers[row])
            save_weights(group.export(row).model, path)
        except OSError as error:
            self._warn(f"no weights of trial {group.numbers[row]}: {error}")
            checkpoint_files.discard(path)
            return None
        if keep == 1 and self._bar is not None and not isinstance(score, list):  # else others may count more
            self._bar = score  # of more than one, the search worker knows which is the last
        return str(path)

    def _is_due(self, number: int, epoch: int, trials: int) -> bool:
        if epoch == self._study.epochs or self._directory is None:
            return False
        if self._is_first(number):
            return True
        now_s, saved, cost_s = self._clock_s(), self._saved_of(number), self._file_cost_s() * trials
        if epoch in self._study.rungs and cost_s <= (now_s - saved.at_s) * MOST_COST_AT_RUNGS:
            return True
        since_s = now_s - saved.end_s
        return since_s >= self._period_s(number) and cost_s * (1 + saved.within) <= since_s * MOST_COST

    def _file_cost_s(self) -> float:
        return self._cost_s + self.taking_cost_s

    def _is_first(self, number: int) -> bool:
        return not self._suspects.get(number, True)

    def _period_s(self, number: int) -> float:
        if self._is_first(number):
            return 0.0
        return SUSPECT_PERIOD_S if number in self._suspects else PERIOD_S

    def _saved_of(self, number: int) -> _Saved:
        found = self._saved.get(number)
        if found is None:
            now_s = self._clock_s()
            found = self._saved[number] = _Saved(now_s, now_s)
        return found

    def _write(self, state: TrialState) -> _Written | None:
        """Write a trial to a file that does not count yet. None: it cannot be saved."""
        if self._directory is None:
            return None
        began_s = self._clock_s()
        saved = self._saved_of(state.number)
        saved.at_s = began_s
        if state.place:
            saved.within += 1
        else:
            saved.end_s, saved.within = began_s, 0
        path = None
        try:
            path = checkpoint_files.temporary_path(self._directory, state.number, state.epoch, state.place)
            save(state, path)
        except (FuseError, OSError) as error:
            self._warn(f"trials are not saved: {error}")
            checkpoint_files.discard(path)
            return None
        self._read_back(path)
        self._cost_s = self._clock_s() - began_s
        return _Written(state.number, state.epoch, state.place, path)

    def _hand_over(self, written: Iterable[_Written | None]) -> None:
        """Let these files count: all at once, so that trials that continue from them are at one place as before."""
        for each in filter(None, written):
            self._epochs[each.number], self._handed[each.number] = each.epoch, each
            self._changed.discard(each.number)
            if each.number in self._suspects:
                self._suspects[each.number] = True
            self.work.written(each.number, (each.epoch, each.place))
            self._search.send(checkpoint=each.number, file=str(each.path))

    def _read_back(self, path: Path) -> None:
        """Try the first file: something in it may be what PyTorch does not read."""
        if not self._cost_s:
            try:
                load(path)
            except CheckpointError as error:
                self._warn(f"checkpoints cannot be read: {error}")

    def _keep_paused(self, state: TrialState) -> None:
        """Keep a paused trial in memory, as it may be promoted here soon; without files, until it is."""
        self._saved.pop(state.number, None)
        self.work.written(state.number, (state.epoch, state.place))
        try:
            self._paused[state.number] = state if state.device.type == "cpu" else state.on_host()
        except FuseError as error:
            self._warn(f"paused trials are not kept: {error}")
        if self._directory is not None and len(self._paused) > self._study.rows:
            del self._paused[next(iter(self._paused))]

    def _began(self, state: TrialState) -> None:
        """Say from where a trial continues, with its score there: whoever saved it may have ended before its report."""
        is_scored = state.epoch in self._study.rungs or self.pauses(state.number, state.epoch)
        score = state.history.get("scores", {}).get(state.epoch) if is_scored else None
        history = None if score is None else History.of(state.history).shown()
        self._search.send(began=state.number, epoch=state.epoch, score=score, history=history)

    def _sources(self, number: int, reached: int) -> list[TrialState | Path]:
        """Return where a trial may continue from, the latest first; of equals, what is in memory, then the newest."""
        found: list[tuple[int, int, TrialState | Path]] = []
        paused, handed = self._paused.get(number), self._handed.get(number)
        if paused is not None:
            found.append((paused.epoch, 0, paused))
        if handed is not None and handed.path.exists():
            found.append((handed.epoch, handed.place, handed.path))
        if self._directory is not None:
            files = checkpoint_files.found(checkpoint_files.trial_directory(self._directory, number))
            found += [(checkpoint_files.epoch_of(file), checkpoint_files.place_of(file), file) for file in files]
        may_be_within = number not in self._changed
        usable = [each for each in found if each[0] <= reached and (may_be_within or not each[1])]
        return [source for *_, source in sorted(usable, key=lambda each: each[:2], reverse=True)]

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether these are the same hyperparameters. NaN is not equal to itself."""
    return one == other or repr(one) == repr(other)
