"""What a study suggests must fit its storage: the other trials' parameters, and JSON."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.trial import FrozenTrial

from ds_hooks.shared.trial_attributes import PARAMS
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


def check_begun(study: Study, begun: FrozenTrial, reason: str) -> None:
    """Refuse a study with a hyperparameter that an earlier trial lacks, if the trial fails for want of it.

    It would end as failed, and what was trained of it would be lost.

    Args:
        study: the user's. It is asked to suggest the trial again.
        begun: the trial.
        reason: why it fails.

    Raises:
        StudyError: it names the hyperparameter.
    """
    suggested: dict[str, Any] = {}
    with suppress(Exception):
        suggested = study.suggest(_Again(begun.params, begun.number))
    lacks = suggested.keys() - json.loads(begun.user_attrs.get(PARAMS, "{}")).keys()
    name = next((name for name in lacks if reason.startswith(f"KeyError: {name!r}")), None)
    if name is not None:
        raise StudyError(
            f"trial {begun.number} was begun without hyperparameter {name!r}, which the study has now, and cannot go "
            f"on: {reason}; allowed: another study_name, or a default value for trials without it"
        )


class KeptTrial(optuna.Trial):  # type: ignore[misc]  # of an untyped package
    """A trial whose choices are the same once a storage has kept them: it would give a list for a tuple."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Choose one.

        Raises:
            StudyError: a choice is of a type that storages do not keep. Each later trial would fail for it.
        """
        for choice in choices:
            if choice is not None and not isinstance(choice, (bool, int, float, str)):
                raise StudyError(
                    f"parameter {name!r} has the choice {choice!r}, which a storage cannot keep; allowed: numbers, "
                    "texts, booleans and None, such as names by which the study looks it up"
                )
        return super().suggest_categorical(name, choices)


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


class _Again(_Recorder):
    """Suggests what a trial has, and the lowest value of what it lacks."""

    def __init__(self, params: dict[str, Any], number: int) -> None:
        super().__init__()
        self._params, self._number = params, number

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        return self._params[name] if name in self._params else super()._suggest(name, distribution)
