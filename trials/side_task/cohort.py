"""Cohorts of trials that can be fused, and how many of them may be without units too long for the bubbles."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from ds_hooks.shared import statuses
from trials.gate.base import HOST_UNIT, Gate, Starved
from trials.own_logger import own_logger
from trials.study import Study
from trials.training.audits.audit import Audit
from trials.training.group import TrialGroup
from trials.training.inputs.batches import Batch, Reader, by_place, fuse_batches, rounds, shapes
from trials.training.inputs.side_by_side import SideBySide
from trials.training.member import Member, structure_name

UNLIKE_EPOCHS = "the study's epochs differ in the number or the form of their batches"
TRIES = 3
"""How often in a row not even one trial finds memory, until its structure counts as too large: the main job, or others
on the device, may have needed more for a moment."""

log = own_logger(__name__)


class Fit:
    """Limits on fusing trials of one structure.

    Attributes:
        most: how many trials a group may have without a unit longer than the bubbles.
        key: what they have in common, see `group_key`.
        structure: its name.
        mixes: whether trials of a group may be at different epochs.
        audit: compares them with the trials alone, and knows how they may be trained.
    """

    def __init__(self, most: int, key: Hashable = (), mixes: bool = True, audit: Audit | None = None) -> None:
        """So far nothing else is known."""
        self.most = most
        self.key, self.structure = key, structure_name(key)
        self.mixes = mixes
        self.audit = audit
        self._shortages = 0
        self._needs_ns: dict[str, dict[int, int]] = {}
        self._reported: set[str] = set()

    def is_too_large(self) -> bool:
        """Whether, as once more not even one trial has found memory, none will."""
        self._shortages += 1
        return self._shortages >= TRIES

    def has_trained(self) -> None:
        """Forget how often there was no memory."""
        self._shortages = 0

    def may_halve(self, found: Starved) -> bool:
        """Whether a group of half the trials may make the unit short enough.

        Not so if a straight line through its times with these and with more trials stays too long for one trial.
        """
        known_ns = self._needs_ns.setdefault(found.unit, {})
        known_ns[found.trials] = found.needs_ns
        if found.trials == 1:
            return False
        more = min((trials for trials in known_ns if trials > found.trials), default=None)
        if more is None:
            return True
        per_trial_ns = (known_ns[more] - found.needs_ns) / (more - found.trials)
        return found.needs_ns - (found.trials - 1) * per_trial_ns <= found.longest_ns

    def is_news(self, unit: str) -> bool:
        """Whether this is the first call for `unit`."""
        if unit in self._reported:
            return False
        self._reported.add(unit)
        return True


def starved_status(found: Starved, remedy: str) -> statuses.Starved:
    """What the daemon hears of a unit that is too long, and of the remedy."""
    return statuses.Starved(
        unit=found.unit,
        trials=found.trials,
        needs_ms=round(found.needs_ns / 1e6, 3),
        longest_bubble_ms=round(found.longest_ns / 1e6, 3),
        remedy=remedy,
    )


class Cohort:
    """Trials of one structure, each at an epoch of its own. All begin their epochs together.

    Trials that were saved in the middle of an epoch continue there, in groups of their own until that epoch ends.

    Args:
        study: the user's.
        gate: the groups'.
        fit: the limits of their structure.
        beside: knows whether epochs can be read side by side.

    Attributes:
        groups: the trials' groups: one, or several that take turns with every batch.
        fit: see above.
        epoch_s: how long its last epoch took, bubbles and what lies between them.
    """

    def __init__(self, study: Study, gate: Gate, fit: Fit, beside: SideBySide) -> None:
        """No trial is there yet."""
        self.fit, self.epoch_s = fit, 0.0
        self.groups: list[TrialGroup] = []
        self._marks: dict[int, str] = {}
        self._resumed: list[TrialGroup] = []
        self._study, self._gate, self._beside = study, gate, beside

    @property
    def numbers(self) -> list[int]:
        """The trials' numbers."""
        return [number for group in self.groups for number in group.numbers]

    @property
    def readers(self) -> list[Reader]:
        """The trials, and the epoch that each trains next."""
        return [reader for group in self.groups for reader in group.readers()]

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The trials, as the search worker sends them."""
        return [{"number": reader.number, "params": reader.params} for reader in self.readers]

    def add(self, members: Sequence[Member]) -> None:
        """Let `members` begin with the next epoch, in groups that have room for them or in new ones.

        After any error, trials that are no longer in the cohort are lost.

        Raises:
            FuseError: they cannot be fused.
        """
        for place in dict.fromkeys(member.place for member in members):
            self._add([member for member in members if member.place == place], place)

    def _add(self, waiting: list[Member], place: int) -> None:
        most = self.fit.most
        for group in tuple(self.groups) if self.fit.mixes else ():
            room = max(most - group.size, 0) if group.place == place else 0
            joining, waiting = waiting[:room], waiting[room:]
            if joining:
                join = group.to_add(joining)
                self.groups.remove(group)  # a group that fails to take them all is in pieces
                join()
                self.groups.append(group)
        count = ceil(len(waiting) / most)
        for first in range(count):
            self.groups.append(self._fused(waiting[first::count]))
            self._resumed += self.groups[-1:] if place else []

    def mark(self, number: int) -> str:
        """Return the mark of what a trial has got in the epoch under way, see `BatchesSeen`; empty: it is not known."""
        return self._marks.get(number, "")

    def epoch_ended(self) -> None:
        """Let groups that began in the middle of the epoch be one with others, where these have room."""
        resumed, self._resumed = self._resumed, []
        for group in resumed:
            room = self.fit.most - group.size
            others = [each for each in self.groups if each is not group and each.size <= room]
            if not self.fit.mixes:
                others = [each for each in others if len({*each.epochs_done, *group.epochs_done}) == 1]
            if others and group in self.groups:
                others[0].merge(group)
                self.groups.remove(group)

    def batches(self) -> Iterator[tuple[TrialGroup, Any, Any, bool]]:
        """Yield the batches of each trial's epoch, for all groups in turn, with the arguments of `train_step`.

        Each epoch is read once from each place: side by side if trials at different epochs mix, else one after another.
        A group may be split meanwhile; both halves continue with the next batch.

        Raises:
            ReplayError: see `rounds` and `SideBySide.note`.
        """
        self._marks.clear()
        for readers in self._readable():
            yield from self._trained(readers)

    def _readable(self) -> list[list[Reader]]:
        """Return the trials in parts that are read one after another. The batches of each are as in the trial alone."""
        if self.fit.mixes and (cause := self._beside.disturbed(self.readers)):
            self.part_epochs(cause)
        if self.fit.mixes:
            return [self.readers]
        return [each for here in by_place(self.readers).values() for each in self._at_one_place(here)]

    def _at_one_place(self, readers: list[Reader]) -> list[list[Reader]]:
        cause = self._beside.disturbed(readers)
        if not cause:
            return [readers]
        if self.fit.most > 1:
            log.warning("%s: each is trained alone", cause)
            self.fit.most = 1
        return [[reader] for reader in readers]

    def halve(self, group: TrialGroup) -> None:
        """Split `group` in two. No trial's result changes. Call `use_units` of one before it runs."""
        half = group.size // 2
        self.fit.most = min(self.fit.most, group.size - half)
        self._split(group, group.numbers[group.size - half :])

    def drop(self, numbers: Collection[int]) -> bool:
        """Let trials go, if they are here. Returns whether any was. Call `use_units` of a group before it runs."""
        found = [group for group in self.groups if not set(group.numbers).isdisjoint(numbers)]
        for group in found:
            self._gate.enter(HOST_UNIT)
            group.keep([row for row, number in enumerate(group.numbers) if number not in numbers])
        self.drop_empty()
        return bool(found)

    def drop_empty(self) -> None:
        """Forget groups without trials."""
        self.groups = [group for group in self.groups if group.size]

    def _fused(self, members: Sequence[Member]) -> TrialGroup:
        return TrialGroup(self._study, members, self._gate, self.fit.audit)

    def _split(self, group: TrialGroup, numbers: Sequence[int]) -> TrialGroup:
        self.groups.append(group.split([group.numbers.index(number) for number in numbers]))
        return self.groups[-1]

    def _trained(self, readers: Sequence[Reader]) -> Iterator[tuple[TrialGroup, Any, Any, bool]]:
        marks: dict[int, str] = {}
        for batches in rounds(self._study, readers, lambda: self._gate.enter(HOST_UNIT), marks):
            for group in tuple(self.groups):
                for part in self._alike(group, batches):
                    chosen = [batches[number] for number in part.numbers if number in batches]
                    if chosen:
                        self._marks.update((number, marks[number]) for number in part.numbers)
                        yield (part, *fuse_batches(chosen))
        self._beside.note(readers, marks)

    def part_epochs(self, cause: str) -> None:
        """Put trials at different epochs in different groups from now on, and log the cause."""
        log.warning("%s: trials at different epochs are not fused, but take turns", cause)
        self.fit.mixes = False

    def _alike(self, group: TrialGroup, batches: Mapping[int, Batch]) -> list[TrialGroup]:
        """Return `group`, in parts if some of its trials have batches of different forms, or none."""
        distinct = {id(batch): batch for batch in map(batches.get, group.numbers)}  # computed in every step
        if len(set(map(shapes, distinct.values()))) == 1:
            return [group]
        alike: dict[object, list[int]] = {}
        for number in group.numbers:
            alike.setdefault(shapes(batches.get(number)), []).append(number)
        if self.fit.mixes:
            self.part_epochs(UNLIKE_EPOCHS)
        found = [group, *(self._split(group, numbers) for numbers in list(alike.values())[1:])]
        group.use_units()
        return found
