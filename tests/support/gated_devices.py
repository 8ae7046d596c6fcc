"""Gates with the devices behind them: a core, a device that threads play, a GPU, and none."""

import threading
import time
from typing import Protocol

import torch

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import CudaDriver, address_of
from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.file import Page
from tests.support.fused_and_solo import RecordingGate
from trials.gate.base import Gate, OpenGate
from trials.gate.cpu import CpuGate
from trials.gate.cuda import CudaGate

MS = 1_000_000


class Kind(Protocol):
    """A gate with the device behind it."""

    gate: Gate

    def work(self, ms: int) -> None:
        """The device work of a unit, right after it was let in."""

    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of all work so far, in ns of the host's clock, once the device has nothing more to do."""

    def leave(self) -> None:
        """End it wherever it is."""


class Cpu:
    def __init__(self, page: Page) -> None:
        self.gate = CpuGate(page)
        self._spans: list[tuple[int, int]] = []

    def work(self, ms: int) -> None:
        start_ns, end_ns = time.monotonic_ns(), time.thread_time_ns() + ms * MS
        while time.thread_time_ns() < end_ns:
            pass
        self._spans.append((start_ns, time.monotonic_ns()))

    def spans(self) -> list[tuple[int, int]]:
        return self._spans

    def leave(self) -> None:
        self.gate.close()


class FakeCuda:
    def __init__(self, page: Page) -> None:
        self._words = page.words
        self.driver = self.driver_of()
        self.stream = self.driver.create_stream()
        self.gate: Gate = CudaGate(page, self.driver, self.stream)

    def driver_of(self) -> FakeDriver:
        """The driver, which never holds its caller."""
        return FakeDriver()

    def work(self, ms: int) -> None:
        self.driver.launch(self.stream, ms * MS)

    def spans(self) -> list[tuple[int, int]]:
        return [(kernel.start_ns, kernel.end_ns) for kernel in self.driver.kernels]

    def synchronize(self) -> None:
        self.driver.queue(self.stream, (done := threading.Event()).set)
        assert done.wait(60), "the driver holds it for ever"

    def leave(self) -> None:
        force_gate(self._words)
        self.gate.close()
        self.driver.close()


class Cuda:
    def __init__(self, page: Page) -> None:
        self._words = page.words
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            timed = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            timed[0].record()
            torch.cuda._sleep(10_000_000)
            timed[1].record()
            torch.cuda.synchronize()
            self._cycles_per_ms = 10_000_000 / timed[0].elapsed_time(timed[1])
            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record()
            torch.cuda.synchronize()
            self._base_ns = time.monotonic_ns()
        self.gate = CudaGate(page, CudaDriver(), self._stream.cuda_stream)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def work(self, ms: int) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begin.record()
            torch.cuda._sleep(round(ms * self._cycles_per_ms))
            end.record()
        self._events.append((begin, end))

    def spans(self) -> list[tuple[int, int]]:
        def time_ns(event: torch.cuda.Event) -> int:
            return self._base_ns + round(self._base.elapsed_time(event) * 1e6)

        return [(time_ns(begin), time_ns(end)) for begin, end in self._events if end.query()]

    def synchronize(self) -> None:
        self._stream.synchronize()

    def leave(self) -> None:
        force_gate(self._words)
        self._stream.synchronize()
        if not self.gate.close():  # a page stays registered that is unmapped all the same
            CudaDriver().unregister(address_of(self._words))


class UnkindCuda(FakeCuda):
    """Every launch comes after an allocation, one hardware queue serves all streams, and it is short."""

    def driver_of(self) -> FakeDriver:
        return FakeDriver(connections=1, depth=16, loads_lazily=True)

    def work(self, ms: int) -> None:
        self.driver.synchronize()
        self.driver.launch(self.stream, ms * MS, f"{ms} ms")


class ShallowCuda(FakeCuda):
    """A stream takes eight pieces of work; who queues another waits for the device."""

    ROOM = 8

    def driver_of(self) -> FakeDriver:
        return FakeDriver(depth=self.ROOM)


class LazyCuda(FakeCuda):
    """The first launch of a kernel waits until the device has nothing to do; each length of work is another kernel."""

    def driver_of(self) -> FakeDriver:
        return FakeDriver(loads_lazily=True)

    def work(self, ms: int) -> None:
        self.driver.launch(self.stream, ms * MS, f"{ms} ms")


class Streams(Kind, Protocol):
    """A gate whose device has streams."""

    def synchronize(self) -> None:
        """Wait in the driver for all work so far, as `.item()` in a study does."""


class NeverCloses:
    """A gate without a device."""

    def __init__(self, page: Page) -> None:
        self.gate: Gate = OpenGate()

    def work(self, ms: int) -> None: ...

    def spans(self) -> list[tuple[int, int]]:
        return []

    def leave(self) -> None:
        self.gate.close()


class Records(NeverCloses):
    """The gate by which tests see what was asked for."""

    def __init__(self, page: Page) -> None:
        self.gate = RecordingGate()
