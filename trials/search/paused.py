"""Paused trials in Optuna's storage: they are waiting ones that have a score at their milestone."""

import copy
from collections.abc import Container, Iterable, Sequence
from math import isnan
from typing import Any, Literal

import optuna
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, TrialState

from trials.search.attributes import MILESTONE, PARAMS, WORKER
from trials.search.promotion import Standing


def is_paused(trial: FrozenTrial) -> bool:
    """Whether it waits for its promotion.

    Since the score is written first, this holds also if its worker has died before it could release the trial.
    """
    return trial.state is TrialState.WAITING and trial.user_attrs.get(MILESTONE) in trial.intermediate_values


def last_score(trial: FrozenTrial) -> list[float] | None:
    """Return the values of a paused trial if it were pruned, as `tell` chooses them; None: it has no number."""
    last = trial.intermediate_values[trial.user_attrs[MILESTONE]]
    return None if isnan(last) else [last]


def standings(trials: Sequence[FrozenTrial], first: int, epochs: int) -> list[Standing]:
    """Return how far trials are; of those that run, only what our workers have begun.

    Args:
        trials: all of the study.
        first: the milestone of a new trial.
        epochs: that of trials that someone has added complete.
    """
    ours = (each for each in trials if each.state is not TrialState.RUNNING or WORKER in each.user_attrs)
    return [_standing(trial, first, epochs) for trial in ours]


def _standing(trial: FrozenTrial, first: int, epochs: int) -> Standing:
    milestone = trial.user_attrs.get(MILESTONE, epochs if trial.state.is_finished() else first)
    state: Literal["open", "paused", "ended", "failed"] = "ended" if trial.state.is_finished() else "open"
    if trial.state is TrialState.FAIL:
        state = "failed"
    elif is_paused(trial):
        state = "paused"
    return Standing(trial.number, trial.intermediate_values, milestone, state)


class PausedKept(_CachedStorage):  # type: ignore[misc]  # of an untyped package
    """Optuna's cache of a database, which keeps paused trials too.

    Optuna reads all unfinished trials at each call, and under promotion most trials are: one in three gets past a rung.
    A paused trial stays as it is until someone claims it, or ends the study.
    """

    def look_again(self, study_id: int, numbers: Iterable[int]) -> None:
        """Read these trials of a study anew at the next call."""
        with self._lock:
            found = (self._study_id_and_number_to_trial_id.get((study_id, number)) for number in numbers)
            for trial_id in found:
                if trial_id is not None and self._get_cached_trial(trial_id) is None:  # it has not ended
                    self._studies[study_id].unfinished_trial_ids.add(trial_id)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """See `BaseStorage`."""
        is_set: bool = super().set_trial_state_values(trial_id, state, values)
        study_id, number = self._trial_id_to_study_id_and_number[trial_id]
        self.look_again(study_id, [number])
        return is_set

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        super()._read_trials_from_remote_storage(study_id)
        with self._lock:
            study, ids = self._studies[study_id], self._trial_id_to_study_id_and_number
            unfinished = study.unfinished_trial_ids
            # all up to here have been read: Optuna creates a study's trials one after another, under a lock
            study.last_finished_trial_id = max((study.last_finished_trial_id, *unfinished))
            study.unfinished_trial_ids = {each for each in unfinished if not is_paused(study.trials[ids[each][1]])}


class Shown:
    """A storage for samplers. They see no waiting trials, so it shows paused ones as pruned, with their last score.

    Trials that were begun and now wait for another worker are shown as running.

    Args:
        storage: where all else is read and written.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """See `BaseStorage`."""
        shown = [_shown(trial) for trial in self._storage.get_all_trials(study_id, deepcopy=deepcopy)]
        return shown if states is None else [trial for trial in shown if trial.state in states]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def as_samplers_see(study: optuna.Study) -> optuna.Study:
    """Return the same study, whose sampler learns from paused trials."""
    seen = optuna.Study(study.study_name, study._storage, study.sampler, study.pruner)
    seen._storage = Shown(study._storage)
    seen.stop = study.stop
    return seen


def _shown(trial: FrozenTrial) -> FrozenTrial:
    if trial.state is not TrialState.WAITING or PARAMS not in trial.user_attrs:
        return trial
    shown = copy.copy(trial)
    shown.state = TrialState.RUNNING
    if is_paused(trial):
        shown.state, shown.values = TrialState.PRUNED, last_score(trial)
    return shown
