"""Random numbers that a model's own code draws in the shape of a tensor, such as a variational autoencoder's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.fusion.layers.memory_order import as_ordered, order_of
from trials.fusion.own_code.streams import lent
from trials.fusion.registry import CallRule, FuseError, call_rule

Fill = Callable[[Tensor, torch.Generator], Tensor]


def _like(
    input: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> None:
    """The signature of the functions below."""


def _call_rule(function: Callable[..., Tensor], fill: Fill) -> CallRule:
    """The rule for a `function` that makes a tensor like its input: each trial's comes from its own random stream.

    On a CPU, `fill` draws the same numbers from a stream that it is given.
    """

    def draw(like: Tensor, options: dict[str, Any], stream: torch.Generator) -> Tensor:
        if like.device.type == "cpu":
            return fill(torch.empty_like(like, **options), stream)
        with lent(stream):  # a graph that records it has to know
            return function(like, **options)

    def call(values: Sequence[Any], per_trial: Sequence[bool], streams: list[torch.Generator]) -> tuple[Tensor, bool]:
        x, dtype, *others, memory_format = values
        if any(other not in (None, False) for other in others):
            name = function.__name__
            raise FuseError(f"{name} is called with layout, device, requires_grad or pin_memory; allowed: without")
        options = {"dtype": dtype, "memory_format": memory_format}
        drawn = [draw(x[row] if per_trial[0] else x, options, stream) for row, stream in enumerate(streams)]
        return as_ordered(torch.stack(drawn), order_of(drawn[0])), True

    return call


call_rule(torch.randn_like, like=_like)(_call_rule(torch.randn_like, lambda new, stream: new.normal_(generator=stream)))
call_rule(torch.rand_like, like=_like)(_call_rule(torch.rand_like, lambda new, stream: new.uniform_(generator=stream)))
