"""What a trial does not use has no gradient, as alone: its momentum, decay and count of steps stay."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trials
from tests.support.fused_and_solo import Solo, ToyStudy, alike, assert_same_trial, close, members
from tests.support.slow_cases import others_slow
from trials import TrialGroup
from trials.gate.base import OpenGate


class Experts(nn.Module):
    """Uses one of its experts, by its own data; a third is never used."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([1.0, -1.0]) * (-1) ** n)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int((self.gate * x.sum()).argmax().item())
        return self.experts[chosen](x) * self.gate[chosen]


class Skipping(nn.Module):
    """Goes round its layer at random, for each trial anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if torch.rand(()) < 0.5 else x


class Looking(nn.Module):
    """A layer that takes two inputs, and uses one of them or none."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.which: Tensor
        self.register_buffer("which", torch.tensor(n % 3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        which = self.which.item()
        return (x * self.weight, y) if which == 0 else (y, x * 2) if which == 1 else (torch.ones_like(x), y)


class Partly(nn.Module):
    """Layers with rules before and after one that is looped; a tied weight; one output that is not used."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.looking = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Looking(n)

    def forward(self, x: Tensor) -> Tensor:
        one, _ = self.looking(self.a(x), self.b(x).tanh())
        return self.c(one) + self.looking.weight.sum() * 0.1


class Constant(nn.Module):
    """Has no gradient at all for some trials."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.after, self.n = nn.Linear(4, 4), nn.Parameter(torch.tensor(float(n)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(x) if self.n.item() != 1 else x.sin())


class Tied(nn.Module):
    """One weight in two loops, each of which uses it for other trials."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.one, self.two = Looking(n), Looking(n + 1)
        self.two.weight = self.one.weight
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.one(x, x + 1)
        return self.two(one, two)[0] + self.bias


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "experts": Experts,
    "random depth": lambda n: nn.Sequential(nn.Linear(4, 4), Skipping(), nn.Linear(4, 4), Skipping()),
    "around a loop": Partly,
    "experts after a layer": lambda n: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Experts(n), nn.Linear(4, 2)),
    "no gradient": Constant,
    "tied": Tied,
}

OPTIMIZERS: dict[str, Callable[[int, Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda n, ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1 * n),
    "adamw": lambda n, ps: torch.optim.AdamW(ps, lr=0.01 * (n + 1), weight_decay=0.1, eps=1e-4),
    "adamw, all alike": lambda n, ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, eps=1e-4),
    "nadam": lambda n, ps: torch.optim.NAdam(ps, lr=0.01 * (n + 1), weight_decay=0.1, eps=1e-4),
    "once per trial": lambda n, ps: torch.optim.Adafactor(ps, lr=0.01 * (n + 1), weight_decay=0.1),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(5)
    return [(torch.randn(5, 4, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(4)]


class Clipping(ToyStudy):
    def clip_norm(self, params: dict[str, Any]) -> float:
        return 1e9


@pytest.mark.parametrize(
    ("name", "optimizer"),
    others_slow(
        product(MODELS, OPTIMIZERS),
        [(name, [*OPTIMIZERS][(at + more) % 5]) for at, name in enumerate(MODELS) for more in (0, 2)],
    ),
)
def test_equals_solo(name: str, optimizer: str) -> None:
    kind = Clipping if optimizer == "adamw" else ToyStudy
    study = kind(lambda n: MODELS[name](n).double(), OPTIMIZERS[optimizer], batches())
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Solo(study, n) for n in range(3)]
    for step, (x, y) in enumerate([*study.data] * 3):
        if step == 6:
            group.keep([2, 0])
            solos = [solos[2], solos[0]]
        group.train_step(x, y)
        for solo in solos:
            solo.step(x, y)
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["experts", "around a loop"])
def test_in_a_loop_of_ones_own(name: str, set_to_none: bool) -> None:
    """With two backward passes for a step, and zeros that stay where gradients were."""
    models, alone = ([MODELS[name](n).double() for n in range(3)] for _ in range(2))
    for mine, other in zip(models, alone, strict=True):
        other.load_state_dict(mine.state_dict())
    fused = trials.fuse(models)
    optimizers, references = (
        [OPTIMIZERS["sgd"](n, m.parameters()) for n, m in enumerate(ms)] for ms in (models, alone)
    )
    together = trials.fuse_optimizers(optimizers, fused)
    for (x, _), (y, _) in zip(batches() * 2, batches()[1:] * 2, strict=False):
        fused.zero_grad(set_to_none)
        for each in (x, -y):
            fused(each).square().flatten(1).mean(1).sum().backward()
        together.step()
        for model, reference in zip(alone, references, strict=True):
            reference.zero_grad(set_to_none)
            for each in (x, -y):
                model(each).square().mean().backward()
            reference.step()
    for row, (model, reference) in enumerate(zip(alone, references, strict=True)):
        close(fused.extract(row).state_dict(), dict(model.state_dict()), f"row {row}")
        alike(together.extract(row)["state"], reference.state_dict()["state"], f"row {row}")


def test_a_loop_without_an_optimizer_of_ours_keeps_no_graph() -> None:
    fused = trials.fuse([Experts(n).double() for n in range(2)])
    for x, _ in batches():
        fused(x)
    assert not fused.rows.reached._roots and not fused.rows.reached._watched
