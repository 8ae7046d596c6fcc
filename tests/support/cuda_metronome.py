"""The metronome on a device with streams, played by threads: it issues its steps ahead, and the device follows.

    python -m tests.support.cuda_metronome [--bubble-ms 30] [--compute-ms 20]

Takes the metronome's orders. At its end it prints the bubbles that its device had, as a line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from benchmarks.gpu.fake_driver import DEFAULT_STREAM, FakeDriver
from ds_hooks.clock.cuda import CudaClock
from ds_hooks.clock.registry import CLOCKS
from ds_hooks.shared.device_uuid import write_device_uuid
from ds_hooks.shared.page.file import Page
from tests.support import metronome
from tests.support.fake_nvml import NUMBER

DRIVER = FakeDriver()
RECEIVE = "receive"


class CudaMetronome(metronome.Metronome):
    """Its work is kernels."""

    device = SimpleNamespace(type="cuda")
    _waits_issued = 0

    def _stall(self) -> None:
        if self.stall_ms:
            DRIVER.launch(DEFAULT_STREAM, int(self.stall_ms * 1e6), "stall")
        self._compute()

    def _compute(self) -> None:
        DRIVER.launch(DEFAULT_STREAM, int(self.compute_ms / 2 * 1e6), "compute")

    def _wait(self) -> None:
        DRIVER.launch(DEFAULT_STREAM, int(self.bubble_ms * 1e6), RECEIVE)
        self._waits_issued += 1

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[[Any], None]]] = {
        metronome.ForwardPass: _stall,
        metronome.RecvGrad: _wait,
        metronome.BackwardPass: _compute,
    }

    def train_batch(self) -> float:
        """The host issues a step while the device is in the one before."""
        loss = super().train_batch()
        while self._waits_begun() < self._waits_issued - 2:
            time.sleep(1e-3)
        return loss

    def _waits_begun(self) -> int:
        return sum(kernel.name == RECEIVE for kernel in DRIVER.kernels)


def clock(page: Page, clock_ns: Callable[[], int]) -> CudaClock:
    """What `ds_hooks.clock.cuda.cuda_clock` makes on a real device."""
    write_device_uuid(page.words, NUMBER)
    return CudaClock(page, DRIVER, lambda: DEFAULT_STREAM, clock_ns)


def main() -> None:
    """Let the real hooks meet this device."""
    cuda = SimpleNamespace(max_memory_reserved=lambda: 4 << 30, mem_get_info=lambda: (20 << 30, 80 << 30))
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    CLOCKS["cuda"] = clock
    made: Any = metronome
    made.Metronome = CudaMetronome
    metronome.main()
    waits = [(kernel.start_ns, kernel.end_ns) for kernel in DRIVER.kernels if kernel.name == RECEIVE]
    print(json.dumps({"bubbles": waits}), flush=True)


if __name__ == "__main__":
    main()
