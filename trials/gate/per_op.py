"""Host work on a CUDA device: its length is unknown, so each operation there waits for a bubble by itself.

Neighbours share no wait: a bubble may end between them, as the host may do anything there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PerOp(TorchDispatchMode):
    """While entered, calls `before` ahead of every PyTorch operation of this thread that touches a kind of device.

    Args:
        before: what to call.
        device_type: as PyTorch names it. Operations on other devices, such as on the host, go ahead.
    """

    def __init__(self, before: Callable[[], None], device_type: str) -> None:
        super().__init__()
        self._before, self._device_type = before, device_type

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See PyTorch's `TorchDispatchMode`."""
        named = kwargs or {}
        if self._touches(args) or self._touches(named.values()):
            self._before()
        return func(*args, **named)

    def _touches(self, values: Iterable[Any]) -> bool:
        """Whether one of them is the device, or a tensor there, also in a list as of what is stacked."""
        for value in values:
            if isinstance(value, torch.Tensor):
                found = value.device.type == self._device_type
            elif isinstance(value, torch.device):
                found = value.type == self._device_type
            else:
                found = isinstance(value, list | tuple) and self._touches(value)
            if found:
                return True
        return False
