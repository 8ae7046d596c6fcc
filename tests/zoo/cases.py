"""What a case of the zoo is: a small model of a library, and inputs for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Case:
    """A model that people use, built small.

    Attributes:
        make: from a trial's number to its model, with the weights that a seed gives.
        inputs: makes the batches of two steps.
        refused: why trials of it are refused, as a pattern; empty: they are not.
    """

    make: Callable[[int], nn.Module]
    inputs: Callable[[], list[Tensor]]
    refused: str = ""


def pictures(size: int = 32, channels: int = 3) -> list[Tensor]:
    """Make two batches of square pictures."""
    draws = torch.Generator().manual_seed(7)
    return [torch.randn(4, channels, size, size, generator=draws) for _ in range(2)]


def tokens(length: int = 9, vocabulary: int = 24) -> list[Tensor]:
    """Make two batches of token numbers, all above those that mean padding."""
    draws = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocabulary, (3, length), generator=draws) for _ in range(2)]


def numbers(*shape: int) -> list[Tensor]:
    """Make two batches of random numbers."""
    draws = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=draws) for _ in range(2)]


class Wrapped(nn.Module):
    """Calls a model by names, and returns one of its outputs.

    Args:
        model: the library's.
        name: of the input.
        output: of the output.
        more: further inputs; those that are named alone get the same tensor.
    """

    def __init__(self, model: nn.Module, name: str, output: str, same: Sequence[str] = (), **more: Any) -> None:
        super().__init__()
        self.model, self.names, self.output, self.more = model, (name, *same), output, more

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(**dict.fromkeys(self.names, x), **self.more), self.output)


def built(build: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[int], nn.Module]:
    """Return a maker of the same model for all trials."""
    return lambda n: partial(build, *args, **options)()
