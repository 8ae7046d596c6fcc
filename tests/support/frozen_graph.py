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
        restore = saved(rows.buffers, rows.generators)
        try:
            with self:
                self.result = run()
        finally:
            restore()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, and keep it."""
        if func in _REFUSED:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, made))
        return made

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
