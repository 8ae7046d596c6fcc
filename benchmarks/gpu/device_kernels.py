"""Kernels of known length that record when they ran, by the device's own timer; on CUDA or on the fake driver."""

from typing import Protocol

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import CudaDriver, Driver
from squeezer.calibration import kernels as calibration

_BLOCK_NS = 50_000
"""How long one block of a long kernel runs: about as long as one of a matrix product. Blocks cannot be preempted."""
STAMPS = 1 << 18
"""The number of kernels that one process can record."""


class Kernels(Protocol):
    """Kernels of known length on a device."""

    name: str
    """Of the device."""

    def work(self, stream: int, busy_ns: int) -> None:
        """Queue a kernel that fills the device for about this long, if it has the device to itself."""

    def receive(self, stream: int, device_address: int, value: int) -> None:
        """Queue a kernel that spins until the 32-bit word is `value` or more."""

    def stamps(self) -> list[tuple[int, int]]:
        """(start, end) in ns of every `work` that has ended, by one timer for all processes."""

    def close(self) -> None:
        """Give back what the device can reach; nothing may be queued."""


def open_device(kind: str) -> tuple[Driver, Kernels]:
    """The driver of the first device, and kernels for it.

    Args:
        kind: ``"cuda"``, or ``"cpu"`` for the fake driver.
    """
    if kind == "cpu":
        fake = FakeDriver()
        return fake, FakeKernels(fake)
    driver = CudaDriver(0)
    return driver, CudaKernels(driver)


class FakeKernels:
    """Threads that sleep."""

    name = "fake driver"

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def work(self, stream: int, busy_ns: int) -> None:
        """See `Kernels`."""
        self._driver.launch(stream, busy_ns)

    def receive(self, stream: int, device_address: int, value: int) -> None:
        """See `Kernels`."""
        self._driver.spin(stream, device_address, value)

    def stamps(self) -> list[tuple[int, int]]:
        """See `Kernels`."""
        return [(kernel.start_ns, kernel.end_ns) for kernel in self._driver.kernels if kernel.end_ns]

    def close(self) -> None:
        """See `Kernels`."""


class CudaKernels:
    """Those of `squeezer.calibration`, which calibrate themselves at the start, on an idle device."""

    def __init__(self, driver: CudaDriver) -> None:
        self._kernels = calibration.Kernels(driver, STAMPS)
        self.name = self._kernels.name
        self._own: list[int] = []

    def work(self, stream: int, busy_ns: int) -> None:
        """See `Kernels`."""
        self._own.append(self._kernels.work(stream, busy_ns, max(1, busy_ns // _BLOCK_NS)))

    def receive(self, stream: int, device_address: int, value: int) -> None:
        """See `Kernels`."""
        self._kernels.receive(stream, device_address, value)

    def stamps(self) -> list[tuple[int, int]]:
        """See `Kernels`."""
        return [times for times in map(self._kernels.times, self._own) if times[1]]

    def close(self) -> None:
        """See `Kernels`."""
        self._kernels.close()
