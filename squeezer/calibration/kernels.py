"""Kernels of known length that write down when they ran, by the device's own timer.

They are written in PTX, which the driver compiles, so no compiler and no torch are needed.
"""

import ctypes
import mmap
from statistics import median

from ds_hooks.shared.cuda_driver import CudaDriver, address_of

_STAMP_BYTES = 64
_THREADS = 256
_BLOCKS_EACH = 8
"""Per multiprocessor: as many threads as it can hold, so that nothing else fits beside them."""
_MULTIPROCESSORS = 16
"""cuDeviceGetAttribute's number of CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
_NAME_BYTES = 256
_COUNTERS = 4096
"""More than can be queued: each kernel in flight counts its ended blocks in a counter of its own."""
_RECEIVE_BLOCKS = 4
WATCHED_AT_MOST = 20_000
"""Gaps that one `watch` can write down."""

PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry work(.param .u64 out, .param .u64 rounds, .param .u64 counter)
{
    .reg .pred %busy, %other, %first, %earlier;
    .reg .u32 %thread, %block, %blocks, %last, %before;
    .reg .u64 %to, %left, %start, %end, %count;
    .reg .f32 %x, %a;
    ld.param.u64 %to, [out];
    ld.param.u64 %left, [rounds];
    ld.param.u64 %count, [counter];
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
    bar.sync 0;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %other, %thread, 0;
    @%other bra done;
    mov.u32 %block, %ctaid.x;
    setp.eq.u32 %first, %block, 0;
    @%first st.global.f32 [%to+16], %x;
    @%first st.global.u64 [%to], %start;
    mov.u32 %blocks, %nctaid.x;
    sub.u32 %last, %blocks, 1;
    atom.global.inc.u32 %before, [%count], %last;
    setp.ne.u32 %earlier, %before, %last;
    @%earlier bra done;
    mov.u64 %end, %globaltimer;
    st.global.u64 [%to+8], %end;
done:
    ret;
}

.visible .entry stamp(.param .u64 out)
{
    .reg .u64 %at, %now;
    ld.param.u64 %at, [out];
    mov.u64 %now, %globaltimer;
    st.global.u64 [%at], %now;
    st.global.u64 [%at+8], %now;
    ret;
}

.visible .entry receive(.param .u64 word, .param .u32 value, .param .u64 out)
{
    .reg .pred %early, %other;
    .reg .u64 %at, %to, %now;
    .reg .u32 %wanted, %seen, %thread, %block, %who;
    ld.param.u64 %at, [word];
    ld.param.u32 %wanted, [value];
    ld.param.u64 %to, [out];
again:
    ld.volatile.global.u32 %seen, [%at];
    setp.lt.s32 %early, %seen, %wanted;
    @%early bra again;
    mov.u64 %now, %globaltimer;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    or.b32 %who, %thread, %block;
    setp.ne.u32 %other, %who, 0;
    @%other bra done;
    st.global.u64 [%to], %now;
    st.global.u64 [%to+8], %now;
done:
    ret;
}

.visible .entry watch(.param .u64 word, .param .u32 value, .param .u64 out, .param .u32 most, .param .u64 least)
{
    .reg .pred %early, %short, %full;
    .reg .u64 %at, %to, %now, %last, %gap, %shortest, %place, %many;
    .reg .u32 %wanted, %seen, %count, %limit;
    ld.param.u64 %at, [word];
    ld.param.u32 %wanted, [value];
    ld.param.u64 %to, [out];
    ld.param.u32 %limit, [most];
    ld.param.u64 %shortest, [least];
    mov.u32 %count, 0;
    mov.u64 %last, %globaltimer;
    st.global.u64 [%to], %last;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %gap, %now, %last;
    setp.lt.u64 %short, %gap, %shortest;
    @%short bra quiet;
    setp.ge.u32 %full, %count, %limit;
    @%full bra quiet;
    mul.wide.u32 %place, %count, 16;
    add.u64 %place, %place, %to;
    st.global.u64 [%place+24], %last;
    st.global.u64 [%place+32], %now;
    add.u32 %count, %count, 1;
quiet:
    mov.u64 %last, %now;
    ld.volatile.global.u32 %seen, [%at];
    setp.lt.s32 %early, %seen, %wanted;
    @%early bra again;
    cvt.u64.u32 %many, %count;
    st.global.u64 [%to+8], %last;
    st.global.u64 [%to+16], %many;
    ret;
}
\0"""
"""The last block of `work` to end writes the end, since a device runs its oldest warps first, and the first block may
end long before. `receive` spins until a word is there, as NCCL's kernels do, in a few blocks. `watch` does, and notes
when it was not running. No parameter may have a kernel's name, since it would mean that kernel's address.
"""


