"""Figure 5: which driver calls wait for a stream that waits at a shut gate, and for how long."""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ds_hooks.shared.cuda_driver import PORTABLE_AND_MAPPED, DriverError, address_of
from squeezer.calibration.graphs import Graph
from squeezer.calibration.kernels import PTX
from squeezer.calibration.measured_device import MeasuredDevice, Word

OPENS_AFTER_S = 0.15
"""When the gate opens. A call that takes about as long has waited for it."""
_MIB = 1 << 20
_DEEPEST = 3000


def time_calls(device: MeasuredDevice, options: dict[str, Any]) -> dict[str, Any]:
    """Make each call while the stream waits; a timer opens the gate.

    Returns:
        `took_ms`: by the call's name, or the driver's reason against it; `opens_after_ms`; `queued_at_most`: launches
        that a stream took before one had to wait.
    """
    took_ms: dict[str, float | str] = {}
    epoch, launch_ms = 0, 0.0
    for name, call in _calls(device):
        epoch += 1
        timer = threading.Timer(OPENS_AFTER_S, device.words.__setitem__, (Word.GATE, epoch))
        timer.daemon = True
        timer.start()
        start_s = time.perf_counter()
        device.wait_for(Word.GATE, epoch)
        device.kernels.work(device.stream, 10_000)
        queued_s = time.perf_counter()
        launch_ms = max(launch_ms, 1e3 * (queued_s - start_s))
        try:
            call()
            took_ms[name] = 1e3 * (time.perf_counter() - queued_s)
        except DriverError as error:
            took_ms[name] = str(error)
        timer.cancel()
        device.words[Word.GATE] = epoch
        device.driver.call("cuCtxSynchronize")
    took_ms["launch, behind the wait"] = launch_ms
    return {"took_ms": took_ms, "opens_after_ms": OPENS_AFTER_S * 1e3, "queued_at_most": _depth(device, epoch + 1)}


