"""Notices questions about a parameter to which a trial among others has another answer than alone.

Among others a trial's parameter is a part of all trials': it is no leaf of autograd's graph, has no gradient, and
shares memory. Nor has it what the user has set on the parameter itself.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from trials.fusion.errors import RefusedError
from trials.fusion.graph.observer import is_library
from trials.fusion.graph.surroundings import replaced

GRADIENT = ("grad",)
MEMORY = ("storage", "untyped_storage", "storage_offset", "_is_view", "output_nr", "_version")
"""Of buffers, too, and of all that shares memory with them, such as ``weight.detach()``."""
ASKED = (*GRADIENT, "is_leaf", "grad_fn", "retains_grad", "register_post_accumulate_grad_hook", "__deepcopy__", *MEMORY)
_untyped_storage = Tensor.untyped_storage


def own_attributes(module: nn.Module) -> frozenset[str]:
    """Return the names of what the user has set on parameters and buffers of `module` themselves."""
    return frozenset(name for tensor in (*module.parameters(), *module.buffers()) for name in vars(tensor))


def refused_question(name: str, parameter: str) -> RefusedError:
    """Return the error for code that asks for the attribute `name` of the `parameter`, or buffer."""
    return RefusedError(
        f"the forward, or what it lets the backward pass call, asks for '{name}' of the parameter '{parameter}', which "
        "a trial among others does not have for itself; allowed: what does not depend on it, such as "
        "torch.autograd.grad, detach() or clone()"
    )


@contextmanager
def asking(
    named: Iterable[tuple[str, Tensor]],
    names: Iterable[str] = ASKED,
    error: Callable[[str, str], Exception] = refused_question,
    buffers: Iterable[tuple[str, Tensor]] = (),
) -> Iterator[None]:
    """Refuse, while entered, questions about tensors, also where the code that asks catches the error.

    Args:
        named: the tensors, by name.
        names: the attributes that it asks for.
        error: made of an attribute's and a tensor's name.
        buffers: more tensors, for questions about `MEMORY`.
    """
    get_overridable_functions()  # PyTorch looks at the class once, and keeps what it finds
    held = {id(tensor): (name, tensor) for name, tensor in named}
    memory = {_memory(tensor): name for name, tensor in (*held.values(), *buffers)}
    found: list[Exception] = []

    def noticing(attribute: str) -> property:
        plain = getattr(Tensor, attribute, None) or _OfInstance(attribute)
        get = plain.__get__

        def ask(tensor: Tensor) -> Any:
            name = held[id(tensor)][0] if id(tensor) in held else None
            if attribute in MEMORY and name is None:
                name = memory.get(_memory(tensor) or -1)
            if name is not None and not _is_passed_over(attribute, sys._getframe(1)):
                found.append(error(attribute, name))
                raise found[0]
            return get(tensor, type(tensor))

        return property(ask, getattr(plain, "__set__", None), getattr(plain, "__delete__", None))

    with replaced(Tensor, **{attribute: noticing(attribute) for attribute in names}):
        yield
    if found:
        raise found[0]


class _OfInstance:
    """Gives what an instance has of its own, as if the class had nothing of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, tensor: Tensor, kind: type) -> Any:
        try:
            return vars(tensor)[self._name]
        except KeyError:
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{self._name}'") from None

    def __set__(self, tensor: Tensor, value: Any) -> None:
        vars(tensor)[self._name] = value

    def __delete__(self, tensor: Tensor) -> None:
        del vars(tensor)[self._name]


def _memory(tensor: Tensor) -> int | None:
    """Return whose memory a tensor shares; None: it has none of its own."""
    with torch._C.DisableTorchFunction():  # the question is ours, and so is its error
        try:
            found: int = _untyped_storage(tensor)._cdata
        except (RuntimeError, NotImplementedError):
            return None
    return found


def _is_passed_over(attribute: str, caller: FrameType) -> bool:
    """Whether a question is ours, or PyTorch's own. Some of its functions read gradients for the user."""
    for_user = attribute in GRADIENT and str(caller.f_globals.get("__name__")).startswith("torch.nn.utils.")
    return is_library(caller) and not for_user
