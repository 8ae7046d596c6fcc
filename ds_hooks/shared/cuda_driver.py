"""A device's streams, events and shared words, as the hooks and the side task's gate use them.

`Driver` is the interface; `CudaDriver` calls CUDA's driver by ctypes, so it needs no package. Calls only queue work and
return at once. `comes` and the probe of `DeviceWords` wait for the device, a second at most; `unregister`, until
nothing is queued on it.
"""

import ctypes
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

NON_BLOCKING = 1
"""A stream that neither waits for the legacy default stream nor holds it up."""
CONTEXT_BYTES = 600 << 20
"""The device memory that a context takes besides its allocations. That of a side task counts as the side task's."""
PORTABLE_AND_MAPPED = 1 | 2
_WAIT_AT_LEAST = 0
_EVENT_WITHOUT_TIME = 2
_NOT_READY = 600
_THREAD_LOCAL = 1
"""As a thread's mode: recordings of other threads do not restrict it, nor it them."""
PATIENCE_S = 1.0
"""The longest wait for the device, at the start and the end of a run; it normally takes microseconds."""
_NAP_S = 2e-4
_API_VERSION = 12000
"""Fixes the functions' signatures. A bare name in the library is that of its first version."""

_WAIT_32, _WRITE_32 = 1, 2


class _WordOperation(ctypes.Structure):
    """A `CUstreamBatchMemOpParams` that writes or waits; 48 bytes, as the union is."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("_pad", ctypes.c_uint64),
    )


Words = Sequence[tuple[int, int]]
"""(device address, 32-bit value) of each."""

_kept: list["memoryview[int]"] = []
"""Memory that a device may still write to."""


class DriverError(Exception):
    """The driver refused a call; the message names the call and the driver's own reason."""


class Driver(Protocol):
    """One device. Streams, events and device addresses are the driver's own handles, as integers."""

    def adopt_thread(self) -> None:
        """Let the calling thread use the device, too."""

    def spare_recordings(self) -> None:
        """Let the calling thread ask for events while another one records a graph, whose recording would break else."""

    def create_stream(self) -> int:
        """Make a stream that runs beside all others."""

    def destroy_stream(self, stream: int) -> None:
        """Give `stream` back; what is queued in it still runs."""

    def create_event(self) -> int:
        """Make an event: a mark for a place in a stream, which keeps the device's time."""

    def destroy_event(self, event: int) -> None:
        """Give `event` back."""

    def record(self, event: int, stream: int) -> None:
        """Put `event` at the end of `stream`: it is done when all that was queued before it is."""

    def wait_event(self, stream: int, event: int) -> None:
        """Make what is queued in `stream` from now on wait for `event` as it was last recorded."""

    def is_done(self, event: int) -> bool:
        """Whether the device has come to `event`."""

    def elapsed_ns(self, start: int, end: int) -> int:
        """Measure the device time between two events that are done."""

    def register(self, address: int, size: int) -> int:
        """Let the device reach `size` bytes of host memory at `address`, both multiples of a memory page.

        Returns:
            The device's address for them.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`; nothing that is queued may still use the memory."""

    def write_word(self, stream: int, device_address: int, value: int) -> None:
        """Queue a write of the 32-bit `value`. The effects of earlier work are visible before it."""

    def wait_at_least(self, stream: int, device_address: int, value: int) -> None:
        """Queue a wait until the signed 32-bit word is `value` or more."""

    def write_words(self, stream: int, values: Words) -> None:
        """Queue several writes by one call, in this order; see `write_word`."""

    def wait_for_words(self, stream: int, values: Words) -> None:
        """Queue several waits by one call, one after the other; see `wait_at_least`."""


