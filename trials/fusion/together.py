"""Refuses, in code that one `vmap` runs for all trials, what trials can only do one after another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.fusion.surroundings import changed, over_whole_tensors, own_function_modes, replaced

_ALONE: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "_version")),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "data")),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad, Tensor.backward),
        *(torch.autograd.grad, torch.autograd.backward),
    )
)
"""What looks at gradients or their graph. Under `vmap` it sees none, or those of all trials at once."""


class Together:
    """The rules for one run under `vmap`. Enter it inside the function that is mapped."""

    def __enter__(self) -> "Together":
        self._around, self._modes = over_whole_tensors(), own_function_modes()
        self._stream = replaced(torch.random, default_generator=_NoStream())
        self._real = torch.default_generator
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)

    def check_call(self, function: Callable[..., Any]) -> None:
        """Check a function that the code calls.

        Raises:
            FuseError: only one trial after another can call it.
        """
        if function in _ALONE:
            raise FuseError(f"{getattr(function, '__qualname__', function)} is of one trial alone")

    def check_layer(self, function: bool = False) -> None:
        """Check where the code calls a layer or a `function` with a rule, whose tensors are those of all trials.

        Raises:
            FuseError: hooks or modes around it would see them.
        """
        name = changed(self._around, over_whole_tensors())
        if not name and not function and own_function_modes() != self._modes:
            name = "function modes"
        if name:
            raise FuseError(f"a layer is called with other {name} than the whole forward")

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is called meanwhile is outside the `vmap`."""
        with replaced(torch.random, default_generator=self._real):
            yield


class _NoStream:
    """Stands for PyTorch's random numbers, because each trial has its own."""

    def __getattr__(self, name: str) -> Any:
        raise FuseError(f"the code calls {name} of PyTorch's random numbers, and each trial has its own")
