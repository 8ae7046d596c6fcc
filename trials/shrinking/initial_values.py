"""Gives a surrogate that the user's own code has built the initial values of its rule.

The code drew values for the surrogate's own width, by a rule that follows from the size of the target's values.
"""

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor, nn

from trials.shrinking.roles import Role
from trials.shrinking.rules import initial_factor

SNAP = 0.15
"""Measured sizes of few numbers are off by about this share of themselves."""

FEW = 256
"""Of fewer numbers than these, the nearest power is taken whatever its distance."""


@torch.no_grad()
def correct(surrogate: nn.Module, target: nn.Module, roles: Mapping[str, Role]) -> None:
    """Multiply what the user's code drew for `surrogate` by what its rule of initial values lacks.

    The size of all numbers of a tensor is its root mean square. Ratios that follow from widths are powers of these, so
    that measured ones are rounded to such powers. Tensors of zeros stay.
    """
    theirs = dict(target.named_parameters())
    for name, p in surrogate.named_parameters():
        role = roles[name]
        own, wanted = _rms(p), _rms(theirs[name]) * initial_factor(role, keeps=True)
        if role.kind != "scalar" and own > 0 and wanted > 0:
            p.mul_(_snapped(wanted / own, role, p.numel()))


def _snapped(measured: float, role: Role, numbers: int) -> float:
    """The nearest product of half-powers of the ratios of width."""
    powers = [i / 2 for i in range(-4, 5)]
    near = {a: [r**power for power in powers] if r != 1 else [1.0] for a, r in (("in", role.r_in), ("out", role.r_out))}
    found = min((a * b for a, b in product(*near.values())), key=lambda each: abs(measured / each - 1))
    return found if numbers < FEW or abs(measured / found - 1) < SNAP else measured


def _rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())
