"""Losses that differentiate: refused where they cannot find the way that there is in the trial alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import assert_fused_is_alone, batches
from trials import FuseError


class Field(nn.Module):
    """Returns its value, and where it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_(torch.is_grad_enabled())
        return self.net(x), x


class InForward(Field):
    """Returns its value and slope."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y, x = super().forward(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, slope


class Physics(ToyStudy):
    """The slope is part of the loss."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        y, x = outputs
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()

    def score(self, outputs: Any, targets: Any) -> Tensor:
        return outputs[0].mean()


class Returned(Physics):
    """The model has computed it."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return outputs[0].square().mean() + outputs[1].square().mean()


@pytest.mark.parametrize("size", [1, 3])
def test_by_another_output(size: int) -> None:
    with pytest.raises(FuseError, match=r"Study\.loss differentiates one of the model's outputs by another.*; allowed"):
        assert_fused_is_alone(Physics(lambda n: Field().double(), batches=batches()), size)


@pytest.mark.parametrize("size", [1, 3])
def test_the_forward_may(size: int) -> None:
    assert_fused_is_alone(Returned(lambda n: InForward().double(), batches=batches()), size)
