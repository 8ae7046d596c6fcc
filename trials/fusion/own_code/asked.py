"""Notices questions about a parameter to which a trial among others has another answer than alone.

Among others a trial's parameter is a part of all trials': it is no leaf of autograd's graph, and has no gradient.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from trials.fusion.errors import RefusedError
from trials.fusion.graph.observer import is_library
from trials.fusion.graph.surroundings import replaced

GRADIENT = ("grad",)
_ASKED = (*GRADIENT, "is_leaf", "grad_fn", "retains_grad", "register_post_accumulate_grad_hook", "__deepcopy__")


def refused_question(name: str, parameter: str) -> RefusedError:
    """Return the error for code that asks for the attribute `name` of the `parameter`."""
    return RefusedError(
        f"the forward, or what it lets the backward pass call, asks for '{name}' of the parameter '{parameter}', which "
        "a trial among others does not have for itself; allowed: what does not depend on it, such as "
        "torch.autograd.grad, detach() or clone()"
    )


@contextmanager
def asking(
    named: Iterable[tuple[str, Tensor]],
    names: Iterable[str] = _ASKED,
    error: Callable[[str, str], Exception] = refused_question,
) -> Iterator[None]:
    """Refuse, while entered, questions about tensors, also where the code that asks catches the error.

    Args:
        named: the tensors, by name.
        names: the attributes that it asks for.
        error: made of an attribute's and a tensor's name.
    """
    held = {id(tensor): (name, tensor) for name, tensor in named}
    found: list[Exception] = []

    def noticing(attribute: str) -> property:
        plain = getattr(Tensor, attribute)
        get = plain.__get__

        def ask(tensor: Tensor) -> Any:
            if id(tensor) in held and not _is_passed_over(attribute, sys._getframe(1)):
                found.append(error(attribute, held[id(tensor)][0]))
                raise found[0]
            return get(tensor, type(tensor))

        return property(ask, getattr(plain, "__set__", None), getattr(plain, "__delete__", None))

    with replaced(Tensor, **{attribute: noticing(attribute) for attribute in names}):
        yield
    if found:
        raise found[0]


def _is_passed_over(attribute: str, caller: FrameType) -> bool:
    """Whether a question is ours, or PyTorch's own. Some of its functions read gradients for the user."""
    for_user = attribute in GRADIENT and str(caller.f_globals.get("__name__")).startswith("torch.nn.utils.")
    return is_library(caller) and not for_user
