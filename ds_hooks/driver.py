"""A device's streams, as the hooks and the side task's gate ask them: events, and words of shared memory.

`Driver` is what both need; `CudaDriver` is CUDA's own, by ctypes, so that no package is needed for it. Everything is
queued and returns at once; nothing here ever waits for the device.
"""

import ctypes
import functools
from typing import Any, Protocol

NON_BLOCKING = 1
"""A stream that does not wait for the legacy default stream, nor that for it."""
_PORTABLE_AND_MAPPED = 1 | 2
_WAIT_FOR_ANY_BIT = 2
_EVENT_WITHOUT_TIME = 2
_NOT_READY = 600
_API_VERSION = 12000
"""Of the functions' signatures. Bare names in the library are those of the first version ever."""


class DriverError(Exception):
    """The driver refused a call; the message names the call and the driver's own reason."""


class Driver(Protocol):
    """One device. Streams, events and device addresses are the driver's own handles, as integers."""

    def adopt_thread(self) -> None:
        """Use the device from the calling thread, too."""

    def create_stream(self) -> int:
        """A stream that runs beside all others."""

    def destroy_stream(self, stream: int) -> None:
        """Give it back; what is queued in it still runs."""

    def create_event(self) -> int:
        """A mark for a place in a stream, which keeps the device's time."""

    def destroy_event(self, event: int) -> None:
        """Give it back."""

    def record(self, event: int, stream: int) -> None:
        """Put `event` at the end of `stream`: it is done when all that was queued before it is."""

    def wait_event(self, stream: int, event: int) -> None:
        """Let what is queued in `stream` from now on wait for `event` as it was last recorded."""

    def is_done(self, event: int) -> bool:
        """Whether the device has come to it."""

    def elapsed_ns(self, start: int, end: int) -> int:
        """Device time between two events that are done."""

    def register(self, address: int, size: int) -> int:
        """Let the device reach the `size` bytes of host memory at `address`, both multiples of a page.

        Returns:
            The device's address for them.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`; nothing that is queued may still need it."""

    def write_word(self, stream: int, device_address: int, value: int) -> None:
        """Queue: write the 32-bit `value`. What was queued before is visible first."""

    def wait_bits(self, stream: int, device_address: int, mask: int) -> None:
        """Queue: wait until the 32-bit word has any bit of `mask`."""


class CudaDriver:
    """The CUDA context that is current in this thread, which torch has made.

    Functions and constants are those of the CUDA driver API, section "Stream Memory Operations" for words.

    Raises:
        DriverError: no driver, one older than CUDA 12, or no context.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._look_up = library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise DriverError(f"no CUDA driver of version 12 or later: {error}") from None
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context:
            raise DriverError("this thread has no CUDA context; use a tensor on the device first")
        self._context = context

    def adopt_thread(self) -> None:
        """See `Driver`."""
        self._call("cuCtxSetCurrent", self._context)

    def create_stream(self) -> int:
        """See `Driver`."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self._call("cuStreamDestroy", ctypes.c_void_p(stream))

    def create_event(self, *, timed: bool = True) -> int:
        """See `Driver`; without time an event is cheaper."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0 if timed else _EVENT_WITHOUT_TIME))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventDestroy", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """See `Driver`."""
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """See `Driver`."""
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def is_done(self, event: int) -> bool:
        """See `Driver`."""
        return self._call("cuEventQuery", ctypes.c_void_p(event), also=_NOT_READY) == 0

    def elapsed_ns(self, start: int, end: int) -> int:
        """See `Driver`. The driver tells it to half a microsecond."""
        elapsed_ms = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(elapsed_ms), ctypes.c_void_p(start), ctypes.c_void_p(end))
        return round(elapsed_ms.value * 1e6)

    def register(self, address: int, size: int) -> int:
        """See `Driver`."""
        self._call(
            "cuMemHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE_AND_MAPPED)
        )
        device_address = ctypes.c_uint64()
        self._call(
            "cuMemHostGetDevicePointer", ctypes.byref(device_address), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        return device_address.value

    def unregister(self, address: int) -> None:
        """See `Driver`."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def write_word(self, stream: int, device_address: int, value: int) -> None:
        """See `Driver`."""
        self._queue_word("cuStreamWriteValue32", stream, device_address, value, 0)

    def wait_bits(self, stream: int, device_address: int, mask: int) -> None:
        """See `Driver`."""
        self._queue_word("cuStreamWaitValue32", stream, device_address, mask, _WAIT_FOR_ANY_BIT)

    def _queue_word(self, name: str, stream: int, device_address: int, value: int, flags: int) -> None:
        self._call(
            name,
            ctypes.c_void_p(stream),
            ctypes.c_uint64(device_address),
            ctypes.c_uint32(value),
            ctypes.c_uint(flags),
        )

    def _call(self, name: str, *arguments: Any, also: int = 0) -> int:
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


def address_of(words: "memoryview[int]") -> int:
    """Where the mapped memory behind `words` begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(words))
