"""Losses and scores of random models: they do what is easily lost where trials are fused, too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.support.random_models.surroundings import Scaled, Straight

Loss = Callable[[Any, Tensor], Tensor]


def parts(outputs: Any) -> list[Tensor]:
    """All tensors of the outputs, in float32 at least."""
    found = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
    return [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in found]


def plain(outputs: Any, targets: Tensor) -> Tensor:
    values = [part.tanh() for part in parts(outputs)]
    return torch.stack([(value + value.square()).mean() for value in values]).sum() * targets.mean()


def partly(outputs: Any, targets: Tensor) -> Tensor:
    with torch.no_grad():
        weight = plain(outputs, targets).sigmoid()
    return weight * plain(outputs, targets)


@torch.enable_grad()
def enabled(outputs: Any, targets: Tensor) -> Tensor:
    return plain(outputs, targets) * 2


@torch.no_grad()
def constant(outputs: Any, targets: Tensor) -> Tensor:
    return plain(outputs, targets).exp()


@torch.inference_mode()
def inferred(outputs: Any, targets: Tensor) -> Tensor:
    return plain(outputs, targets) * 3


def uncast(outputs: Any, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = parts(outputs)[0]
        return plain(outputs, targets) + 0.1 * (y.flatten() @ y.flatten()).tanh()


def asked(outputs: Any, targets: Tensor) -> Tensor:
    return plain(outputs, targets) * (0.5 if isinstance(parts(outputs)[0], Tensor) else 2.0)


def branched(outputs: Any, targets: Tensor) -> Tensor:
    value = plain(outputs, targets)
    return value * 2 if parts(outputs)[0].mean() > 0 else value


def straight(outputs: Any, targets: Tensor) -> Tensor:
    return plain(Straight.apply(parts(outputs)[0] * 4), targets) + plain(outputs, targets)


def scaled(outputs: Any, targets: Tensor) -> Tensor:
    y = parts(outputs)[0]
    return plain(Scaled.apply(y, y.new_full(y.shape[-1:], 0.5)), targets)


def noisy(outputs: Any, targets: Tensor) -> Tensor:
    return plain([part + 0.1 * torch.randn_like(part) for part in parts(outputs)], targets)


@torch.jit.script
def scripted_loss(y: Tensor) -> Tensor:
    return y.tanh().mean() * (2.0 if bool(y.sum() > 0) else 0.5)


def scripted(outputs: Any, targets: Tensor) -> Tensor:
    return scripted_loss(parts(outputs)[0]) + plain(outputs, targets)


def pure(outputs: Any, targets: Tensor) -> Tensor:
    return (outputs.tanh() + outputs.square().tanh()).mean() * targets.mean()


def partly_pure(outputs: Any, targets: Tensor) -> Tensor:
    with torch.no_grad():
        weight = outputs.mean().sigmoid()
    return weight * outputs.square().mean() * targets.mean()


PURE: dict[str, Loss] = {"plain": pure, "partly": partly_pure}
"""The same for an output that is a tensor, by functions of torch alone, which can be traced."""

LOSSES: dict[str, Loss] = {
    **{"plain": plain, "partly": partly, "enabled": enabled, "uncast": uncast, "asked": asked, "branched": branched},
    **{"straight": straight, "scaled": scaled, "noisy": noisy, "scripted": scripted},
}
SCORES: dict[str, Loss] = {
    **{"plain": plain, "constant": constant, "inferred": inferred, "uncast": uncast, "branched": branched},
    **{"noisy": noisy, "scripted": scripted},
}
