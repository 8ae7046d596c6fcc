"""What blocks of random models are made of, and the tables of all blocks.

A block does something that is easily lost where trials are fused, and keeps its input's shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Tensor]
Setup = Callable[[Any, int], Any]


class Block(nn.Module):
    """Parameters, buffers and plain attributes for a forward.

    Args:
        inner: another block or layer; keeps the shape of its input.
        width: the last axis of the input.
        n: the trial's number.
    """

    def __init__(self, inner: nn.Module, width: int, n: int) -> None:
        super().__init__()
        self.inner, self.a, self.b = inner, nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(0.5 + torch.rand(width))
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(width))
        self.held: Any = None
        self.setup(n)

    def setup(self, n: int) -> None:
        """Add what else the forward needs."""

    def tie(self) -> None:
        """Give tensors common memory. A conversion of the model to another type would untie it again."""


COMMON: dict[str, type[Block]] = {}
"""Blocks that trials can train together in some way."""
REFUSED: dict[str, type[Block]] = {}
"""Blocks whose trials cannot train together."""


def block(
    name: str, setup: Setup | None = None, refused: bool = False, tie: Callable[[Any], Any] | None = None
) -> Callable[[Forward], type[Block]]:
    """Make the decorated function the forward of a class of blocks, in the table under `name`."""

    def register(forward: Forward) -> type[Block]:
        table: dict[str, Any] = {"forward": forward, **({} if setup is None else {"setup": setup})}
        table.update({} if tie is None else {"tie": tie})
        # under its name in its module, as users' classes are
        kind = type(forward.__name__, (Block,), {**table, "__module__": forward.__module__})
        (REFUSED if refused else COMMON)[name] = kind
        return kind

    return register
