"""Paused trials in Optuna's storage: they are waiting ones that have a score at their milestone."""

import copy
from collections.abc import Container
from math import isnan
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.trial_attributes import MILESTONE, PARAMS, WORKER
from trials.search.choice.constraints import breaks
from trials.search.choice.promotion import Standing


def is_paused(trial: FrozenTrial) -> bool:
    """Whether it waits for its promotion.

    Since the score is written first, this holds also if its worker has died before it could release the trial.
    """
    return trial.state is TrialState.WAITING and trial.user_attrs.get(MILESTONE) in trial.intermediate_values


def last_score(trial: FrozenTrial) -> list[float] | None:
    """Return the values of a paused trial if it were pruned, as `tell` chooses them; None: it has no number."""
    last = trial.intermediate_values[trial.user_attrs[MILESTONE]]
    return None if isnan(last) else [last]


def standing_of(trial: FrozenTrial, first: int, epochs: int) -> Standing | None:
    """Return how far a trial is; None: it runs, and none of our workers has begun it.

    Args:
        trial: of the study.
        first: the milestone of a new trial.
        epochs: that of trials that someone has added complete.
    """
    if trial.state is TrialState.RUNNING and WORKER not in trial.user_attrs:
        return None
    milestone = trial.user_attrs.get(MILESTONE, epochs if trial.state.is_finished() else first)
    state: Literal["open", "paused", "ended", "failed"] = "ended" if trial.state.is_finished() else "open"
    if trial.state is TrialState.FAIL:
        state = "failed"
    elif is_paused(trial):
        state = "paused"
    scores = dict(trial.intermediate_values)  # Optuna's `Trial.report` writes to old copies too
    return Standing(trial.number, scores, milestone, state, breaks(trial))


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
