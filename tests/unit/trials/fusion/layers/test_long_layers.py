"""Layers that take long on a CPU ask the gate between their parts, and compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import RecordingGate, ToyStudy, assert_fused_is_solo, members
from trials import TrialGroup, fuse
from trials.fusion.layers import dropout, linear
from trials.fusion.layers.dropout import Masks
from trials.gate.base import StopRequested

SIZE = 3


class Attentive(nn.Module):
    """Linear layers around self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).unsqueeze(1).expand(-1, 3, -1)
        return self.last(self.attention(y, y, y, need_weights=False)[0].mean(1))


def perceptron(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1 + 0.2 * n), nn.Linear(5, 4, bias=False))


def attentive(n: int) -> nn.Module:
    return Attentive()


@pytest.fixture(params=["by products", "by weights"])
def one_by_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts as long, for the one reason or the other."""
    monkeypatch.setattr(linear, "_FEW_WEIGHTS", 0)
    monkeypatch.setattr(linear, "_PART_PRODUCTS" if request.param == "by products" else "_PART_WEIGHTS", 1)
    monkeypatch.setattr(dropout, "_PART_DRAWN", 10)


def entered_of(make: Callable[[int], nn.Module], x: Tensor) -> list[str]:
    """The units of a second step."""
    gate, study = RecordingGate(), ToyStudy(make)
    group = TrialGroup(study, members(study, range(SIZE)), gate)
    group.train_step(x, torch.zeros(len(x)))
    gate.entered.clear()
    group.train_step(x, torch.zeros(len(x)))
    return gate.entered


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("make", [perceptron, attentive])
def test_in_parts_the_trials_are_those_trained_alone(make: Callable[[int], nn.Module]) -> None:
    assert_fused_is_solo(make, [torch.randn(4, 6) for _ in range(2)])


@pytest.mark.usefixtures("one_by_one")
def test_the_gate_is_asked_between_trials_and_between_derivatives() -> None:
    entered = entered_of(perceptron, torch.randn(4, 6))
    assert {name: entered.count(name) for name in dict.fromkeys(entered) if "Linear" in name} == {
        "0.Linear forward": SIZE,
        "2.Linear forward": SIZE,
        "2.Linear backward": 2 * SIZE,  # of its input and of its weight
        "0.Linear backward": SIZE,
    }


@pytest.mark.usefixtures("one_by_one")
def test_the_gate_is_asked_between_draws() -> None:
    entered = entered_of(perceptron, torch.randn(4, 6))
    parts = 2 if dropout._bernoulli_compares("cpu") else 1  # of 4·5 numbers
    assert entered.count("1.Dropout forward") == SIZE * parts


def test_a_loss_and_its_backward_are_asked_for_one_by_one() -> None:
    entered = entered_of(perceptron, torch.randn(4, 6))
    assert entered.count("loss") == entered.count("loss backward") == 1, "each has a length of its own"
    short = [name for name in entered if name.endswith("ward")]
    assert len(set(short)) == len(short)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("unit", ["2.Linear forward", "1.Dropout forward", "2.Linear backward"])
def test_a_stop_goes_through_in_the_middle_of_a_layer(unit: str) -> None:
    class Stopping(RecordingGate):
        def enter(self, number: int) -> None:
            super().enter(number)
            if self.entered.count(unit) == 2:
                raise StopRequested

    gate, study = Stopping(), ToyStudy(perceptron)
    group = TrialGroup(study, members(study, range(SIZE)), gate)
    with pytest.raises(StopRequested):
        group.train_step(torch.randn(4, 6), torch.zeros(4))
    assert gate.entered[-1] == unit


@pytest.mark.parametrize("rates_K", [[0.1, 0.5, 0.9], [0.0, 0.5, 1.0]])
def test_masks_in_parts_are_those_drawn_at_once(rates_K: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    x_K = torch.ones(SIZE, 50, 33)

    def dropped() -> Tensor:
        return Masks(rates_K, [torch.Generator().manual_seed(row) for row in range(SIZE)]).drop(x_K)

    at_once = dropped()
    for row, rate in enumerate(rates_K):
        torch.manual_seed(row)
        assert torch.equal(at_once[row], functional.dropout(x_K[row], rate))
    monkeypatch.setattr(dropout, "_PART_DRAWN", 100)
    assert torch.equal(dropped(), at_once)


@pytest.mark.usefixtures("one_by_one")
def test_derivatives_of_derivatives_are_those_of_whole_products() -> None:
    """A user's own loop may penalize gradients."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double() for _ in range(SIZE)]
    x = torch.randn(4, 6, dtype=torch.float64)

    def penalty(forward: Callable[[Tensor], Tensor], parameters: Any) -> list[Tensor]:
        own = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(forward(own).sum(), own, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), parameters, allow_unused=True))

    fused = fuse(models)
    weights = [p for name, p in fused.named_parameters() if name.endswith("weight")]
    for row, model in enumerate(models):
        expected = penalty(model, [model[0].weight, model[2].weight])
        found = penalty(lambda own, row=row: fused(own)[row], weights)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[row], other)
