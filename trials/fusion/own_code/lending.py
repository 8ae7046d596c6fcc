"""Lends one trial's random stream after another to what runs in a backward pass."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import Variable

from trials.fusion.own_code.streams import drawing_from

Hook = Callable[[Any], Any]
"""Is called with gradients."""

_lent: torch.Generator | None = None
_until = ExitStack()


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


def is_lending() -> bool:
    """Whether some trial's stream is lent."""
    return _lent is not None


def aside(hook: Hook) -> Hook:
    """Return a hook that does the same, but draws from no trial's stream."""

    def without(gradients: Any) -> Any:
        if _lent is None:
            return hook(gradients)
        lent = _lent
        lend(None)
        try:
            return hook(gradients)
        finally:
            lend(lent)

    return without
