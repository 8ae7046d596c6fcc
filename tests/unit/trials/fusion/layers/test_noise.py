"""Random numbers that a forward draws in the shape of a tensor: those of the trial alone, by one rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import assert_fused_is_solo

Draw = Callable[[Tensor], Tensor]


class Coder(nn.Module):
    """A variational autoencoder's way: noise on what the encoder gives, and dropout on both sides of it."""

    def __init__(self, draw: Draw, traced: bool, images: bool = False) -> None:
        super().__init__()
        self.draw, self.traced, self.drop = draw, traced, nn.Dropout(0.3)
        layer: Any = (lambda n, m: nn.Conv2d(n, m, 1)) if images else nn.Linear
        self.mean, self.log_deviation, self.decode = layer(6, 4), layer(6, 4), layer(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and len(x) < 1:
            return x
        mean, deviation = self.mean(self.drop(x)), torch.exp(0.5 * self.log_deviation(x))
        noise = self.draw(deviation) if self.training else torch.zeros_like(deviation)
        y: Tensor = self.decode(self.drop(mean + noise * deviation))
        return y


DRAWS: dict[str, Draw] = {
    "normal": torch.randn_like,
    "uniform": torch.rand_like,
    "in another type": lambda x: torch.randn_like(x, dtype=torch.float32),
    "of a part": lambda x: torch.randn_like(x[..., :1]),
    "of what lies otherwise": lambda x: torch.randn_like(x.transpose(0, -1)).transpose(0, -1),
    "many": lambda x: torch.rand_like(x.unsqueeze(-1).expand(*x.shape, 5)).mean(-1),
}


def _data(*shape: int) -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=stream) for _ in range(2)]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_each_trial_draws_what_it_draws_alone(name: str, traced: bool) -> None:
    group = assert_fused_is_solo(lambda n: Coder(DRAWS[name], traced), _data(5, 6))
    assert not any(how.startswith("loop") for _, how in group.ways())


@pytest.mark.parametrize("traced", [True, False])
def test_numbers_for_the_input_that_trials_share(traced: bool) -> None:
    class Noisy(Coder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)

    assert_fused_is_solo(lambda n: Noisy(torch.randn_like, traced), _data(5, 6))


@pytest.mark.parametrize("drawn", [torch.preserve_format, torch.contiguous_format, torch.channels_last])
def test_the_order_in_memory_is_that_of_the_trial_alone(drawn: torch.memory_format) -> None:
    def make(n: int) -> nn.Module:
        model = Coder(lambda x: torch.randn_like(x, memory_format=drawn), True, images=True)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types

    assert_fused_is_solo(make, _data(3, 6, 4, 4))


def test_what_the_rule_does_not_take_runs_in_a_loop() -> None:
    group = assert_fused_is_solo(lambda n: Coder(lambda x: torch.randn_like(x, requires_grad=True), False), _data(5, 6))
    assert any(how.startswith("loop") and "requires_grad" in how for _, how in group.ways())
