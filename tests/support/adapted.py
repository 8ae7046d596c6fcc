"""An adapter beside a frozen layer, in each way of training; and a study of it, fused and alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.common_bits import frozen, trained
from tests.support.fused_and_solo import OPTIMIZERS, Solo, ToyStudy, assert_same_trial, members
from trials import TrialGroup
from trials.gate.base import OpenGate

Forward = Callable[["Adapted", Tensor], Tensor]
BASE = {"base.weight", "base.bias"}


class Adapted(nn.Module):
    """A frozen layer, an adapter beside it, and any code around both."""

    def __init__(self, forward: Forward | None = None, extra: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.down, self.up, self.drop = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False), nn.Dropout(0.2)
        self.base = frozen(lambda: nn.Linear(4, 4))
        self.code = forward
        self.double()
        if extra is not None:
            extra(self)

    def forward(self, x: Tensor) -> Tensor:
        return adapt(self, x) if self.code is None else self.code(self, x)


def adapt(m: Adapted, x: Tensor) -> Tensor:
    y: Tensor = m.base(x) + m.up(m.down(m.drop(x))) * 2
    return y.tanh()


def twice(m: Adapted, x: Tensor) -> Tensor:
    return adapt(m, adapt(m, x))


def functional(m: Adapted, x: Tensor) -> Tensor:
    return nn.functional.linear(m.up(m.down(x)), m.base.weight, m.base.bias) + x @ m.base.weight


def asks(m: Adapted, x: Tensor) -> Tensor:
    """Not traced: `vmap` does it."""
    return twice(m, x) if isinstance(x, Tensor) and len(x) > 1 else x


def looks(m: Adapted, x: Tensor) -> Tensor:
    """Neither."""
    y = twice(m, x) + x @ m.base.weight
    return y if y.sum().item() < 1e9 else x


WAYS: dict[str, tuple[Forward, str]] = {
    "rules": (twice, "rule"), "functions": (functional, "rule"), "vmap": (asks, "vmap"), "loop": (looks, "loop"),
}  # fmt: skip


def data(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(7)
    return [(torch.randn(5, 4, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(count)]


def study_of(make: Callable[[int], nn.Module], optimizer: str = "adamw", every: bool = False) -> ToyStudy:
    own = OPTIMIZERS[optimizer]
    return ToyStudy(make, own if every else lambda n, ps: own(n, trained(ps)), data())


def group_of(study: ToyStudy, size: int = 3) -> TrialGroup:
    return TrialGroup(study, members(study, range(size)), OpenGate())


def assert_alone(group: TrialGroup, study: ToyStudy, rows: dict[int, int] | None = None, steps: int = 3) -> None:
    """Each trial is as it is alone after so many steps."""
    for row, number in (rows or {row: row for row in range(group.size)}).items():
        solo = Solo(study, number)
        for step in range(steps):
            solo.step(*study.data[step % len(study.data)])
        assert_same_trial(group, row, solo)


def train(group: TrialGroup, study: ToyStudy, first: int = 0, steps: int = 3) -> None:
    for step in range(first, steps):
        group.train_step(*study.data[step % len(study.data)])
