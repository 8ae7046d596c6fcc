"""Calls a model with a batch's inputs, and says from which line of the user's a call of PyTorch comes."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model with the inputs of a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def copied(batch: Any) -> Any:
    """A batch whose tensors are its own."""
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, batch)


def source_line() -> str:
    """The user's line that makes a call, in brackets; where layers of PyTorch's make it, the layer's class."""
    frame = sys._getframe(1)
    layer = ""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code is run.__code__:
            return f" (in {layer})" if layer else ""
        own = frame.f_locals.get("self")
        layer = layer or (type(own).__name__ if isinstance(own, nn.Module) else "")
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
