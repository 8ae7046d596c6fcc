"""Host work on a CUDA device: its length is unknown, so each operation waits for a bubble by itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class PerOp(TorchDispatchMode):
    """While entered, calls `before` ahead of every PyTorch operation that this thread starts."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See PyTorch's `TorchDispatchMode`."""
        self._before()
        return func(*args, **(kwargs or {}))
