"""A graph that is recorded and played on the host, as strict as a device's: it does again what was queued."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trials.fusion.own_code.streams import saved
from trials.fusion.rows import Rows
from trials.training.cuda_graph import Pass

_ATEN = torch.ops.aten
_REFUSED = _ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.lift_fresh.default
"""What waits for a device, or copies numbers of the host's there. No device records it."""


class Frozen(TorchDispatchMode):
    """Replays the operations of one pass on the very tensors that they had. No code of the host's runs again.

    Attributes:
        replays: of all graphs since it was last set.
    """

    replays = 0

    def __init__(self, run: Callable[[], Pass], rows: Rows) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._own: set[int] = set()
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        restore = saved(rows.buffers, rows.generators)
        try:
            with self:
                self.result = run()
        finally:
            restore()
            for memory, before in self._written.values():
                memory.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, and keep it."""
        if func in _REFUSED:
            raise RuntimeError("operation not permitted when stream is capturing")
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(given)
        self._keep((kwargs or {}).get("out"))
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            known = {_place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            self._own |= {_place(x) for x in tree_leaves(made) if isinstance(x, Tensor)} - known
        self._calls.append((func, args, kwargs or {}, made))
        return made

    def _keep(self, written: Any) -> None:
        """Keep the memory of what is about to be written, if it was there before: a device only records."""
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and _place(tensor) not in self._own | self._written.keys():
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._written[_place(tensor)] = memory, memory.clone()

    def replay(self) -> None:
        """Do all of it again."""
        Frozen.replays += 1
        with torch.no_grad():
            for func, args, kwargs, made in self._calls:
                given = {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
                if func.is_view:
                    continue
                again = func(*args, **kwargs)
                for kept, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(kept, Tensor) and id(kept) not in given and kept is not new:
                        kept.copy_(new)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
