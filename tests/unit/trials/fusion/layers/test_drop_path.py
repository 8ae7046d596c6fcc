"""Stochastic depth as libraries have it: each trial drops the examples that it drops alone, by its own rate.

The libraries are not installed where these tests run, so layers that draw as theirs do stand for them. With the
libraries' own, `tests/zoo` has models.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import assert_fused_is_solo
from trials import FuseError

Kind = TypeVar("Kind", bound=type[nn.Module])


def _named(module: str) -> Callable[[Kind], Kind]:
    """Let a class pass for one of `module`, which is not there."""

    def rename(kind: Kind) -> Kind:
        kind.__module__ = kind.forward.__module__ = module
        return kind

    return rename


def _drawn(x: Tensor, shape: Sequence[int], stay: float, scales: bool) -> Tensor:
    drawn = torch.empty(shape, dtype=x.dtype).bernoulli_(stay)
    return x * (drawn.div_(stay) if scales else drawn)


@_named("timm.layers.drop")
class DropPath(nn.Module):
    def __init__(self, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        return _drawn(x, [len(x), *[1] * (x.ndim - 1)], 1 - self.drop_prob, self.scale_by_keep)


@_named("torchvision.ops.stochastic_depth")
class StochasticDepth(nn.Module):
    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return _drawn(x, [len(x) if self.mode == "row" else 1, *[1] * (x.ndim - 1)], 1 - self.p, True)


LAYERS: dict[str, Callable[[float], nn.Module]] = {
    "timm": lambda rate: DropPath(rate),
    "timm, not scaled": lambda rate: DropPath(rate, False),
    "torchvision, examples": lambda rate: StochasticDepth(rate, "row"),
    "torchvision, batches": lambda rate: StochasticDepth(rate, "batch"),
}


class Branched(nn.Module):
    def __init__(self, drop: nn.Module, first: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)
        self.path, self.drop, self.first = drop, nn.Dropout(0.2), first

    def forward(self, x: Tensor) -> Tensor:
        x = self.path(x) if self.first else x
        y: Tensor = self.last(self.drop(x + self.path(self.layer(x))))
        return y


def _data() -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, 4, 4, generator=stream) for _ in range(3)]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_each_trial_drops_what_it_drops_alone(name: str, first: bool) -> None:
    group = assert_fused_is_solo(lambda n: Branched(LAYERS[name]((0.0, 0.3, 0.6)[n]), first), _data())
    assert all(how.startswith("rule") for _, how in group.ways())


def test_a_rate_of_1_is_refused() -> None:
    with pytest.raises(FuseError, match=r"DropPath': drop_prob=1.0; allowed: below 1"):
        assert_fused_is_solo(lambda n: Branched(LAYERS["timm"](1.0), False), _data())


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_dropped_nowhere_is_the_input_itself(name: str) -> None:
    class Changed(Branched):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            y = self.path(x)
            y += 1
            z: Tensor = self.last(x + y)
            return z

    assert_fused_is_solo(lambda n: Changed(LAYERS[name]((0.0, 0.3, 0.6)[n]), False), _data(), "sgd")