class CudaDriver:
    """CUDA, in the context that is current in this thread.

    Functions and constants are those of the CUDA driver API; for words, its section "Stream Memory Operations".

    Args:
        device: the number of the device to use, in the context that torch would use; None: the current context.

    Raises:
        DriverError: no driver, one older than CUDA 12, or no context.
    """

    def __init__(self, device: int | None = None) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._look_up = library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise DriverError(f"no CUDA driver of version 12 or later: {error}") from None
        context = ctypes.c_void_p()
        if device is not None:
            handle = ctypes.c_int()
            self.call("cuInit", ctypes.c_uint(0))
            self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self.call("cuCtxSetCurrent", context)
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context:
            raise DriverError("this thread has no CUDA context; use a tensor on the device first")
        self._context = context

    def adopt_thread(self) -> None:
        """See `Driver`."""
        self.call("cuCtxSetCurrent", self._context)

    def spare_recordings(self) -> None:
        """See `Driver`; `cuThreadExchangeStreamCaptureMode`."""
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))

    def create_stream(self) -> int:
        """See `Driver`."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self.call("cuStreamDestroy", ctypes.c_void_p(stream))

    def create_event(self, *, timed: bool = True) -> int:
        """See `Driver`. An event that is not `timed` is cheaper."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0 if timed else _EVENT_WITHOUT_TIME))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self.call("cuEventDestroy", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """See `Driver`."""
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """See `Driver`."""
        self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def is_done(self, event: int) -> bool:
        """See `Driver`."""
        return self.call("cuEventQuery", ctypes.c_void_p(event), also=_NOT_READY) == 0

    def elapsed_ns(self, start: int, end: int) -> int:
        """See `Driver`. The resolution is half a microsecond."""
        elapsed_ms = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(elapsed_ms), ctypes.c_void_p(start), ctypes.c_void_p(end))
        return round(elapsed_ms.value * 1e6)

    def register(self, address: int, size: int) -> int:
        """See `Driver`."""
        self.call(
            "cuMemHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(PORTABLE_AND_MAPPED)
        )
        device_address = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer", ctypes.byref(device_address), ctypes.c_void_p(address), ctypes.c_uint(0))
        return device_address.value

    def unregister(self, address: int) -> None:
        """See `Driver`."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def write_word(self, stream: int, device_address: int, value: int) -> None:
        """See `Driver`."""
        self._queue_word("cuStreamWriteValue32", stream, device_address, value, 0)

    def wait_at_least(self, stream: int, device_address: int, value: int) -> None:
        """See `Driver`."""
        self._queue_word("cuStreamWaitValue32", stream, device_address, value, _WAIT_AT_LEAST)

    def write_words(self, stream: int, values: Words) -> None:
        """See `Driver`."""
        self._queue_words(stream, values, _WRITE_32, 0)

    def wait_for_words(self, stream: int, values: Words) -> None:
        """See `Driver`."""
        self._queue_words(stream, values, _WAIT_32, _WAIT_AT_LEAST)

    def _queue_words(self, stream: int, values: Words, what: int, flags: int) -> None:
        operations = (_WordOperation * len(values))(*(_WordOperation(what, *pair, flags) for pair in values))
        self.call(
            "cuStreamBatchMemOp", ctypes.c_void_p(stream), ctypes.c_uint(len(values)), operations, ctypes.c_uint(0)
        )

    def _queue_word(self, name: str, stream: int, device_address: int, value: int, flags: int) -> None:
        self.call(
            name,
            ctypes.c_void_p(stream),
            ctypes.c_uint64(device_address),
            ctypes.c_uint32(value),
            ctypes.c_uint(flags),
        )

    def call(self, name: str, *arguments: Any, also: int = 0) -> int:
        """Call a function of the driver API.

        Args:
            name: as in the API's documentation.
            arguments: its arguments, as ctypes.
            also: a result that is no error, besides 0.

        Returns:
            0 or `also`.

        Raises:
            DriverError: there is no such function, or it failed.
        """
        result: int = self._function(name)(*arguments)
        if result not in (0, also):
            raise DriverError(f"{name}: {self._reason(result)}")
        return result

    @functools.cache  # noqa: B019
    def _function(self, name: str) -> Any:
        found, status = ctypes.c_void_p(), ctypes.c_int()
        result = self._look_up(
            name.encode(), ctypes.byref(found), ctypes.c_int(_API_VERSION), ctypes.c_uint64(0), ctypes.byref(status)
        )
        if result or not found:
            raise DriverError(f"this CUDA driver has no {name} of version 12")
        return ctypes.CFUNCTYPE(ctypes.c_int)(found.value or 0)

    def _reason(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._function("cuGetErrorName")(ctypes.c_int(result), ctypes.byref(text))
        return f"{(text.value or b'error').decode()} ({result})"


def comes(driver: Driver, event: int) -> bool:
    """Wait a second at most for the device to come to `event`: at a run's start or end, never in between."""
    end_s = time.monotonic() + PATIENCE_S
    while not driver.is_done(event):
        if time.monotonic() > end_s:
            return False
        time.sleep(_NAP_S)
    return True


class DeviceWords:
    """Shared words as a device reaches them.

    Args:
        driver: the device.
        words: mapped memory, whole memory pages.
        probe: the index of a word that nothing else uses. At start the device must write it in time, and must wait
            until the host has written it.

    Raises:
        DriverError: the device refuses, or one side does not see what the other writes.
    """

    def __init__(self, driver: Driver, words: "memoryview[int]", *, probe: int) -> None:
        self._driver, self._words = driver, words
        self._address = address_of(words)
        self._device_address = driver.register(self._address, words.nbytes)
        stream = driver.create_stream()
        try:
            self._probe(probe, stream)
        except DriverError:
            keep_mapped(words)  # the device may come to them yet
            raise
        finally:
            driver.destroy_stream(stream)

    def address(self, index: int) -> int:
        """The device's address of a word. A device reads and writes its low 32 bits."""
        return self._device_address + 8 * index

    def write(self, stream: int, *values: tuple[int, int]) -> None:
        """Queue writes of (index, value), in this order."""
        self._driver.write_words(stream, [(self.address(index), value) for index, value in values])

    def release(self) -> None:
        """Give the words back. Nothing that is queued may need them; a real device waits until nothing is queued."""
        self._driver.unregister(self._address)

    def _probe(self, index: int, stream: int) -> None:
        driver, words = self._driver, self._words
        words[index] = 0
        written, passed = driver.create_event(), driver.create_event()
        self.write(stream, (index, 1))
        driver.record(written, stream)
        # by a timer: another thread may wait for the device and hold the driver's lock, and this one is stuck then
        release = threading.Timer(PATIENCE_S, self._let_through, (index,))
        release.daemon = True
        release.start()
        try:
            driver.wait_for_words(stream, [(self.address(index), 2)])
            driver.record(passed, stream)
            seen = comes(driver, written) and words[index] == 1
            too_early = driver.is_done(passed)
        finally:
            release.cancel()
            self._let_through(index)  # also if the probe fails
        if not (comes(driver, passed) and seen) or too_early:
            raise DriverError("the device and the host do not see each other's words in time")
        driver.destroy_event(written)
        driver.destroy_event(passed)

    def _let_through(self, index: int) -> None:
        self._words[index] = 2


def keep_mapped(words: "memoryview[int]") -> None:
    """Keep the memory behind `words` mapped until the process ends."""
    _kept.append(memoryview(words))


def address_of(words: "memoryview[int]") -> int:
    """The address of `words` in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(words))
