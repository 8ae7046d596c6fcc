"""Optuna's constraints: set in the user's `suggest`, or by a sampler's `constraints_func` of what trials score."""

import copy

import optuna
from optuna.samplers._base import _process_constraints_after_trial
from optuna.trial import FrozenTrial, TrialState

from trials.search.storage.database import is_away


def breaks(trial: FrozenTrial) -> bool:
    """Whether a trial breaks a constraint: those that are above 0, or no number, are broken, as for Optuna."""
    return not all(value <= 0 for value in trial.constraints.values())


def note_constraints(study: optuna.Study, trial_id: int) -> None:
    """Let the sampler's function say what a trial breaks that pauses. Optuna asks only once a trial has ended.

    A function that fails now says nothing: it may want what only ended trials have. Then Optuna asks again.

    Args:
        study: Optuna's.
        trial_id: of a trial that runs, with the score at which it pauses.
    """
    limits = getattr(study.sampler, "_constraints_func", None)
    if limits is None:
        return
    trial = copy.deepcopy(study._storage.get_trial(trial_id))
    try:
        _process_constraints_after_trial(limits, study, trial, TrialState.PRUNED)
    except (Exception, SystemExit) as error:
        if is_away(error):
            raise
