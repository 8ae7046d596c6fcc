"""What the CUDA driver is asked, seen from its side: a library whose functions have the API's own C signatures."""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import pytest

from benchmarks.gpu.device_kernels import CudaKernels
from ds_hooks.shared.cuda_driver import CudaDriver, DriverError

NOT_READY, INVALID = 600, 1
DEVICE_OFFSET = 1 << 40

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuCtxSynchronize": (),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemHostRegister": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamWriteValue32": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamBatchMemOp": (c_void_p, c_uint, POINTER(c_uint64), c_uint),
    "cuMemAlloc": (POINTER(c_uint64), c_size_t),
    "cuMemFree": (c_uint64,),
    "cuMemsetD8": (c_uint64, c_ubyte, c_size_t),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
"""From cuda.h of CUDA 12; every one returns a CUresult."""


class Library:
    """libcuda, as far as it is called. Handles count up from 1; `calls` has what arrived."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, int] = {}
        self.missing: set[str] = set()
        self._handles = iter(range(1, 1000))
        self._kept = {
            name: ctypes.CFUNCTYPE(c_int, *signature)(self._function(name)) for name, signature in SIGNATURES.items()
        }

    def cuGetProcAddress_v2(self, name: bytes, found: Any, version: Any, flags: Any, status: Any) -> int:
        assert (version.value, flags.value) == (12000, 0)
        if name.decode() in self.missing:
            return 500
        found._obj.value = ctypes.cast(self._kept[name.decode()], c_void_p).value
        return 0

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _function(self, name: str) -> Any:
        def run(*arguments: Any) -> int:
            if name == "cuLaunchKernel":
                function, *sizes, stream, parameters, extra = arguments
                kinds = [c_uint64, {32: c_uint32, 256: c_uint64}.get(sizes[3], c_uint64)][: 1 if sizes[3] == 1 else 2]
                values = [ctypes.cast(parameters[i], POINTER(kind))[0] for i, kind in enumerate(kinds)]
                self.calls.append((name, function, *sizes, stream, values, extra))
                if sizes[3] == 256:  # work notes when it ran, in host memory
                    ctypes.memmove(values[0] - DEVICE_OFFSET, (c_uint64 * 2)(1_000, 1_000 + 4 * values[1]), 16)
                return self.results.get(name, 0)
            if name == "cuStreamBatchMemOp":
                stream, count, operations, flags = arguments
                self.calls.append((name, stream, [tuple(operations[6 * i : 6 * i + 4]) for i in range(count)], flags))
                return self.results.get(name, 0)
            plain = [a for a in arguments if not isinstance(a, ctypes._Pointer)]
            self.calls.append((name, *plain))
            for out in (a for a in arguments if isinstance(a, ctypes._Pointer)):
                self._fill(name, out, arguments)
            return self.results.get(name, 0)

        return run

    def _fill(self, name: str, out: Any, arguments: tuple[Any, ...]) -> None:
        kind = type(out[0]) if not isinstance(out, POINTER(c_void_p)) else c_void_p
        if name == "cuEventElapsedTime":
            out[0] = 1.25
        elif name == "cuGetErrorName":
            out[0] = b"CUDA_ERROR_INVALID_VALUE"
        elif name == "cuMemHostGetDevicePointer":
            out[0] = arguments[1] + DEVICE_OFFSET
        elif name == "cuDeviceGetAttribute":
            out[0] = 132
        elif kind is c_void_p or isinstance(out, POINTER(c_int)):
            out[0] = next(self._handles)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    yield made


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(DriverError, match="no CUDA driver of version 12"):
        CudaDriver()


def test_without_a_context_the_error_says_so(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_fill", lambda *_: None)
    with pytest.raises(DriverError, match="has no CUDA context"):
        CudaDriver()


def test_a_device_can_be_taken_without_torch(library: Library) -> None:
    CudaDriver(2)
    assert [name for name, *_ in library.calls] == [
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuCtxGetCurrent",
    ]
    assert library.named("cuDeviceGet") == [(2,)]


def test_calls_have_the_arguments_that_the_api_wants(library: Library) -> None:
    driver = CudaDriver()
    stream, event = driver.create_stream(), driver.create_event()
    driver.record(event, 0)  # the legacy default stream
    driver.wait_event(stream, event)
    address = 1 << 45
    device_address = driver.register(address, 4096)
    driver.write_word(stream, device_address + 8, 2**32 - 1)
    driver.wait_at_least(stream, device_address, 7)
    driver.write_words(stream, [(device_address, 3), (device_address + 8, 2**32 - 1)])
    driver.wait_for_words(stream, [(device_address, 7)])
    driver.unregister(address)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    assert library.named("cuStreamCreate") == [(1,)], "one that does not wait for the default stream"
    assert library.named("cuEventCreate") == [(0,)]
    assert library.named("cuEventRecord") == [(event, None)]
    assert library.named("cuStreamWaitEvent") == [(stream, event, 0)]
    assert library.named("cuMemHostRegister") == [(address, 4096, 3)]
    assert device_address == address + DEVICE_OFFSET
    assert library.named("cuStreamWriteValue32") == [(stream, device_address + 8, 2**32 - 1, 0)]
    assert library.named("cuStreamWaitValue32") == [(stream, device_address, 7, 0)]
    assert library.named("cuStreamBatchMemOp") == [
        (stream, [(2, device_address, 3, 0), (2, device_address + 8, 2**32 - 1, 0)], 0),
        (stream, [(1, device_address, 7, 0)], 0),
    ]
    assert library.named("cuMemHostUnregister") == [(address,)]
    assert library.named("cuStreamDestroy") == [(stream,)] and library.named("cuEventDestroy") == [(event,)]


def test_an_event_is_done_or_not_and_anything_else_is_an_error(library: Library) -> None:
    driver = CudaDriver()
    event = driver.create_event()
    assert driver.is_done(event)
    library.results["cuEventQuery"] = NOT_READY
    assert not driver.is_done(event)
    library.results["cuEventQuery"] = INVALID
    with pytest.raises(DriverError, match=r"cuEventQuery: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.is_done(event)


def test_times_are_nanoseconds(library: Library) -> None:
    assert CudaDriver().elapsed_ns(1, 2) == 1_250_000


def test_a_function_that_this_driver_lacks_is_named(library: Library) -> None:
    driver = CudaDriver()
    library.missing.add("cuStreamWaitValue32")
    with pytest.raises(DriverError, match="no cuStreamWaitValue32 of version 12"):
        driver.wait_at_least(1, 2, 3)


def test_kernels_are_launched_with_their_parameters_and_calibrated(library: Library) -> None:
    kernels = CudaKernels(CudaDriver())
    kernels.work(5, 3_000_000)
    *_, (function, *sizes, stream, values, extra) = library.named("cuLaunchKernel")
    waves = 60  # of 50 us each
    assert sizes == [8 * 132 * waves, 1, 1, 256, 1, 1, 0] and stream == 5 and extra is None and function
    assert values[1] == 750_000 / waves, "at the four nanoseconds a round that its stamps showed"
    assert kernels.stamps() == [(1_000, 1_000 + 3_000_000 // waves)]
    kernels.receive(5, 1 << 41, 9)
    *_, (_, *sizes, stream, values, _) = library.named("cuLaunchKernel")
    assert sizes == [4, 1, 1, 32, 1, 1, 0] and values == [1 << 41, 9]


def test_kernels_give_back_what_the_device_can_reach_so_that_others_may_register_there(library: Library) -> None:
    kernels = CudaKernels(CudaDriver())
    kernels.close()
    registered = [address for address, *_ in library.named("cuMemHostRegister")]
    assert registered and sorted(registered) == sorted(address for (address,) in library.named("cuMemHostUnregister"))
    assert len(library.named("cuMemFree")) == len(library.named("cuMemAlloc")) == 1
