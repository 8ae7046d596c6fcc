"""Samplers of finitely many points: when a further trial would only repeat one.

Optuna's own call `Study.stop` when the last trial ends. By then a search that asks ahead has repeated points.
"""

import optuna
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler
from optuna.trial import TrialState


def is_finite(sampler: BaseSampler) -> bool:
    """Whether `sampler` has finitely many points."""
    return isinstance(sampler, (GridSampler, BruteForceSampler))


def has_begun_all(study: optuna.Study) -> bool:
    """Whether the trials of `study` have begun every point of its sampler. Call it under the search workers' lock."""
    sampler = study.sampler
    if not is_finite(sampler):
        return False
    trials = study.get_trials(deepcopy=False)
    if isinstance(sampler, GridSampler):
        grids = [trial.system_attrs for trial in trials if "grid_id" in trial.system_attrs]
        begun = {grid["grid_id"] for grid in grids if sampler._same_search_space(grid["search_space"])}
        return bool(len(begun) == sampler._n_min_trials)
    with_params = [trial for trial in trials if trial.params and trial.state is not TrialState.WAITING]
    if not with_params:
        return False
    stops = _Stops(study)
    sampler.after_trial(stops, with_params[-1], TrialState.PRUNED, None)  # it looks at all trials, and only stops
    return stops.called


class _Stops:
    """A study that notes whether the sampler would stop it."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self.called = False

    def stop(self) -> None:
        self.called = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._study, name)
