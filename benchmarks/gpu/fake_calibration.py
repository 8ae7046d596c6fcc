"""The figures of `squeezer.calibration` on the fake driver: shows that they end, and what they decide.

They say nothing about a device. `python -m benchmarks.gpu.fake_calibration FILE` is the second process; `VARIABLE`
tells it how unkind the driver is.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import CudaDriver
from squeezer.calibration import blocking_calls
from squeezer.calibration.kernels import Kernels
from squeezer.calibration.measured_device import MeasuredDevice
from squeezer.calibration.side_process import serve

VARIABLE = "BSQ_FAKE_DEVICE"
SWITCH_S = 1e-4
"""How long a thread that polls may keep the interpreter from the streams, where this process has a core of its own;
Python's own 5 ms are many kernels."""


@dataclass(frozen=True, kw_only=True)
class Unkind:
    """How a driver treats its callers.

    Attributes:
        waits: the calls that wait until the device has nothing to do; "launch" is one of kernels.
        locks: the calls that hold a lock of the driver, which all processes on the device share, until they return.
        depth: how much a stream holds; 0: any amount.
        late_ns: the delay of every word that the device writes.
    """

    waits: tuple[str, ...] = ("cuMemFree", "cuMemFreeHost", "cuMemHostUnregister", "cuModuleLoadData", "cuModuleUnload")
    locks: tuple[str, ...] = ()
    depth: int = 0
    late_ns: int = 0

    def environment(self) -> dict[str, str]:
        """What makes the second process's driver such a one."""
        return {VARIABLE: json.dumps(asdict(self))}


class UnkindDriver(FakeDriver):
    """Has the calls by name that the figures need, too.

    Args:
        path: of the words, on which the driver's lock is.
        unkind: how it treats its callers.
    """

    def __init__(self, path: Path, unkind: Unkind) -> None:
        super().__init__(depth=unkind.depth)
        self.late_ns = unkind.late_ns
        self._path, self._unkind = path, unkind
        self._recorded: list[Callable[[], None]] | None = None
        self._graphs: list[list[Callable[[], None]]] = []

    def queue(self, stream: int, step: Callable[[], None]) -> None:
        """See `FakeDriver`. While a graph is recorded, nothing runs."""
        if self._recorded is not None:
            self._recorded.append(step)
            return
        self.wait_as("launch")
        super().queue(stream, step)

    def wait_as(self, name: str) -> None:
        """Wait for the device, and for the driver's lock, if this driver does so in the call `name`."""
        with self._path.open() as lock:
            if name in self._unkind.locks:
                fcntl.flock(lock, fcntl.LOCK_EX)
            if name in self._unkind.waits:
                self.synchronize()

    def call(self, name: str, *arguments: Any) -> int:
        """See `CudaDriver`. Only graphs and what waits do anything."""
        match name:
            case "cuCtxSynchronize" | "cuStreamSynchronize":
                self.synchronize()
            case "cuStreamBeginCapture":
                self._recorded = []
            case "cuStreamEndCapture":
                assert self._recorded is not None
                self._graphs.append(self._recorded)
                self._recorded = None
                arguments[1]._obj.value = len(self._graphs)
            case "cuGraphInstantiateWithFlags":
                arguments[0]._obj.value = arguments[1].value
            case "cuGraphLaunch":
                for step in self._graphs[arguments[0].value - 1]:
                    super().queue(arguments[1].value, step)
            case _:
                self.wait_as(name)
        return 0


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

    def forget(self, number: int) -> None:
        """See `Kernels`."""
        self._times[number][:] = 0, 0

    def close(self) -> None:
        """Nothing to give back."""

    def _next(self) -> list[int]:
        self._times.append([0, 0])
        return self._times[-1]


def fake_device(path: Path, unkind: Unkind | None = None) -> MeasuredDevice:
    """A device of the fake driver."""
    path.touch()
    driver = UnkindDriver(path, Unkind() if unkind is None else unkind)
    return MeasuredDevice(path, cast(CudaDriver, driver), cast(Kernels, FakeCalibrationKernels(driver)))


if __name__ == "__main__":
    blocking_calls.OPENS_AFTER_S = 0.08
    sys.setswitchinterval(SWITCH_S)
    serve(fake_device(Path(sys.argv[1]), Unkind(**json.loads(os.environ.get(VARIABLE, "{}")))))