def _calls(device: MeasuredDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of each; what a call needs is made before."""
    yield "nothing", lambda: None
    yield from _calls_for_memory(device)
    yield from _calls_for_code(device)
    yield from _calls_for_streams(device)


def _calls_for_memory(device: MeasuredDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    call = device.driver.call
    stream, other_stream = ctypes.c_void_p(device.stream), ctypes.c_void_p(device.driver.create_stream())
    memory, other, pooled, pinned = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p()
    size, by = ctypes.c_size_t(_MIB), ctypes.byref
    pageable = ctypes.create_string_buffer(_MIB)
    at = ctypes.c_void_p(address_of(memoryview(mmap.mmap(-1, _MIB)).cast("q")))
    call("cuMemAlloc", by(other), size)
    yield "cuMemAlloc", lambda: call("cuMemAlloc", by(memory), size)
    yield "cuMemFree", lambda: call("cuMemFree", memory)
    yield "cuMemAllocAsync, other stream", lambda: call("cuMemAllocAsync", by(pooled), size, other_stream)
    yield "cuMemFreeAsync, other stream", lambda: call("cuMemFreeAsync", pooled, other_stream)
    yield "cuMemHostAlloc", lambda: call("cuMemHostAlloc", by(pinned), size, ctypes.c_uint(0))
    yield "copy, pinned to device", lambda: call("cuMemcpyHtoDAsync", other, pinned, size, stream)
    yield "copy, device to pinned", lambda: call("cuMemcpyDtoHAsync", pinned, other, size, stream)
    yield "copy, pageable to device", lambda: call("cuMemcpyHtoDAsync", other, pageable, size, stream)
    yield "copy, device to pageable", lambda: call("cuMemcpyDtoHAsync", pageable, other, size, stream)
    yield "copy, pageable to device, blocking", lambda: call("cuMemcpyHtoD", other, pageable, size)
    yield "cuMemFreeHost", lambda: call("cuMemFreeHost", pinned)
    yield "cuMemHostRegister", lambda: call("cuMemHostRegister", at, size, ctypes.c_uint(PORTABLE_AND_MAPPED))
    yield "cuMemHostUnregister", lambda: call("cuMemHostUnregister", at)
    yield "cuMemsetD8Async", lambda: call("cuMemsetD8Async", other, ctypes.c_ubyte(0), size, stream)
    yield "cuMemsetD8", lambda: call("cuMemsetD8", other, ctypes.c_ubyte(0), size)
    yield "cuMemGetInfo", lambda: call("cuMemGetInfo", by(ctypes.c_size_t()), by(ctypes.c_size_t()))


def _calls_for_code(device: MeasuredDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    call, by, name = device.driver.call, ctypes.byref, ctypes.c_char_p(b"stamp")
    module, loaded, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    yield "cuModuleLoadData", lambda: call("cuModuleLoadData", by(module), ctypes.c_char_p(PTX))
    yield "cuModuleGetFunction", lambda: call("cuModuleGetFunction", by(function), module, name)
    yield "cuModuleUnload", lambda: call("cuModuleUnload", module)
    call("cuModuleLoadData", by(loaded), ctypes.c_char_p(PTX))
    call("cuModuleGetFunction", by(function), loaded, name)
    target, one = ctypes.c_uint64(device.address(Word.PROBE)), ctypes.c_uint(1)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(target))
    other_stream = ctypes.c_void_p(device.driver.create_stream())
    sizes = (one, one, one, one, one, one, ctypes.c_uint(0))
    yield (
        "first launch of a function, other stream",
        lambda: call("cuLaunchKernel", function, *sizes, other_stream, pointers, ctypes.c_void_p(None)),
    )


def _calls_for_streams(device: MeasuredDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    driver, kernels = device.driver, device.kernels
    second, event = driver.create_stream(), driver.create_event()

    def runs_on_second() -> None:
        kernels.work(second, 10_000)
        device.finish(second)

    yield "launch, same stream", lambda: kernels.work(device.stream, 1000)
    yield "launch, other stream, until it has run", runs_on_second
    yield "launch, legacy default stream", lambda: kernels.work(0, 1000)
    yield "cuStreamCreate", driver.create_stream
    yield "cuStreamDestroy, other stream", lambda: driver.destroy_stream(second)
    yield "cuEventCreate", driver.create_event
    yield "cuEventRecord", lambda: driver.record(event, device.stream)
    yield "cuEventQuery", lambda: driver.is_done(event)
    yield "cuEventDestroy", lambda: driver.destroy_event(event)
    graph: list[Graph] = []
    third = MeasuredStream(device)
    yield "record and instantiate a graph", lambda: graph.append(third.graph())
    yield "cuGraphLaunch, same stream", lambda: graph[0].launch(device.stream)
    yield "cuStreamSynchronize", lambda: driver.call("cuStreamSynchronize", ctypes.c_void_p(device.stream))


class MeasuredStream(MeasuredDevice):
    """The same device with another stream."""

    def __init__(self, device: MeasuredDevice) -> None:
        self.driver, self.kernels, self.words = device.driver, device.kernels, device.words
        self.stream = device.driver.create_stream()

    def graph(self) -> Graph:
        """Five kernels."""

        def work() -> None:
            for _ in range(5):
                self.kernels.small(self.stream, 1000)

        return Graph(self, work)


def _depth(device: MeasuredDevice, epoch: int) -> int:
    """How many kernels can be queued behind the wait before a launch has to wait."""
    timer = threading.Timer(1.0, device.words.__setitem__, (Word.GATE, epoch))
    timer.daemon = True
    device.wait_for(Word.GATE, epoch)
    timer.start()
    depth = _DEEPEST
    for number in range(_DEEPEST):
        start_s = time.perf_counter()
        device.kernels.small(device.stream, 1000)
        if time.perf_counter() - start_s > 0.05:
            depth = number
            break
        if device.words[Word.GATE] >= epoch:  # it opened before the queue was full
            depth = -number
            break
    timer.cancel()
    device.words[Word.GATE] = epoch
    device.driver.call("cuCtxSynchronize")
    return depth


def main_calls(device: MeasuredDevice) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of what the main process may need while the other waits at the gate, inside the driver."""
    driver, size = device.driver, ctypes.c_size_t(_MIB)
    memory, pinned, module = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
    by = ctypes.byref

    def runs() -> None:
        device.kernels.work(device.stream, 10_000)
        device.finish(limit_s=3)

    yield "launch, until it has run", runs
    yield "cuMemAlloc", lambda: driver.call("cuMemAlloc", by(memory), size)
    yield "cuMemFree", lambda: driver.call("cuMemFree", memory)
    yield "cuMemHostAlloc", lambda: driver.call("cuMemHostAlloc", by(pinned), size, ctypes.c_uint(0))
    yield "cuMemFreeHost", lambda: driver.call("cuMemFreeHost", pinned)
    yield "cuModuleLoadData", lambda: driver.call("cuModuleLoadData", by(module), ctypes.c_char_p(PTX))
    yield "cuModuleUnload", lambda: driver.call("cuModuleUnload", module)
    yield "cuStreamCreate", lambda: driver.create_stream()
    yield "cuCtxSynchronize", lambda: driver.call("cuCtxSynchronize")
    yield "launch, again", runs
