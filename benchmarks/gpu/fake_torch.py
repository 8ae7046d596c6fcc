"""The part of PyTorch that the hooks ask about a device, answered for the fake driver."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from ds_hooks.clock import cuda as clock_module

UUID = "89f4a2c1-0000-1111-2222-f33344445555"
PEAK_BYTES, FREE_BYTES, TOTAL_BYTES = 7 << 30, 9 << 30, 80 << 30


@contextmanager
def fake_torch(driver: FakeDriver) -> Iterator[None]:
    """Let hooks that are attached meanwhile find a main job that computes on `driver`'s default stream."""
    cuda = SimpleNamespace(
        current_stream=lambda: SimpleNamespace(cuda_stream=DEFAULT_STREAM),
        current_device=lambda: 0,
        get_device_properties=lambda device: SimpleNamespace(uuid=UUID),
        max_memory_reserved=lambda: PEAK_BYTES,
        mem_get_info=lambda: (FREE_BYTES, TOTAL_BYTES),
    )
    real = sys.modules.get("torch")
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    try:
        with mock.patch.object(clock_module, "CudaDriver", lambda: driver):
            yield
    finally:  # one module only: mock.patch.dict would drop all that were imported meanwhile
        del sys.modules["torch"]
        if real is not None:
            sys.modules["torch"] = real
