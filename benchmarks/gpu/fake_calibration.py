"""The figures of `squeezer.calibration` on the fake driver: shows that they come to an end, and nothing about a device.

`python -m benchmarks.gpu.fake_calibration FILE` is the second process.
"""

import sys
import time
from pathlib import Path
from typing import cast

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import CudaDriver
from squeezer.calibration.kernels import Kernels
from squeezer.calibration.measured_device import MeasuredDevice
from squeezer.calibration.side_process import serve


class FakeCalibrationKernels:
    """`Kernels` whose work sleeps."""

    name = "fake driver"

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._times: list[list[int]] = []
        self._gaps: tuple[int, int, list[tuple[int, int]]] = (0, 0, [])

    def work(self, stream: int, busy_ns: int, waves: int = 1) -> int:
        """See `Kernels`."""
        times = self._next()

        def run() -> None:
            times[0] = time.monotonic_ns()
            time.sleep(busy_ns / 1e9)
            times[1] = time.monotonic_ns()

        self._driver.queue(stream, run)
        return len(self._times) - 1

    small = work

    def stamp(self, stream: int) -> int:
        """See `Kernels`."""
        return self.work(stream, 0)

    def receive(self, stream: int, device_address: int, value: int) -> int:
        """See `Kernels`."""
        self._driver.wait_at_least(stream, device_address, value)
        return self.work(stream, 0)

    def watch(self, stream: int, device_address: int, value: int, least_ns: int) -> None:
        """See `Kernels`. There are no gaps."""
        start_ns = time.monotonic_ns()
        self._driver.wait_at_least(stream, device_address, value)

        def end() -> None:
            self._gaps = (start_ns, time.monotonic_ns(), [])

        self._driver.queue(stream, end)

    def gaps(self) -> tuple[int, int, list[tuple[int, int]]]:
        """See `Kernels`."""
        return self._gaps

    def times(self, number: int) -> tuple[int, int]:
        """See `Kernels`."""
        start_ns, end_ns = self._times[number]
        return start_ns, end_ns

    def close(self) -> None:
        """Nothing to give back."""

    def _next(self) -> list[int]:
        self._times.append([0, 0])
        return self._times[-1]


def fake_device(path: Path) -> MeasuredDevice:
    """A device of the fake driver."""
    driver = FakeDriver()
    return MeasuredDevice(path, cast(CudaDriver, driver), cast(Kernels, FakeCalibrationKernels(driver)))


if __name__ == "__main__":
    serve(fake_device(Path(sys.argv[1])))
