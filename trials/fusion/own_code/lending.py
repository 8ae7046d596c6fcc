"""Lends one trial's random stream after another to what runs in a backward pass."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from trials.fusion.own_code.streams import drawing_from

Hook = Callable[[Any], Any]
"""Is called with gradients."""

_ASIDE = "_is_aside"
_lent: torch.Generator | None = None
_until = ExitStack()
_others = False


def lend(stream: torch.Generator | None) -> None:
    """Let PyTorch's own random numbers come from `stream` until another is lent, or the pass under way ends.

    None: they are no trial's.
    """
    global _lent
    if stream is _lent:
        return
    _until.close()
    _lent = stream
    if stream is not None:
        _until.enter_context(drawing_from(stream))
        Variable._execution_engine.queue_callback(lambda: lend(None))


def may_draw() -> bool:
    """Whether random numbers that are drawn now are some trial's, or not the user's."""
    return _lent is not None or _others


def aside(hook: Hook, others: bool = False) -> Hook:
    """Return a hook that does the same, but draws from no trial's stream; `others` may draw in it."""

    def without(gradients: Any) -> Any:
        global _others
        lent, _others = _lent, others
        if lent is not None:
            lend(None)
        try:
            return hook(gradients)
        finally:
            _others = False
            if lent is not None:
                lend(lent)

    setattr(without, _ASIDE, True)
    return without


def hooks_aside(parameter: Tensor) -> None:
    """Let the hooks on a parameter draw from no trial's stream: they run while any trial's may be lent."""
    tables: Any = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    for table in tables:
        for key, hook in (table or {}).items():
            if not hasattr(hook, _ASIDE):
                table[key] = aside(hook)
