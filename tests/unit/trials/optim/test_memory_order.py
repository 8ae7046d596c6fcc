"""Parameters whose elements lie in another order in memory, as after `model.to(memory_format=torch.channels_last)`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import OPTIMIZERS, assert_fused_is_solo


class Turned(nn.Module):
    """Its weight is stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def convolutions(n: int) -> nn.Module:
    layers = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, groups=2), nn.Flatten()
    model = nn.Sequential(*layers)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # PyTorch's types do not have it
    assert not next(model.parameters()).is_contiguous()
    return model


MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "channels last": (convolutions, (5, 3, 6, 6)),
    "by columns": (lambda n: Turned(), (5, 6)),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_any_order_gives_what_it_gives_alone(name: str, optimizer: str, size: int) -> None:
    make, shape = MODELS[name]
    assert_fused_is_solo(make, [torch.randn(shape), torch.randn(shape)], optimizer, size=size)
