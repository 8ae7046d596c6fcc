"""Layers whose output is their input in some trials of a group, but not in all, amid code that changes it in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import assert_fused_is_solo


class Model(nn.Module):
    def __init__(self, layer: nn.Module, change: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.change = nn.Linear(4, 4), nn.Linear(4, 2), layer, change

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.drop(y)
        self.change(y, z)
        out: Tensor = self.b(y + z)
        return out


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "the output": lambda y, z: z.add_(1),
    "the input": lambda y, z: y.mul_(2),
    "a view": lambda y, z: z.view(-1)[::2].zero_(),
}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
@pytest.mark.parametrize("name", CHANGES)
def test_rates_of_which_some_are_0(name: str, kind: Callable[[float], nn.Module]) -> None:
    group = assert_fused_is_solo(lambda n: Model(kind(0.2 * n), CHANGES[name]), [X], "sgd")
    whole, how = group.ways()[0]
    assert whole.endswith("as a whole")
    assert "loop over trials: FuseError: in trials whose rate is 0, the output of 'drop' is its input" in how


@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.1, 0.2, 0.3)])
def test_rates_that_agree_keep_vmap(rates: tuple[float, ...]) -> None:
    group = assert_fused_is_solo(lambda n: Model(nn.Dropout(rates[n]), CHANGES["the output"]), [X], "sgd")
    assert group.ways()[0][1].startswith("vmap")


def test_a_change_of_another_tensor_keeps_vmap() -> None:
    group = assert_fused_is_solo(lambda n: Model(nn.Dropout(0.2 * n), lambda y, z: (y + 1).mul_(z)), [X], "sgd")
    assert group.ways()[0][1].startswith("vmap")


class Asking(nn.Module):
    """Whether the output of dropout is its input depends on its rate and mode."""

    def __init__(self, drop: Callable[[Tensor, bool], Tensor] | nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.drop(y) if isinstance(self.drop, nn.Module) else self.drop(y, self.training)
        out: Tensor = self.b(y + z * (2.0 if z is y else 3.0))
        return out


@pytest.mark.parametrize(
    ("rates", "way"),
    [
        ((0.0, 0.0, 0.0), "vmap"),
        ((0.1, 0.2, 0.3), "vmap"),
        ((0.0, 0.2, 0.0), "loop over trials: FuseError: forward in test_together.py"),
    ],
)
def test_code_may_ask_whether_dropouts_output_is_its_input(rates: tuple[float, ...], way: str) -> None:
    group = assert_fused_is_solo(lambda n: Asking(nn.Dropout(rates[n])), [X], "sgd")
    assert group.ways()[0][1].startswith(way)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_also_of_its_function(rate: float) -> None:
    def drop(x: Tensor, training: bool) -> Tensor:
        return nn.functional.dropout(x, rate, training)

    group = assert_fused_is_solo(lambda n: Asking(drop), [X], "sgd")
    assert group.ways()[0][1].startswith("vmap")


def seeded(y: Tensor, z: Tensor) -> None:
    torch.default_generator.manual_seed(3)
    y.add_(torch.randn_like(y))


def repeated(y: Tensor, z: Tensor) -> None:
    before = torch.default_generator.get_state()
    y.add_(torch.randn_like(y))
    torch.default_generator.set_state(before)
    y.mul_(torch.rand_like(y))


@pytest.mark.parametrize("change", [seeded, repeated])
def test_pytorchs_own_stream_itself(change: Callable[[Tensor, Tensor], None]) -> None:
    """Where rules draw from the trials' streams, nothing that code does to it would matter."""
    group = assert_fused_is_solo(lambda n: Model(nn.Dropout(0.3), change), [X], "sgd")
    assert "loop over trials: FuseError: the code calls" in group.ways()[0][1]
