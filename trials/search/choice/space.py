"""What a study suggests must fit its storage: the other trials' parameters, and JSON."""

import json
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, check_distribution_compatibility

from trials.search.storage.database import patiently
from trials.study import Study
from trials.study_error import StudyError


def check_space(study: Study, known: optuna.Study) -> None:
    """Refuse a study whose parameters are of another kind than those of the same name in the storage.

    Each of its trials would fail, and use up the budget of the study that was there first.

    Args:
        study: the user's. It is asked to suggest a trial of the lowest values.
        known: Optuna's study of that name.

    Raises:
        StudyError: it names the first such parameter.
    """
    theirs: dict[str, BaseDistribution] = {}
    for trial in reversed(patiently(lambda again: known.get_trials(deepcopy=False))):
        theirs |= trial.distributions
    ours = _Recorder()
    if theirs:
        try:
            study.suggest(ours)  # it has what `suggest` may use
        except Exception:  # it depends on more than that, or fails: then on each trial, with its reason
            pass
    for name in ours.distributions.keys() & theirs.keys():
        try:
            check_distribution_compatibility(theirs[name], ours.distributions[name])
        except ValueError as error:
            raise StudyError(
                f"study '{known.study_name}' is in this storage with another space: parameter '{name}' is "
                f"{theirs[name]} there and {ours.distributions[name]} here ({error}); allowed: another study_name"
            ) from None


def as_json(params: dict[str, Any]) -> str:
    """Write what a study has suggested.

    Raises:
        TypeError: it is no dict, or JSON cannot hold it; the message names the parameter.
    """
    if not isinstance(params, dict):
        raise TypeError(f"it returned {params!r}; allowed: a dict of hyperparameters")
    for name, value in params.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"parameter {name!r} = {value!r} cannot be kept: {error}; "
                "allowed: numbers, texts, booleans, None, and lists and dicts of them"
            ) from None
    return json.dumps(params)


class _Recorder(optuna.trial.FixedTrial):  # type: ignore[misc]  # of an untyped package
    """Suggests the lowest value, or the first choice, of whatever is asked for."""

    def __init__(self) -> None:
        super().__init__({})

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self._distributions.setdefault(name, distribution)
        choices = getattr(distribution, "choices", None)
        return distribution.low if choices is None else choices[0]