class Kernels:
    """The kernels on one device, and the memory for their stamps. Calibrates itself at the start, on an idle device.

    Args:
        driver: the device, in whose context this thread is.
        stamps: how many stamps are kept; later ones overwrite the first.
    """

    def __init__(self, driver: CudaDriver, stamps: int = 1 << 16) -> None:
        self._driver, self._stamps = driver, stamps
        device, count = ctypes.c_int(), ctypes.c_int()
        driver.call("cuCtxGetDevice", ctypes.byref(device))
        name = ctypes.create_string_buffer(_NAME_BYTES)
        driver.call("cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
        self.name = name.value.decode()
        driver.call("cuDeviceGetAttribute", ctypes.byref(count), ctypes.c_int(_MULTIPROCESSORS), device)
        self._blocks = _BLOCKS_EACH * count.value
        module = ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        names = (b"work", b"stamp", b"receive", b"watch")
        self._work, self._stamp, self._receive, self._watch = (self._function(module, each) for each in names)
        self._memory = mmap.mmap(-1, stamps * _STAMP_BYTES)
        self.words = memoryview(self._memory).cast("q")
        self._device_address = driver.register(address_of(self.words), len(self._memory))
        self._watched = mmap.mmap(-1, 4096 * (16 * WATCHED_AT_MOST // 4096 + 2))
        self.watched = memoryview(self._watched).cast("q")
        self._watched_address = driver.register(address_of(self.watched), len(self._watched))
        counters = ctypes.c_uint64()
        driver.call("cuMemAlloc", ctypes.byref(counters), ctypes.c_size_t(4 * _COUNTERS))
        driver.call("cuMemsetD8", counters, ctypes.c_ubyte(0), ctypes.c_size_t(4 * _COUNTERS))
        self._counters = counters
        self.count = 0
        self.rounds_per_ns = 0.05
        self._load_all()
        self._calibrate()

    def close(self) -> None:
        """Give the memory back; nothing may be queued."""
        self._driver.call("cuMemFree", self._counters)
        self._driver.unregister(address_of(self.words))
        self._driver.unregister(address_of(self.watched))

    def work(self, stream: int, busy_ns: int, waves: int = 1) -> int:
        """Queue a kernel that fills the device for about this long, if it has the device to itself.

        Args:
            stream: where.
            busy_ns: its length.
            waves: how many times it fills the device, each time with blocks of a part of the length.

        Returns:
            The number of its stamp: when its first block began, and its last one ended.
        """
        return self._queue_work(stream, busy_ns / waves, self._blocks * waves)

    def small(self, stream: int, busy_ns: int) -> int:
        """Queue a kernel of one block, which a device that is otherwise idle ends sooner; see `work`."""
        return self._queue_work(stream, busy_ns, 1)

    def stamp(self, stream: int) -> int:
        """Queue a kernel that only writes the time. Returns its stamp's number."""
        number, address = self._next()
        self._launch(self._stamp, 1, stream, ctypes.c_uint64(address), threads=1)
        return number

    def receive(self, stream: int, device_address: int, value: int) -> int:
        """Queue a kernel that spins until the signed 32-bit word is `value` or more.

        Returns:
            The number of its stamp: when it saw that.
        """
        number, address = self._next()
        values = (ctypes.c_uint64(device_address), ctypes.c_uint32(value), ctypes.c_uint64(address))
        self._launch(self._receive, _RECEIVE_BLOCKS, stream, *values, threads=32)
        return number

    def watch(self, stream: int, device_address: int, value: int, least_ns: int) -> None:
        """Queue a kernel that spins until the word is `value`, and notes when it did not run for `least_ns` or more."""
        self.watched[2] = -1
        values = (
            *(ctypes.c_uint64(device_address), ctypes.c_uint32(value), ctypes.c_uint64(self._watched_address)),
            *(ctypes.c_uint32(WATCHED_AT_MOST), ctypes.c_uint64(least_ns)),
        )
        self._launch(self._watch, 1, stream, *values, threads=1)

    def gaps(self) -> tuple[int, int, list[tuple[int, int]]]:
        """(start, end, [(last run, runs again), ...]) in ns of the last `watch`, which has ended."""
        words = self.watched
        return words[0], words[1], [(words[3 + 2 * i], words[4 + 2 * i]) for i in range(words[2])]

    def forget(self, number: int) -> None:
        """Clear a stamp, whose kernel is launched again."""
        place = 8 * (number % self._stamps)
        self.words[place] = self.words[place + 1] = 0

    def times(self, number: int) -> tuple[int, int]:
        """(start, end) in ns of a stamp; (0, 0) as long as there is none."""
        place = 8 * (number % self._stamps)
        return self.words[place], self.words[place + 1]

    def _queue_work(self, stream: int, busy_ns: float, blocks: int) -> int:
        number, address = self._next()
        values = (
            ctypes.c_uint64(address),
            ctypes.c_uint64(max(1, round(busy_ns * self.rounds_per_ns))),
            ctypes.c_uint64(self._counters.value + 4 * (number % _COUNTERS)),
        )
        self._launch(self._work, blocks, stream, *values)
        return number

    def _next(self) -> tuple[int, int]:
        number = self.count
        self.count += 1
        self.forget(number)
        return number, self._device_address + _STAMP_BYTES * (number % self._stamps)

    def _load_all(self) -> None:
        """Launch each once: a first launch may wait for the device, and would wait for ever beside one that spins."""
        zero = ctypes.c_uint64(self._device_address)
        self.work(0, 1000)
        self.stamp(0)
        self.receive(0, zero.value, -(2**31))
        self.watch(0, zero.value, -(2**31), 1000)
        self._driver.call("cuCtxSynchronize")

    def _calibrate(self) -> None:
        """Measure the rounds per nanosecond, after a few kernels that bring the clocks up."""
        asked_ns = 2_000_000
        for _ in range(4):
            numbers = [self.work(0, asked_ns) for _ in range(10)]
            self._driver.call("cuCtxSynchronize")
            took_ns = [end - start for start, end in map(self.times, numbers)]
            self.rounds_per_ns *= asked_ns / median(took_ns)

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
