"""Refuses, in code that one `vmap` runs for all trials, what trials can only do one after another."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trials.fusion.errors import FuseError
from trials.fusion.graph.surroundings import (
    changed,
    over_whole_tensors,
    own_function_modes,
    refused_checkpoint,
    replaced,
    without_recomputing,
)
from trials.fusion.own_code.autocast import REASON
from trials.fusion.own_code.drawing import may_draw_unseen
from trials.fusion.own_code.streams import drawing_nothing
from trials.fusion.own_code.trees import refuse_own_kinds

_ALONE: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "grad")),
        *(getattr(Tensor, name).__get__ for name in ("_base", "_version", "output_nr")),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "data")),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.retain_grad, Tensor.backward),
        *(Tensor._is_view, Tensor.storage_offset),
        *(torch.autograd.grad, torch.autograd.backward),
    )
)
"""What looks at gradients or their graph. Under `vmap` it sees none, or those of all trials at once."""


TensorEntry = tuple[Mapping[str, Tensor | None], str, str]
"""A module's table of parameters or buffers, a name there, and the tensor's first name in the whole module."""


class Shares(Protocol):
    """A layer that the code calls."""

    def has_come_apart(self) -> bool:
        """See `trials.fusion.own_code.inner.Inner`."""


class Together:
    """The rules for one run under `vmap`. Enter it inside the function that is mapped.

    Attributes:
        looped: the names of functions that the code has called for one trial after another.
    """

    def __init__(self, layers: Mapping[str, Shares]) -> None:
        """For code that calls these layers."""
        self._layers, self.looped = layers, set[str]()
        self._given: dict[str, Tensor] = {}
        self._versions: Callable[[], object] = lambda: None

    def ways(self, label: str) -> Iterator[tuple[str, str]]:
        """Yield each such function in the code called `label`, and how it is computed."""
        for name in sorted(self.looped):
            yield f"{name} in {label}", REASON

    def given(
        self, tensors: Mapping[str, Tensor], replaced: Collection[str], versions: Callable[[], object]
    ) -> "Together":
        """Return this, to be entered.

        Args:
            tensors: what the run begins with.
            replaced: the names of those that are copies, because the code sets others.
            versions: see `without_recomputing`.
        """
        self._given = {name: tensor for name, tensor in tensors.items() if name not in replaced}
        self._versions = versions
        return self

    def are_given(self, entries: Sequence[TensorEntry]) -> bool:
        """Whether the tensors at `entries` are the trials' own. A rule would take those, whatever the code has set."""
        return all(table.get(name) is self._given.get(first, self) for table, name, first in entries)

    def __enter__(self) -> "Together":
        self._around, self._modes = over_whole_tensors(), own_function_modes()
        self._streams = torch.default_generator, torch.cuda.default_generators
        with ExitStack() as stack:
            stack.enter_context(without_recomputing(refused_checkpoint, self._versions))
            stack.enter_context(_streams(*map(_NoStream, self._streams)))
            # what gives a tensor other memory is lost there, and no mode hears of it
            stack.enter_context(replaced(torch._C, _swap_tensor_impl=_alone("torch.utils.swap_tensors")))
            stack.enter_context(replaced(Tensor, set_=_alone("Tensor.set_")))
            stack.enter_context(replaced(torch.autograd.Function, apply=classmethod(self._applying())))
            self._entered = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """End the run.

        Raises:
            FuseError: a tensor has been changed in place that in some trials alone is also another.
        """
        self._given = {}  # they hold the memory of all trials
        self._entered.__exit__(kind, *error)
        apart = [path for path, layer in self._layers.items() if layer.has_come_apart()]
        if kind is None and apart:
            raise FuseError(
                f"in trials whose rate is 0, the output of '{apart[0]}' is its input, and the code changes one in place"
            )

    def check_call(self, function: Callable[..., Any]) -> None:
        """Check a function that the code calls.

        Raises:
            FuseError: only one trial after another can call it.
        """
        if may_draw_unseen(function):
            raise FuseError(f"{function} is no operator of PyTorch's, and may draw random numbers")
        if function in _ALONE:
            raise FuseError(f"{getattr(function, '__qualname__', function)} is of one trial alone")

    def check_layer(self, args: Any, kwargs: Any, function: bool = False) -> None:
        """Check where the code calls a layer or a `function` with a rule, whose tensors are those of all trials.

        Raises:
            FuseError: hooks or modes around it would see them, or an input is of a class of its own.
        """
        refuse_own_kinds(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        name = changed(self._around, over_whole_tensors())
        if not name and not function and own_function_modes() != self._modes:
            name = "function modes"
        if name:
            raise FuseError(f"a layer is called with other {name} than the whole forward")

    def _applying(self) -> Callable[..., Any]:
        """Return what applies the user's functions. A rule of theirs for `vmap` is no part of the trial alone.

        Raises:
            FuseError: it does not apply the function itself, so that another `backward` would be its own.
            RuntimeError: it draws random numbers.
        """

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls.vmap is torch.autograd.Function.vmap:
                return _apply(cls, *args, **kwargs)
            applied: list[type] = []

            def noting(inner: Any, *own: Any, **named: Any) -> Any:
                applied.append(inner)
                return _apply(inner, *own, **named)

            rule = f"the rule of {cls.__name__} for vmap"
            with self.outside(), replaced(torch.autograd.Function, apply=classmethod(noting)), drawing_nothing(rule):
                found = _apply(cls, *args, **kwargs)
            if cls not in applied:
                raise FuseError(f"{rule} does not apply it, so that its backward would not be called")
            return found

        return apply

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is called meanwhile is outside the `vmap`."""
        with _streams(*self._streams), replaced(torch.autograd.Function, apply=classmethod(_apply)):
            yield


_apply: Any = vars(torch.autograd.Function)["apply"].__func__


def tensor_entries(module: nn.Module, whole: nn.Module) -> list[TensorEntry]:
    """Return where the tensors of a `module` inside the `whole` are."""
    named = (*whole.named_parameters(), *whole.named_buffers())
    first = {id(tensor): name for name, tensor in named}
    found: list[TensorEntry] = []
    for inner in module.modules():
        tables: Any = inner._parameters, inner._buffers
        for table in tables:
            found += [(table, name, first[id(tensor)]) for name, tensor in table.items() if tensor is not None]
    return found


def _alone(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> None:
        raise FuseError(f"{name} is of one trial alone")

    return refuse


@contextmanager
def _streams(default: Any, on_cuda: Any) -> Iterator[None]:
    """Set what PyTorch's random numbers come from."""
    with (
        replaced(torch.random, default_generator=default),
        replaced(torch, default_generator=default),
        replaced(torch.cuda, default_generators=on_cuda),
    ):
        yield


class _NoStream:
    """Stands for PyTorch's random numbers in this thread, because each trial has its own."""

    def __init__(self, real: Any) -> None:
        self._real, self._thread = real, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_others(name), name)

    def __getitem__(self, index: int) -> Any:
        return self._of_others("default_generators")[index]

    def _of_others(self, name: str) -> Any:
        """The real ones for another thread, such as one that reads batches."""
        if threading.get_ident() == self._thread:
            raise FuseError(f"the code calls {name} of PyTorch's random numbers, and each trial has its own")
        return self._real
