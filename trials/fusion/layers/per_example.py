"""Layers that treat each example of the batch alone: the axis K becomes part of the batch."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.registry import CallRule, Layer, call_rule, rule


def fold(x_K: Tensor, batched_ndim: int, call: Callable[[Tensor], Any]) -> Any:
    """Apply `call`, which takes a batch, to the examples of all trials.

    Args:
        x_K: ``x_KB...``, or ``x_K...`` of trials without a batch.
        batched_ndim: how many axes a batch has; one less is a single example, and K is then the batch.
        call: from a batch to a batch, or to a tuple of them.
    """
    if x_K.ndim <= batched_ndim:
        return call(x_K)
    lead = x_K.shape[:2]
    y = call(x_K.flatten(0, 1))
    return y.unflatten(0, lead) if isinstance(y, Tensor) else tuple(part.unflatten(0, lead) for part in y)


def ranks(*kinds: str, axes: Sequence[int] = (1, 2, 3)) -> dict[type[nn.Module], int]:
    """The layer types of `kinds` for each number of axes (such as ``MaxPool2d``) -> the axes of their batches."""
    found = {f"{kind}{n}d": n + 2 for kind in kinds for n in axes}
    return {getattr(nn, name): ndim for name, ndim in found.items() if hasattr(nn, name)}


_BATCHED: dict[type[nn.Module], int] = {
    **ranks("MaxPool", "AvgPool", "LPPool", "AdaptiveAvgPool", "AdaptiveMaxPool"),
    **ranks("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad"),
    nn.PixelShuffle: 4,
    nn.PixelUnshuffle: 4,
    nn.Fold: 3,
    nn.Unfold: 4,
    # these always take a batch, with any number of axes
    nn.Upsample: 0,
    nn.UpsamplingNearest2d: 0,
    nn.UpsamplingBilinear2d: 0,
    nn.ChannelShuffle: 0,
    nn.LocalResponseNorm: 0,
}


@rule(*_BATCHED)
class FusedPerExample(Layer):
    """A layer without parameters that treats each example alone, in one call for all trials."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.call = copy.copy(module).forward
        self.batched_ndim = _BATCHED[type(module)]

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        """``x_KBC...`` or ``x_BC...`` to what the layer gives; pooling may give indices too, within each example."""
        return (fold(x, self.batched_ndim, self.call) if per_trial else self.call(x)), per_trial


def _anything(*args: Any, **kwargs: Any) -> None:
    """The signature of the functions below: their first input is the batch, and the others are numbers."""


def _call_rule(function: Callable[..., Any], batched_ndim: int) -> CallRule:
    def call(values: Sequence[Any], per_trial: Sequence[bool], generators: list[torch.Generator]) -> tuple[Any, bool]:
        args, kwargs = values
        if not any(per_trial):
            return function(*args, **kwargs), False
        options = dict(kwargs)
        x, rest = (args[0], args[1:]) if args else (options.pop("input"), ())
        return fold(x, batched_ndim, lambda x_N: function(x_N, *rest, **options)), True

    return call


_POOLS = ("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
for _axes in (1, 2, 3):
    for _name in (f"{kind}{_axes}d{suffix}" for kind in _POOLS for suffix in ("", "_with_indices")):
        if hasattr(functional, _name):
            _function = getattr(functional, _name)
            call_rule(_function, like=_anything)(_call_rule(_function, _axes + 2))
call_rule(functional.interpolate, like=_anything)(_call_rule(functional.interpolate, 0))
