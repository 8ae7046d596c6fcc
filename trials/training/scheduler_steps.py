"""Steps the schedulers of trials, and tries whether a checkpoint holds all on which their rates depend."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trials.fusion.errors import RefusedError
from trials.fusion.own_code.streams import undisturbed
from trials.optim.duplicate import stand_in
from trials.optim.packed import inside_of
from trials.optim.several import Optimizers, as_given
from trials.study import Study
from trials.training.inputs.schedulers import new_schedulers
from trials.training.progress import Progress
from trials.training.roster import Roster
from trials.training.scores.objectives import Score

Holders = Mapping[str, torch.optim.Optimizer]


class SchedulerSteps:
    """Steps the schedulers of all trials of a group.

    One trial's have a twin: the same as a checkpoint gives them back, which steps beside them and must set the same
    numbers. A new one begins in each epoch, for what a `state_dict` lacks may begin to change late. Another begins at
    the first, second, fourth, eighth ... step, so that each lives twice as long as the last, for it may matter late.

    Args:
        study: the user's.
    """

    def __init__(self, study: Study) -> None:
        self._study, self._count = study, 0
        self._twins: dict[str, _Twin] = {}
        self._is_new_epoch = self._is_due = True

    def begin_epoch(self) -> None:
        """Begin the epoch's twin at the next step."""
        self._is_new_epoch = True

    def forget(self) -> None:
        """Begin new twins at the next step, because the trials have changed."""
        self._twins = {}
        self._is_new_epoch = self._is_due = True

    def step(self, roster: Roster, optimizers: Optimizers, scores: Sequence[Score] | None = None) -> None:
        """Step those that act on `scores`; None: the others.

        Raises:
            RefusedError: a twin has set other numbers; or see `Progress.step`.
        """
        if not any(trial.schedulers for trial in roster.progress):
            return
        self._count += 1
        if self._is_due or not self._count & (self._count - 1):
            self._begin("old", roster, optimizers, self._count.bit_length())
        if self._is_new_epoch:
            self._begin("young", roster, optimizers, self._count)
        self._is_due = self._is_new_epoch = False
        before = {name: twin.numbers() for name, twin in self._twins.items()}
        for row, trial in enumerate(roster.progress):
            _step(trial, None if scores is None else scores[row])
        self._twins = {name: twin for name, twin in self._twins.items() if twin.agrees(before[name], scores)}
        optimizers.changed()

    def _begin(self, name: str, roster: Roster, optimizers: Optimizers, draw: int) -> None:
        twin = _twin_of(self._study, roster, optimizers, draw % len(roster))
        self._twins.pop(name, None)
        if twin is not None:
            self._twins[name] = twin


def _step(trial: Progress, score: Score | None) -> None:
    if score is None:
        trial.step()
    else:
        trial.step_on(score)


class _Twin:
    """Schedulers made anew, on optimizers of their own without tensors.

    Args:
        progress: has them.
        holders: the hyperparameters of the trial's own optimizers.
        own: the same for the twin.
        row: the trial's.
    """

    def __init__(self, progress: Progress, holders: Holders, own: Holders, row: int) -> None:
        self._progress, self._holders, self._own, self._row = progress, holders, own, row

    def numbers(self) -> list[dict[str, Any]]:
        """Return the numbers in the trial's param groups."""
        return _numbers(self._holders)

    def agrees(self, before: list[dict[str, Any]], scores: Sequence[Score] | None) -> bool:
        """Step, from the numbers that were there before the trial's own step. Returns whether it can.

        Raises:
            RefusedError: they are others now than the trial's.
        """
        groups = [group for optimizer in self._own.values() for group in optimizer.param_groups]
        for group, numbers in zip(groups, before, strict=True):  # optimizers, or the user, may have set them
            group.update(numbers)
        try:
            _step(self._progress, None if scores is None else scores[self._row])
        except Exception:  # after a restart it would come again, and be heard
            return False
        for ours, theirs in zip(_numbers(self._own), self.numbers(), strict=True):
            for name, value in theirs.items():
                if not _same(ours.get(name), value):
                    raise self._refused(name, ours.get(name), value)
        return True

    def _refused(self, name: str, ours: Any, theirs: Any) -> RefusedError:
        kinds = " and ".join(dict.fromkeys(type(each).__name__ for each in self._progress.schedulers))
        return RefusedError(
            f"{kinds} from Study.scheduler, given back by a checkpoint, sets {name} = {ours!r} in place of {theirs!r}; "
            "allowed: functions of the epoch alone, and schedulers whose state_dict has all on which their rates depend"
        )


def _twin_of(study: Study, roster: Roster, optimizers: Optimizers, row: int) -> _Twin | None:
    """Return the twin of a trial's schedulers in their present state; None: there is nothing to try."""
    progress, holders = roster.progress[row], optimizers.holders[row]
    if not progress.schedulers or any(len(inside_of(each)) > 1 for each in holders.values()):
        return None  # a copy without tensors would act on the optimizers inside
    own = {phase: stand_in(holder).made for phase, holder in holders.items()}
    try:
        with undisturbed():
            schedulers = new_schedulers(study, roster.params[row], as_given(own))
            twin = Progress(schedulers, _has_stepped=True)
            twin.load_state_dict(progress.state_dict())
    except Exception:  # after a restart it would come again, and be heard
        return None
    return _Twin(twin, holders, own, row)


def _numbers(holders: Holders) -> list[dict[str, Any]]:
    """Return the plain numbers in param groups, and tuples of them."""
    groups = [group for optimizer in holders.values() for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if _is_plain(value)} for group in groups]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and math.isnan(one + other))
