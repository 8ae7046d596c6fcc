"""Kernels of known length that record when they ran, by the device's own timer; on CUDA or on the fake driver.

CUDA's are written in PTX, which the driver compiles, so no compiler and no torch are needed.
"""

import ctypes
import mmap
from statistics import median
from typing import Protocol

from benchmarks.gpu.fake_driver import FakeDriver
from ds_hooks.shared.cuda_driver import CudaDriver, Driver, address_of

STAMPS = 1 << 18
"""The number of kernels that one process can record."""
_THREADS = 256
_BLOCKS_EACH = 8
"""Per multiprocessor: as many threads as it can hold, so that nothing else fits beside them."""
_MULTIPROCESSORS = 16
"""cuDeviceGetAttribute's number of CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
_NAME_BYTES = 256

_PTX = b"""
.version 7.0
.target sm_75
.address_size 64

.visible .entry work(.param .u64 stamp, .param .u64 rounds)
{
    .reg .pred %busy, %other;
    .reg .u32 %thread, %block, %who;
    .reg .u64 %out, %left, %start, %end;
    .reg .f32 %x, %a;
    ld.param.u64 %out, [stamp];
    ld.param.u64 %left, [rounds];
    mov.u64 %start, %globaltimer;
    mov.f32 %x, 0f3F800000;
    mov.f32 %a, 0f3F7FFFFE;
again:
    fma.rn.f32 %x, %x, %a, %a;
    fma.rn.f32 %x, %x, %a, %a;
    fma.rn.f32 %x, %x, %a, %a;
    fma.rn.f32 %x, %x, %a, %a;
    sub.u64 %left, %left, 1;
    setp.gt.u64 %busy, %left, 0;
    @%busy bra again;
    mov.u64 %end, %globaltimer;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    or.b32 %who, %thread, %block;
    setp.ne.u32 %other, %who, 0;
    @%other bra done;
    st.global.u64 [%out], %start;
    st.global.u64 [%out+8], %end;
    st.global.f32 [%out+16], %x;
done:
    ret;
}

.visible .entry receive(.param .u64 word, .param .u32 value)
{
    .reg .pred %early;
    .reg .u64 %at;
    .reg .u32 %wanted, %seen;
    ld.param.u64 %at, [word];
    ld.param.u32 %wanted, [value];
again:
    ld.volatile.global.u32 %seen, [%at];
    setp.lt.u32 %early, %seen, %wanted;
    @%early bra again;
    ret;
}
\0"""
"""`receive` spins until a word is there, as NCCL's kernels do, in a few blocks."""

_STAMP_BYTES = 24
_RECEIVE_BLOCKS = 4


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
        self._driver.wait_at_least(stream, device_address, value)

    def stamps(self) -> list[tuple[int, int]]:
        """See `Kernels`."""
        return [(kernel.start_ns, kernel.end_ns) for kernel in self._driver.kernels if kernel.end_ns]


class CudaKernels:
    """PTX, with enough blocks to fill every multiprocessor. Calibrates itself at the start, on an idle device."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        device, count = ctypes.c_int(), ctypes.c_int()
        driver.call("cuCtxGetDevice", ctypes.byref(device))
        name = ctypes.create_string_buffer(_NAME_BYTES)
        driver.call("cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
        self.name = name.value.decode()
        driver.call("cuDeviceGetAttribute", ctypes.byref(count), ctypes.c_int(_MULTIPROCESSORS), device)
        self._blocks = _BLOCKS_EACH * count.value
        module = ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
        self._work, self._receive = (self._function(module, name) for name in (b"work", b"receive"))
        self._memory = mmap.mmap(-1, STAMPS * 64)
        self._words = memoryview(self._memory).cast("q")
        self._device_address = driver.register(address_of(self._words), len(self._memory))
        self._count = 0
        self._rounds_per_ns = 0.25
        self._calibrate()

    def work(self, stream: int, busy_ns: int) -> None:
        """See `Kernels`."""
        stamp = self._device_address + 64 * (self._count % STAMPS)
        self._count += 1
        rounds = max(1, round(busy_ns * self._rounds_per_ns))
        self._launch(self._work, self._blocks, stream, ctypes.c_uint64(stamp), ctypes.c_uint64(rounds))

    def receive(self, stream: int, device_address: int, value: int) -> None:
        """See `Kernels`."""
        self._launch(
            self._receive, _RECEIVE_BLOCKS, stream, ctypes.c_uint64(device_address), ctypes.c_uint32(value), threads=32
        )

    def stamps(self) -> list[tuple[int, int]]:
        """See `Kernels`."""
        words = self._words
        pairs = ((words[8 * i], words[8 * i + 1]) for i in range(min(self._count, STAMPS)))
        return [(start_ns, end_ns) for start_ns, end_ns in pairs if end_ns]

    def _calibrate(self) -> None:
        """Measure the rounds per nanosecond, after a few kernels that bring the clocks up."""
        asked_ns = 2_000_000
        for _ in range(3):
            first = self._count
            for _ in range(10):
                self.work(0, asked_ns)
            self._driver.call("cuCtxSynchronize")
            took_ns = [self._words[8 * i + 1] - self._words[8 * i] for i in range(first, self._count)]
            self._rounds_per_ns *= asked_ns / median(took_ns)
        self._count = 0
        self._words[:] = memoryview(bytearray(len(self._memory))).cast("q")

    def _function(self, module: ctypes.c_void_p, name: bytes) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._driver.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
        return function

    def _launch(
        self,
        function: ctypes.c_void_p,
        blocks: int,
        stream: int,
        *values: "ctypes.c_uint64 | ctypes.c_uint32",
        threads: int = _THREADS,
    ) -> None:
        one, none = ctypes.c_uint(1), ctypes.c_void_p(None)
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid = (ctypes.c_uint(blocks), one, one)
        block = (ctypes.c_uint(threads), one, one)
        shared_bytes = ctypes.c_uint(0)
        self._driver.call(
            "cuLaunchKernel", function, *grid, *block, shared_bytes, ctypes.c_void_p(stream), arguments, none
        )
