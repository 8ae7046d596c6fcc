"""Answers code under `vmap` that asks for values, such as `if mask.all():`, where all trials have the same answer.

Then each trial alone would go the same way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.fusion.own_code.trees import of_row

ASKING: frozenset[Any] = frozenset(
    (
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__contains__),
        *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, Tensor.equal, Tensor.allclose),
        *(torch.is_nonzero, torch.equal, torch.allclose),
    )
)
"""Functions that return numbers of Python's. They change nothing, and draw nothing."""

MOST_UNLIKE = 3
"""After so many batches in a row for which trials' answers differ, `vmap` is not tried again."""


class UnlikeError(FuseError):
    """Trials have different answers."""


class Value:
    """One question, asked for each trial outside the `vmap`.

    Args:
        function: what the code calls, one of `ASKING`.
        size: how many trials there are.

    Attributes:
        answer: that of all trials.
    """

    def __init__(self, function: Callable[..., Any], size: int) -> None:
        self._function, self._size = function, size
        self.answer: Any = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        """Take the answer. Returns a tensor of no meaning, and its `vmap` dimension.

        Raises:
            UnlikeError: trials have different ones.
        """
        for row in range(self._size):
            own_args, own_kwargs = of_row((args, kwargs), dims, row)
            answer = self._function(*own_args, **own_kwargs)
            if row and repr(answer) != repr(self.answer):  # -0.0 is not 0.0, and a NaN is one
                name = self._function.__name__.strip("_")
                raise UnlikeError(f"the code asks for values ('{name}'), and trials have different ones")
            self.answer = answer
        return torch.empty(0), None
