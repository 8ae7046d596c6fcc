"""Where own code draws in the order of memory: for tensors of the model's in an order of their own, and by any way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import assert_fused_is_solo
from trials import FuseError


def _inputs(steps: int = 2) -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 4, 4, generator=stream) for _ in range(steps)]


class DropConnect(nn.Module):
    """Drops parts of a weight, a frozen one and a buffer, which lie column by column."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5).t(), requires_grad=False)
        self.table: Tensor
        self.register_buffer("table", torch.randn(3, 5).t())
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3))
        if self.asks and x.sum().item() > 1e6:  # not traced
            return x
        drop, training = functional.dropout, self.training
        weight = drop(self.weight, 0.4, training) + drop(2 * self.frozen, 0.4, training)
        return functional.linear(x, weight + drop(self.table, 0.4, training))


class InALoop(DropConnect):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * (1.0 + y.sum().item())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("make", [DropConnect, lambda: DropConnect(True), InALoop], ids=["traced", "untraced", "loop"])
def test_tensors_in_an_order_of_their_own_are_dropped_as_alone(make: Callable[[], nn.Module], size: int) -> None:
    assert_fused_is_solo(lambda n: make(), _inputs(), "sgd", size=size)


class ByALayer(nn.Module):
    """Draws only behind it, for what it makes of a weight and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())
        self.count: Tensor
        self.register_buffer("count", torch.zeros(3, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
            self.count += 1
        return functional.linear(x.mean((2, 3)), functional.dropout(self.weight * self.count, 0.4, self.training))


@pytest.mark.parametrize("size", [1, 3])
def test_they_may_be_changed_in_place(size: int) -> None:
    assert_fused_is_solo(lambda n: ByALayer(), _inputs(), "sgd", size=size)


def test_trials_with_tensors_in_different_orders_are_not_fused() -> None:
    def make(n: int) -> nn.Module:
        model = DropConnect()
        if n:
            model.table = model.table.contiguous()
        return model

    with pytest.raises(FuseError, match=r"buffer 'table'.*order in memory"):
        assert_fused_is_solo(make, _inputs())


class Changing(nn.Module):
    """Lets its activations lie in channels_last now and then, which a pad under vmap loses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.training and self.is_last():
            y = y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return functional.dropout(self.between(y), 0.4, self.training)

    def between(self, y: Tensor) -> Tensor:
        return functional.pad(y, (1, 1, 1, 1))

    def is_last(self) -> bool | Tensor:
        raise NotImplementedError


class ByCount(Changing):
    def is_last(self) -> bool | Tensor:
        self.count += 1
        return self.count == 2


class ByParameter(Changing):
    """It may not fall into a loop: then its parameter would have been changed twice."""

    def between(self, y: Tensor) -> Tensor:
        return y

    def is_last(self) -> bool | Tensor:
        with torch.no_grad():
            self.scale.add_(1)
        return (self.scale > 2.5).all() & (self.scale < 3.5).all()


class ByChance(Changing):
    def is_last(self) -> bool | Tensor:
        return torch.rand(()) < 0.5


@pytest.mark.parametrize("kind", [ByCount, ByParameter, ByChance])
def test_the_way_that_the_run_went_is_compared(kind: type[Changing]) -> None:
    assert_fused_is_solo(lambda n: kind(), _inputs(4), lambda n, ps: torch.optim.SGD(ps, lr=1e-6 * (n + 1)), steps=6)
