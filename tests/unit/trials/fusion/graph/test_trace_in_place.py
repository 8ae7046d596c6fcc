"""Code that changes a tensor in place of which another name is a view, or the tensor itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import assert_fused_is_solo
from trials import FuseError

Path = Callable[[Tensor], Tensor]

SAME: dict[str, Path] = {
    "T": lambda y: y.T,
    "mT": lambda y: y.mT,
    "real": lambda y: y.real,
    "to": lambda y: y.to(torch.float64),
    "double": lambda y: y.double(),
    "type_as": lambda y: y.type_as(y),
    "ravel": lambda y: y.ravel(),
    "diagonal": lambda y: y.diagonal(),
    "unfold": lambda y: y.unfold(1, 2, 2),
    "einsum": lambda y: torch.einsum("ij->ji", y),
    "swapdims": lambda y: y.swapdims(0, 1),
    "broadcast_to": lambda y: torch.broadcast_to(y, (4, 4)),
    "a sign": lambda y: +y,
    "detach": lambda y: y.detach(),
}
"""What gives a tensor's memory another name."""

WAYS: dict[str, Callable[[Tensor], object]] = {
    "augmented": lambda z: z.__iadd__(1),
    "by a function": lambda z: functional.leaky_relu(z, 0.3, inplace=True),
    "by a layer": nn.LeakyReLU(0.3, inplace=True),
}


class Model(nn.Module):
    def __init__(self, path: Path, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.path, self.change = nn.Linear(4, 4), nn.Linear(4, 2), path, change

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.change(self.path(y))
        z: Tensor = self.b(y)
        return z


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", SAME)
def test_both_names_see_the_change(name: str, how: str) -> None:
    group = assert_fused_is_solo(lambda n: Model(SAME[name], WAYS[how]), [X], "sgd")
    assert "as a whole" in group.ways()[0][0]


def test_an_augmented_assignment_keeps_the_type() -> None:
    class Mixed(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            third = torch.zeros_like(y, dtype=torch.float32)
            third += 0 * y + 1 / 3
            z: Tensor = self.b(third.double() * y)
            return z

    for size in (1, 3):
        group = assert_fused_is_solo(lambda n: Mixed(SAME["T"], WAYS["augmented"]), [X], size=size)
        assert all("whole" not in name for name, _ in group.ways())


def test_new_memory_needs_no_other_way() -> None:
    class New(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            scores = torch.einsum("ij,kj->ik", y, self.a(y))
            scores += 1
            y = y + scores
            y *= 2
            z: Tensor = self.b(functional.relu(y, inplace=True))
            return z

    group = assert_fused_is_solo(lambda n: New(SAME["T"], WAYS["augmented"]), [X])
    assert all("whole" not in name for name, _ in group.ways())


@pytest.mark.parametrize("how", ["by a function", "by a layer"])
@pytest.mark.parametrize("path", [lambda x: x, lambda x: x.T.T, lambda x: x.view(2, 2, 4).view(4, 4)])
def test_a_change_of_the_batch_is_refused(path: Path, how: str) -> None:
    class First(Model):
        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.b(self.change(self.path(x)))
            return z

    with pytest.raises(FuseError, match="changes its input in place"):
        assert_fused_is_solo(lambda n: First(path, WAYS[how]), [X])
