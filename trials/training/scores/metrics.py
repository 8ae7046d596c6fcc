"""Metrics of trials over the whole validation set: what a mean over batches cannot give, such as an F1 score."""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from trials.fusion.errors import FuseError, is_out_of_memory
from trials.fusion.own_code.trees import Hidden
from trials.own_logger import own_logger
from trials.study import Study
from trials.training.inputs.trees import mapped, row_of
from trials.training.scores.objectives import Score, first_of

log = own_logger(__name__)

Validated = tuple[Any, Any]
"""All trials' outputs for a batch of the validation set, ``y_KB...``, and its targets, ``t_B...``. On the CPU."""


def on_host(outputs: Any, targets: Any) -> Validated:
    """Return copies on the CPU."""
    copied: Validated = mapped(lambda tensor: tensor.detach().to("cpu", copy=True), (outputs, targets))
    return copied


def metrics_of(
    study: Study, numbers: Sequence[int], batches: Sequence[Validated], enter: Callable[[], None]
) -> list[dict[str, float]]:
    """Return the metrics of each trial. If one's cannot be computed, it has none, and the log says why.

    Args:
        study: the user's.
        numbers: the trials'.
        batches: the validation set.
        enter: asks the gate, before each trial.

    Raises:
        Exception: they cannot be computed for any trial.
    """
    targets = joined([targets for _, targets in batches], "targets")
    found: list[dict[str, float]] = []
    failed: list[Exception] = []
    for row, number in enumerate(numbers):
        enter()
        try:
            outputs = joined([row_of(outputs, row) for outputs, _ in batches], "outputs")
            own = mapped(Tensor.clone, targets)  # which the code may change
            found.append(_plain(study.metrics(outputs, own)))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failed.append(error)
            found.append({})
            log.warning("Study.metrics failed for trial %d: %s: %s", number, type(error).__name__, error)
    if len(failed) == len(numbers):
        raise failed[0]
    return found


def score_of(metrics: Mapping[str, float], name: str | Sequence[str]) -> Score:
    """Return the metric that is the trial's score, or those that are its scores; NaN where it has none.

    Raises:
        FuseError: it has others.
    """
    if not isinstance(name, str):
        return [first_of(score_of(metrics, each)) for each in name]
    if metrics and name not in metrics:
        raise FuseError(f"Study.metric is '{name}', and Study.metrics gave {sorted(metrics)}; allowed: one of these")
    return metrics.get(name, nan)


def joined(parts: Sequence[Any], what: str) -> Any:
    """Join the batches of a trial: tensors along their first axis, those without axes to one of all batches.

    Args:
        parts: one for each batch.
        what: they are, for error messages.

    Raises:
        FuseError: they differ in containers, plain values, or in shape beyond the first axis.
    """
    flat = [tree_flatten(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        raise _unlike(what, "in their containers or keys")
    leaves = [_joined(own, what) for own in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def _joined(own: Sequence[Any], what: str) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in own):
        if len({(leaf.shape[1:], leaf.ndim, leaf.dtype) for leaf in own}) > 1:
            raise _unlike(what, "in type, or in shape beyond the first axis")
        return torch.cat(list(own)) if own[0].ndim else torch.stack(list(own))
    if any(type(leaf) is not type(own[0]) for leaf in own):
        raise _unlike(what, "in type")
    if not isinstance(own[0], Hidden) and any(repr(leaf) != repr(own[0]) for leaf in own):
        raise _unlike(what, "in plain values")
    return own[0]


def _unlike(what: str, how: str) -> FuseError:
    return FuseError(f"the {what} of the validation batches differ {how}; Study.metrics gets them joined")


def _plain(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise FuseError(f"Study.metrics returned a {type(given).__name__}; allowed: a dict of numbers by name")
    try:
        return {str(name): float(value) for name, value in given.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise FuseError(f"Study.metrics returned something that is not a number: {error}") from error
