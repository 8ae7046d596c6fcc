"""Oracles in float64: Tensor Programs V's table 8 written independently, and a target whose units are copies."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from trials import roles, scaled_groups
from trials.shrinking.errors import ShrinkWarning

BASE, WIDTH, STEPS = 256, 32, 10


class Table8(nn.Module):
    """An MLP whose output is multiplied by base ÷ width."""

    def __init__(self, width: int, multiplier: float) -> None:
        super().__init__()
        self.first, self.hidden, self.output = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 8]`` to ``[B, 3]``."""
        y = torch.tanh(self.hidden(torch.tanh(self.first(x))))
        return self.multiplier * (y @ self.output.weight.T) + self.output.bias


def oracles(quick: bool) -> list[dict[str, Any]]:
    """The largest difference of an output in ten steps."""
    kinds: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.1, "momentum": 0.9},
        "Adam": {"lr": 0.01, "eps": 1e-3},
        "NAdam": {"lr": 0.01, "eps": 1e-3},
        "Adamax": {"lr": 0.01, "eps": 1e-3},
        "RMSprop": {"lr": 0.01, "eps": 1e-3},
        "Adagrad": {"lr": 0.02, "eps": 1e-3},
    }
    runs = []
    for kind, settings in kinds.items():
        torch.manual_seed(0)
        target, surrogate = Table8(BASE, 1.0).double(), Table8(WIDTH, 1.0).double()
        theirs, copies = Table8(WIDTH, BASE / WIDTH).double(), Table8(BASE, 1.0).double()
        _begin(theirs, copies, surrogate)
        optimizer = getattr(torch.optim, kind)(surrogate.parameters(), **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkWarning)  # SGD on a readout that is kept: exact here
            scaled_groups(optimizer, roles(target, surrogate))
        ours = _outputs(surrogate, optimizer)
        table = _outputs(theirs, getattr(torch.optim, kind)(_groups(theirs, kind, settings), **settings))
        wide = _outputs(copies, getattr(torch.optim, kind)(copies.parameters(), **settings))
        error = max(float((ours - other).abs().max()) for other in (table, wide))
        runs.append({"optimizer": kind, "error": error})
    return runs


@torch.no_grad()
def _begin(theirs: Table8, copies: Table8, surrogate: Table8) -> None:
    theirs.load_state_dict(surrogate.state_dict())
    theirs.output.weight /= theirs.multiplier
    times = BASE // WIDTH
    for name, into in copies.named_parameters():
        p = surrogate.get_parameter(name).detach()
        for axis, size in enumerate(into.shape):
            p = p.repeat_interleave(size // p.shape[axis], axis)
        into.copy_(p / times if name in ("hidden.weight", "output.weight") else p)


def _groups(model: Table8, kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    wide, sgd = WIDTH / BASE, kind == "SGD"
    rates = {"hidden.weight": 1 if sgd else 1 / wide, "output.bias": 1}
    small = {"output.bias"}
    made = []
    for name, p in model.named_parameters():
        group = {"params": [p], "lr": settings["lr"] * rates.get(name, wide if sgd else 1)}
        if "eps" in settings:
            group["eps"] = settings["eps"] / (1 if name in small else wide)
        made.append(group)
    return made


def _outputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    stream = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=stream, dtype=torch.float64)
        optimizer.zero_grad()
        y = model(x)
        (y - x[:, :3]).square().mean().backward()
        optimizer.step()
        made.append(y.detach())
    return torch.stack(made)
