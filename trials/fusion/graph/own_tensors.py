"""Notices what a forward does, while it is traced, with its model's tensors themselves instead of with values.

A graph keeps `self.weight`, but `self.parameters()`, a closure or `state_dict()` give the tensor, and what is computed
from that alone would be a constant.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trials.fusion.errors import FuseError


class OwnTensors(TorchDispatchMode):
    """Enter it around a trace of `model`. Calls on the model's parameters and buffers raise `FuseError`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = (*model.named_parameters(), *model.named_buffers())
        self._data = [(name, tensor, tensor.data) for name, tensor in named]
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in named if _has_storage(tensor)}
        self._called = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _has_storage(value):
                name = self._names.get(value.untyped_storage()._cdata)
                if name is not None:
                    self._called = self._called or f"it calls {func} on '{name}' itself, which a graph does not keep"
                    self.check()
        return func(*args, **kwargs or {})

    def check(self) -> None:
        """Refuse the trace if something was called, though the forward may have caught the error.

        Raises:
            FuseError: something was.
        """
        if self._called:
            raise FuseError(self._called)

    def put_back(self) -> list[str]:
        """Undo assignments to `tensor.data`, and return the names."""
        changed = [(name, tensor, data) for name, tensor, data in self._data if _memory(tensor) != _memory(data)]
        for _, tensor, data in changed:
            tensor.data = data
        return [name for name, *_ in changed]


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter)


def _memory(tensor: Tensor) -> object:
    if not _has_storage(tensor):
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
