"""Autocast under `vmap`: it casts for the parts of which PyTorch makes a function there, not for the function itself.

So a cross entropy that would be computed in float32 is computed in bfloat16. Calls run trial by trial instead, unless
they have no such parts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from trials.fusion.own_code.functional import ELEMENTWISE, VIEWS
from trials.fusion.own_code.streams import drawing_nothing
from trials.fusion.own_code.trees import dims_of, stack

REASON = "loop over trials: autocast would cast it differently under vmap"

_WHOLE = VIEWS | {
    *("matmul", "bmm", "mm", "einsum", "cat", "concat", "stack", "where", "masked_fill", "gather", "index_select"),
    *("roll", "flip", "repeat", "tile", "tril", "triu", "to", "type", "type_as", "argmax", "argmin", "amax", "amin"),
}
"""Names of functions that `vmap` computes by the same function, or by another product, which autocast casts alike."""


def is_on(device: torch.device) -> bool:
    """Whether autocast is on for tensors on `device`."""
    return torch.is_autocast_enabled(device.type)


def has_parts(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether autocast is on and may cast within a call of `function`, a function or a method's name."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    # getters and operators are of the form __name__, and what works in place is of the form name_
    if name.endswith("_") or name in _WHOLE or function in ELEMENTWISE or name in ELEMENTWISE:
        return False
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    return any(is_on(tensor.device) and tensor.is_floating_point() for tensor in tensors)


def trial_by_trial(call: Callable[[int], Any], size: int, name: str) -> Any:
    """Stack what `call` returns for each of `size` trials.

    Raises:
        RuntimeError: the call, `name` in messages, draws random numbers.
    """
    with drawing_nothing(name):
        return stack([call(row) for row in range(size)], name)


class TrialByTrial:
    """A call that runs trial by trial, amid code under `vmap`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` is what the code calls."""
        self._function = function

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the output, and its `vmap` dimensions."""
        leaves, spec = tree_flatten((args, kwargs))
        owned = tree_flatten(dims)[0]
        first: Tensor = next(leaf for leaf, dim in zip(leaves, owned, strict=True) if dim is not None)

        def call(row: int) -> Any:
            own = [leaf if dim is None else leaf[row] for leaf, dim in zip(leaves, owned, strict=True)]
            own_args, own_kwargs = tree_unflatten(own, spec)
            return self._function(*own_args, **own_kwargs)

        output = trial_by_trial(call, len(first), f"the call of {self._function.__name__}")
        return output, dims_of(output, per_trial=True)
