"""Modules that keep something in attributes, and a study of any."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy

D = 4


class Base(nn.Module):
    """Takes ``x_BTD`` of any length T."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def table(self, length: int) -> Tensor:
        return torch.arange(1.0, length + 1, dtype=torch.float64).outer(torch.tensor([1.0, 0.5, 0.25, 0.1])).cos()


class Rotary(Base):
    """The cosines of the longest input so far, from a buffer."""

    inv_freq: Tensor

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.5, 0.25, 0.1]))
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self._seq_len_cached:
            self._seq_len_cached = x.shape[1]
            self._cos_cached = torch.arange(x.shape[1], dtype=x.dtype).outer(self.inv_freq).cos()
        assert self._cos_cached is not None
        return self.b(self.a(x) * self._cos_cached[: x.shape[1]]).mean(1)


class EmptyBuffer(Base):
    """A buffer that is registered before it is known."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.cos: Tensor | None
        self.register_buffer("cos", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None or len(self.cos) < x.shape[1]:
            self.register_buffer("cos", self.table(x.shape[1]), persistent=False)
        assert self.cos is not None
        return self.b(self.a(x) * self.cos[: x.shape[1]]).mean(1)


def inputs(*lengths: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(5, length, D, generator=draws, dtype=torch.float64) for length in lengths]


def study_of(kind: Callable[[int], nn.Module], *lengths: int) -> ToyStudy:
    return ToyStudy(lambda n: kind(n).double(), "adamw", [(x, torch.zeros(len(x))) for x in inputs(*lengths)])
