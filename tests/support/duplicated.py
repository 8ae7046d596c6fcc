"""The duplication oracle: a wide model that is a narrow one with each unit copied, and so must stay equal to it.

Each weight of the copy is the original's ÷ how many copies its inputs have, so that all sums are the same. Plain
PyTorch trains the copy; the narrow model is right if it makes the same outputs with its own settings.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trials.shrinking.roles import roles
from trials.shrinking.rules import multipliers
from trials.shrinking.scaled_optimizer import clip_gradients, scaled_groups

Blocks = Mapping[tuple[str, int], int]
"""A parameter and one of its axes -> how many units next to each other are copied together, such as those of a head."""

Fans = Mapping[str, tuple[int | None, int | None]]


@torch.no_grad()
def copy_units(surrogate: nn.Module, target: nn.Module, blocks: Blocks, fans: Fans) -> None:
    """Make `target` a copy of `surrogate` with more units of each kind."""
    found = roles(target, surrogate, fans)
    ours = dict(surrogate.state_dict(keep_vars=True))
    for name, into in target.state_dict(keep_vars=True).items():
        copied = ours[name]
        for axis, size in enumerate(into.shape):
            copies, block = size // copied.shape[axis], blocks.get((name, axis), 1)
            apart = copied.unflatten(axis, (-1, block))
            copied = apart.repeat_interleave(copies, axis).flatten(axis, axis + 1)
        into.copy_(copied * (found[name].r_in if name in found else 1))


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], clip: Callable[[], None] = lambda: None
) -> Tensor:
    """Train `model` on a loss of all its outputs. Returns these, one step after another."""
    made = []
    weights = None
    for x in batches:
        optimizer.zero_grad()
        y = model(x)
        if weights is None:
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        ((y - weights) ** 2).mean().backward()
        clip()
        optimizer.step()
        made.append(y.detach().flatten())
    return torch.cat(made)


def error_of(
    make: Callable[[int], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: list[Tensor],
    blocks: Blocks | None = None,
    fans: Fans | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> tuple[float, float]:
    """Train a model at width ÷ 1 and ÷ 4, as ``make(by)`` returns it, and compare the outputs.

    Returns:
        The largest difference, as a share of the largest change of an output; and the same with plain settings.
    """
    torch.manual_seed(0)
    target, surrogate, plain = (make(by).double() for by in (1, 4, 4))
    plain.load_state_dict(surrogate.state_dict())
    copy_units(surrogate, target, blocks or {}, fans or {})
    found = roles(target, surrogate, fans)
    made = optimizer(surrogate.named_parameters())
    scales = multipliers(found, made)
    own = [(p, scales[n]) for n, p in surrogate.named_parameters() if n in scales]
    scaled_groups(made, found)

    def clip_as_plain(model: nn.Module) -> Callable[[], None]:
        def clip() -> None:
            if clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

        return clip

    wide = trained(target, optimizer(target.named_parameters()), batches, clip_as_plain(target))
    narrow = trained(surrogate, made, batches, lambda: clip_gradients(own, clip_norm, clip_value))
    unscaled = trained(plain, optimizer(plain.named_parameters()), batches, clip_as_plain(plain))
    size = wide.numel() // len(batches)
    moved = (wide.view(len(batches), size) - wide[:size]).abs().max()
    return float((wide - narrow).abs().max() / moved), float((wide - unscaled).abs().max() / moved)
