"""How many bytes of tensors live while something runs: of all storages, looked at after every operation."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Meter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}
        for found in gc.get_objects():
            if issubclass(type(found), Tensor) and found.layout is torch.strided and found.device.type == "cpu":
                self._note(found)
        self.before = self.most = self.now()

    def _note(self, tensor: Tensor) -> None:
        ref = StorageWeakRef(tensor.untyped_storage())
        self._known[ref.cdata] = ref

    def now(self) -> int:
        total = 0
        for cdata, ref in tuple(self._known.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._known[cdata]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.layout is torch.strided and each.device.type == "cpu":
                self._note(each)
        self.most = max(self.most, self.now())
        return found


def most_added(do: Callable[[], Any]) -> tuple[int, int]:
    """Call `do`, and return by how many bytes live tensors grew at most, and by how many while its result lives."""
    gc.collect()
    with _Meter() as meter:
        found = do()
    gc.collect()
    after = meter.now()
    del found
    return meter.most - meter.before, after - meter.before
