"""Losses and reductions of K trials, without the overhead of `vmap`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trials.fusion.own_code.functional import JOINT, MOVED

_FEW_CLASSES, _MANY_TRIALS = 16, 8
"""A softmax over a shorter axis than this leaves the processor's vectors unused; many trials side by side fill them."""


def _cross_entropy(
    x_KBC: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`functional.cross_entropy` of class numbers (``[1, B]`` or ``[K, B]``), without class weights."""
    if weight is not None or size_average is not None or reduce is not None or reduction != "mean":
        return NotImplemented
    return _of_classes(
        functional.cross_entropy,
        x_KBC,
        target,
        ignore_index,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def _nll_loss(x_KBC: Tensor, target: Tensor) -> Any:
    return _of_classes(functional.nll_loss, x_KBC, target, -100)


def _of_classes(loss: Callable[..., Tensor], x_KBC: Tensor, target: Tensor, ignored: int, **options: Any) -> Any:
    """The mean over each trial's examples whose class is not `ignored`."""
    if x_KBC.ndim != 3 or target.is_floating_point():
        return NotImplemented
    size, batch, classes = x_KBC.shape
    if size == 1:
        return loss(x_KBC[0], target[0], **options).unsqueeze(0)
    target_KB = target.expand(size, batch)
    if classes <= _FEW_CLASSES and size >= _MANY_TRIALS:
        losses_BK = loss(x_KBC.permute(1, 2, 0), target_KB.t(), reduction="none", **options)
        losses_K = losses_BK.sum(0)
    else:
        losses = loss(x_KBC.flatten(0, 1), target_KB.reshape(-1), reduction="none", **options)
        losses_K = losses.view(size, batch).sum(1)
    return losses_K / (target != ignored).sum(-1)


def _elementwise(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """A loss that compares two tensors of one shape, and averages."""

    def call(x_K: Tensor, target: Tensor) -> Any:
        if target.shape[1:] != x_K.shape[1:] or x_K.ndim < 2:
            return NotImplemented
        if len(x_K) == 1:
            return loss(x_K[0], target[0]).unsqueeze(0)
        return loss(x_K, target.expand_as(x_K), reduction="none").flatten(1).mean(1)

    return call


def _whole(reduce: Callable[..., Tensor], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction over all of a trial's axes, called without naming any."""

    def call(x_K: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return otherwise(x_K, *args, **kwargs)
        return reduce(x_K.flatten(1), 1) if x_K.ndim > 1 else x_K

    return call


def _argmax(x_K: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return x_K.argmax(dim + 1 if dim >= 0 else dim, keepdim)


MOVED[functional.cross_entropy] = _cross_entropy
MOVED[functional.nll_loss] = _nll_loss
_ELEMENTWISE_LOSSES = (
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
)
for _loss in _ELEMENTWISE_LOSSES:
    MOVED[_loss] = _elementwise(_loss)
JOINT.update((functional.cross_entropy, functional.nll_loss, *_ELEMENTWISE_LOSSES))
MOVED[torch.argmax] = MOVED["argmax"] = _argmax
MOVED[torch.mean] = MOVED["mean"] = _whole(torch.mean, MOVED["mean"])
MOVED[torch.sum] = MOVED["sum"] = _whole(torch.sum, MOVED["sum"])
