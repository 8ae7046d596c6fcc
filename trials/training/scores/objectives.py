"""A trial's score: a number, or one for each of a study's objectives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.fusion.scores.params import NAME, takes_params
from trials.study import Study

Score = float | list[float]
"""A list has one number per objective, in the order of `Study.directions`."""


def every(score: Score) -> list[float]:
    """Return the number of each objective."""
    return score if isinstance(score, list) else [score]


def first_of(score: Score) -> float:
    """Return the first objective's."""
    return every(score)[0]


def score_functions(study: Study) -> dict[str, Callable[..., Tensor]]:
    """Return `Study.score` as functions to a scalar, by name: one for each objective.

    Each calls it, which costs little beside the model's forward.
    """
    if not study.directions:
        return {"score": study.score}
    functions: dict[str, Callable[..., Tensor]] = {}
    for objective in range(len(study.directions)):

        def one(outputs: Any, targets: Any, objective: int = objective) -> Tensor:
            return scores_of(study, study.score(outputs, targets))[objective]

        def one_of_params(outputs: Any, targets: Any, params: Any, objective: int = objective) -> Tensor:
            return scores_of(study, study.score(outputs, targets, **{NAME: params}))[objective]

        functions[f"score {objective}"] = one_of_params if takes_params(study.score) else one
    return functions


def scores_of(study: Study, given: Any) -> Sequence[Tensor]:
    """Return what `Study.score` gave as a scalar for each objective; plain numbers become tensors.

    Raises:
        FuseError: they are not as many as the study's directions, or one is no number.
    """
    count = len(study.directions)
    if not isinstance(given, (tuple, list)) or len(given) != count:
        found = f"{len(given)} values" if isinstance(given, (tuple, list)) else type(given).__name__
        raise FuseError(f"Study.score returned {found}; allowed: a tuple of {count}, one for each of its directions")
    return [value if isinstance(value, Tensor) else _as_tensor(value, at) for at, value in enumerate(given)]


def _as_tensor(value: Any, at: int) -> Tensor:
    try:
        return torch.tensor(float(value))
    except (TypeError, ValueError):
        raise FuseError(
            f"Study.score returned {value!r} as objective {at}; allowed: a scalar tensor or a number"
        ) from None


def joined_scores(study: Study, given: Any) -> Any:
    """Return what `Study.score` gave of one model as one tensor: a scalar, or ``[J]`` of J objectives."""
    return torch.stack([each.double() for each in scores_of(study, given)]) if study.directions else given


def per_trial_scores(study: Study, one: Callable[[str], Tensor], streams: Sequence[torch.Generator]) -> Tensor:
    """Return K trials' scores, ``[K]``, or ``[K, J]`` of J objectives.

    Args:
        study: the user's.
        one: returns what a function of `score_functions` gives, ``[K]``.
        streams: the trials'. In the trial alone one call gives all objectives, so each begins where the first did.
    """
    if not study.directions:
        return one("score")
    begun, found = [stream.get_state() for stream in streams], []
    for objective in range(len(study.directions)):
        for stream, state in zip(streams, begun, strict=True):
            stream.set_state(state)
        found.append(one(f"score {objective}").double())
    return torch.stack(found, 1)
