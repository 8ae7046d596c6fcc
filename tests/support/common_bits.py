"""Modules whose frozen parameters are equal in all trials, bit by bit."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from trials import TrialGroup

Kind = TypeVar("Kind", bound=nn.Module)


def frozen(make: Callable[[], Kind], names: Callable[[str], bool] = lambda name: True) -> Kind:
    """What `make` makes from one seed for all trials, without gradients for the parameters that `names` accepts."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = make()
    for name, parameter in module.named_parameters():
        if names(name):
            parameter.requires_grad_(False)
    return module


def trained(ps: Iterable[Any]) -> list[Any]:
    """The parameters that an optimizer gets."""
    return [p for p in ps if p.requires_grad]


def held(group: TrialGroup) -> set[str]:
    """The names of the parameters that a group holds once."""
    return set(group._fused.rows.once)


def held_bytes(group: TrialGroup) -> int:
    """The bytes of parameters, gradients and optimizer states that a group holds, each storage once."""
    rows = group._fused.rows
    tensors = [*rows.parameters.values(), *(p.grad for p in rows.parameters.values() if p.grad is not None)]
    for _, optimizer in group._optimizers.items():
        tensors += [t for kinds in optimizer._tables().values() for t in kinds.values()]  # type: ignore[attr-defined]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
