"""Samplers of finitely many points: when a further trial would only repeat one.

Optuna's own call `Study.stop` when the last trial ends. By then a search that asks ahead has repeated points.
"""

import optuna
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler
from optuna.trial import TrialState


def innermost(sampler: BaseSampler | None) -> BaseSampler | None:
    """The sampler in `sampler`, if that only fixes some of another's parameters; else `sampler` itself."""
    while (base := getattr(sampler, "_base_sampler", None)) is not None:
        sampler = base
    return sampler


def is_finite(sampler: BaseSampler) -> bool:
    """Whether `sampler` has finitely many points."""
    return isinstance(innermost(sampler), (GridSampler, BruteForceSampler))


def has_begun_all(study: optuna.Study) -> bool:
    """Whether the trials of `study` have begun every point of its sampler. Call it under the search workers' lock."""
    sampler = innermost(study.sampler)
    if sampler is None or not is_finite(sampler):
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
