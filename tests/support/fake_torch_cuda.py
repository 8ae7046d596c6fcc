"""PyTorch's CUDA calls on a machine without a device: they note what was asked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trials.side_task import devices

GB = 1 << 30
TOTAL_BYTES = 80 * GB
PEAK_BYTES = GB
UUID = "89f4a2c1-0000-1111-2222-f33344445555"


def fake_torch_cuda(monkeypatch: pytest.MonkeyPatch, stream: int = 77) -> list[tuple[Any, ...]]:
    """Pretend that there is a device of 80 GiB, whose new streams are all `stream`.

    Returns:
        What was asked of the device, in order.
    """
    asked: list[tuple[Any, ...]] = []

    def note(name: str, gives: Any = None) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda *args, **named: asked.append((name, *args)) or gives)

    note("is_available", True)
    note("set_device")
    note("get_device_properties", SimpleNamespace(total_memory=TOTAL_BYTES, uuid=UUID))
    note("set_per_process_memory_fraction")
    note("Stream", SimpleNamespace(cuda_stream=stream))
    note("set_stream")
    note("reset_peak_memory_stats")
    note("max_memory_allocated", PEAK_BYTES)
    note("memory_reserved", 0)
    real_empty = torch.empty

    def empty(*args: Any, **named: Any) -> Any:
        if named.get("device") == torch.device("cuda", 0):
            return asked.append(("empty", *args))
        return real_empty(*args, **named)

    def pin(tensor: Tensor) -> Tensor:
        asked.append(("pin_memory", tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(devices, "_sleep_while_waiting", lambda: asked.append(("sleep",)))
    return asked
