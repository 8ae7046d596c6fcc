"""A driver whose streams are threads: the same calls, orders and refusals as a GPU's, on any machine.

A kernel only sleeps for its time. So the fake shows order (what waits for what, which word is written when) and what
happens when a call fails, comes late or never returns; it shows no speed. Words are real shared memory, so the streams
of several processes see each other's, and end with their process.

By default it never holds its caller, and no other context uses its device. A real driver does hold it, streams hold
each other, and contexts take turns: see `FakeDriver` and `FakeDevice`.
"""

import ctypes
import itertools
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from benchmarks.gpu.fake_device import FakeDevice
from ds_hooks.shared.cuda_driver import DriverError, Words

NAP_S, FULL_LOOK_S = 2e-5, 0.1
_DEVICE_OFFSET = 1 << 44
"""Makes device addresses differ from the host's, so that a mix-up shows."""

_MREMAP_MAYMOVE = 1
_contexts = itertools.count(1)

DEFAULT_STREAM = 0
_CALLS_KEPT = 64


@dataclass(slots=True)
class _Mark:
    """One recording of an event."""

    done_ns: int | None = None


@dataclass(slots=True)
class Kernel:
    """A kernel that ran in a stream: its times and its name."""

    name: str
    stream: int
    start_ns: int
    end_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Registered:
    """Pages of the host that the device can reach: their size, and the device's own mapping of them."""

    size: int
    own: int


@dataclass(slots=True)
class _Queue:
    """A hardware queue, and the thread that serves it."""

    work: "queue.Queue[Callable[[], None] | None]"
    thread: threading.Thread | None = None


@dataclass(slots=True)
class _Stream:
    queue: _Queue
    words: Counter[int] = field(default_factory=Counter)
    """Registered address -> operations queued that still need it."""


class FakeDriver:
    """See `ds_hooks.shared.cuda_driver.Driver`; a context manager that ends its streams.

    Args:
        connections: how many hardware queues all streams share. What waits in one stream then holds the others of its
            queue. 0: each stream has its own.
        depth: how much a hardware queue holds; the next call waits for room. 0: any amount.
        loads_lazily: the first launch of each kernel by name waits until the device has nothing to do.
        device: the one that it shares with other contexts; None: it has one to itself.
        priority: as a client of an MPS server there; 0 is the highest.

    Attributes:
        kernels: all that have begun, in order.
        late_ns: the delay of every written word.
        called: the names of the last calls, in order.
    """

    def __init__(
        self,
        *,
        connections: int = 0,
        depth: int = 0,
        loads_lazily: bool = False,
        device: FakeDevice | None = None,
        priority: int = 0,
    ) -> None:
        self._device = FakeDevice() if device is None else device
        self._context, self._priority = next(_contexts), priority
        self._connections, self._depth, self._loads_lazily = connections, depth, loads_lazily
        self._queues: dict[int, _Queue] = {}
        self._loaded: set[str] = set()
        self.kernels: list[Kernel] = []
        self.late_ns = 0
        self._handles = itertools.count(1)
        self._events: dict[int, _Mark] = {}
        self._registered: dict[int, _Registered] = {}
        self.called: deque[str] = deque(maxlen=_CALLS_KEPT)
        self._calls: Counter[str] = Counter()
        self._failures: defaultdict[str, set[int]] = defaultdict(set)
        self._ended = threading.Event()
        self._recorder: int | None = None  # the thread that records a graph
        self._sparing: set[int] = set()
        self._is_broken = False
        self._streams: dict[int, _Stream] = {}
        self._start(DEFAULT_STREAM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams where they are, as their process's end would."""
        self._ended.set()
        for each in self._queues.values():
            with suppress(queue.Full):  # then its thread does not wait for more
                each.work.put_nowait(None)
        for each in self._queues.values():
            assert each.thread is not None
            each.thread.join()
        for registered in self._registered.values():
            _unmap(registered)
        self._registered = {}

    def fail(self, call: str, at: int) -> None:
        """Let the `at`-th call of that name from now on (counted from 1) raise `DriverError`."""
        self._failures[call].add(self._calls[call] + at)

    def launch(self, stream: int, busy_ns: int, name: str = "kernel") -> None:
        """Queue a kernel of this length."""
        self._called("launch")
        if self._loads_lazily and name not in self._loaded:
            self._loaded.add(name)
            self.synchronize()
        self._put(stream, lambda: self._run(stream, busy_ns, name))

    def spin(self, stream: int, device_address: int, value: int) -> None:
        """Queue a kernel that is busy until the word is `value` or more, as NCCL's receive is."""
        self._called("spin")
        self._queue_word(stream, device_address, partial(self._spin, value=value))

    def queue(self, stream: int, step: Callable[[], None]) -> None:
        """Queue any step."""
        self._put(stream, step)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """This thread records a graph, in the way that is the default.

        Raises:
            DriverError: another thread has broken the recording.
        """
        self._recorder, self._is_broken = threading.get_ident(), False
        yield
        self._recorder = None
        if self._is_broken:
            raise DriverError("recording: another thread has asked for an event meanwhile")

    def synchronize(self) -> None:
        """Wait until the device has nothing more to do, as allocations, frees and pageable copies may."""
        marks = [_Mark() for _ in self._streams]
        for mark, stream in zip(marks, self._streams, strict=True):
            self._put(stream, partial(_stamp, mark))
        self._until(lambda: all(mark.done_ns is not None for mark in marks))

    def is_idle(self, stream: int) -> bool:
        """Whether everything queued in `stream` has ended."""
        mark = _Mark()
        self._put(stream, lambda: _stamp(mark))
        time.sleep(NAP_S)
        return mark.done_ns is not None

    @property
    def streams(self) -> set[int]:
        """Those that have not been destroyed."""
        return set(self._streams)

    def calls(self, name: str) -> int:
        """How often a call was made."""
        return self._calls[name]

    # Calls of `Driver`

    def adopt_thread(self) -> None:
        """See `Driver`."""
        self._called("adopt_thread")

    def spare_recordings(self) -> None:
        """See `Driver`."""
        self._called("spare_recordings")
        self._sparing.add(threading.get_ident())

    def create_stream(self) -> int:
        """See `Driver`."""
        self._called("create_stream")
        return self._start(next(self._handles))

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self._called("destroy_stream")
        ended = self._streams.pop(stream).queue
        if not self._connections:
            ended.work.put(None)

    def create_event(self) -> int:
        """See `Driver`. One that was never recorded is done."""
        self._called("create_event")
        event = next(self._handles)
        self._events[event] = _Mark(time.monotonic_ns())
        return event

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self._called("destroy_event")
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        """See `Driver`."""
        self._called("record")
        mark = self._events[event] = _Mark()
        self._put(stream, lambda: self._in_turn(partial(_stamp, mark)))

    def wait_event(self, stream: int, event: int) -> None:
        """See `Driver`."""
        self._called("wait_event")
        mark = self._events[event]
        self._put(stream, lambda: self._until(lambda: mark.done_ns is not None))

    def is_done(self, event: int) -> bool:
        """See `Driver`."""
        self._called("is_done")
        if self._recorder is not None and threading.get_ident() not in self._sparing:
            self._is_broken = True
            raise DriverError("is_done: a graph is being recorded")
        return self._events[event].done_ns is not None

    def elapsed_ns(self, start: int, end: int) -> int:
        """See `Driver`."""
        self._called("elapsed_ns")
        start_ns, end_ns = self._events[start].done_ns, self._events[end].done_ns
        if start_ns is None or end_ns is None:
            raise DriverError("elapsed_ns: an event is not done")
        return end_ns - start_ns

    def register(self, address: int, size: int) -> int:
        """See `Driver`."""
        self._called("register")
        if address % 4096 or size % 4096:
            raise DriverError("register: not whole pages")
        if address in self._registered:
            raise DriverError("register: registered already")
        self._registered[address] = _Registered(size, _map_again(address, size))
        return address + _DEVICE_OFFSET

    def unregister(self, address: int) -> None:
        """See `Driver`."""
        self._called("unregister")
        if any(stream.words[address] for stream in self._streams.values()):
            raise DriverError("unregister: something that is queued needs it")
        if address not in self._registered:
            raise DriverError("unregister: not registered")
        _unmap(self._registered.pop(address))

    def write_word(self, stream: int, device_address: int, value: int) -> None:
        """See `Driver`."""
        self._called("write_word")
        self._queue_word(stream, device_address, partial(self._write, value=value))

    def wait_at_least(self, stream: int, device_address: int, value: int) -> None:
        """See `Driver`."""
        self._called("wait_at_least")
        self._queue_word(stream, device_address, partial(self._wait, value=value))

    def write_words(self, stream: int, values: Words) -> None:
        """See `Driver`."""
        self._called("write_words")
        for device_address, value in values:
            self._queue_word(stream, device_address, partial(self._write, value=value))

    def wait_for_words(self, stream: int, values: Words) -> None:
        """See `Driver`."""
        self._called("wait_for_words")
        for device_address, value in values:
            self._queue_word(stream, device_address, partial(self._wait, value=value))

    # Internals

    def _called(self, name: str) -> None:
        self._calls[name] += 1
        self.called.append(name)
        if self._calls[name] in self._failures[name]:
            raise DriverError(f"{name}: refused on purpose")

    def _start(self, handle: int) -> int:
        number = handle % self._connections if self._connections else handle
        if number not in self._queues:
            found = self._queues[number] = _Queue(queue.Queue(self._depth))
            found.thread = threading.Thread(target=self._serve, args=(found,), name=f"queue {number}", daemon=True)
            found.thread.start()
        self._streams[handle] = _Stream(self._queues[number])
        return handle

    def _serve(self, served: _Queue) -> None:
        while not self._ended.is_set() and (step := served.work.get()) is not None:
            step()

    def _put(self, stream: int, step: Callable[[], None]) -> None:
        if stream not in self._streams:
            raise DriverError(f"there is no stream {stream}")
        while not self._ended.is_set():
            with suppress(queue.Full):
                return self._streams[stream].queue.work.put(step, timeout=FULL_LOOK_S)

    def _queue_word(self, stream: int, device_address: int, use: Callable[[ctypes.c_uint32], None]) -> None:
        address = device_address - _DEVICE_OFFSET
        home = next((start for start, of in self._registered.items() if start <= address < start + of.size), None)
        if home is None or address % 4:
            raise DriverError("a word that the device cannot reach")
        own_address = self._registered[home].own + address - home
        words = self._streams[stream].words
        words[home] += 1

        def step() -> None:
            use(ctypes.c_uint32.from_address(own_address))
            words[home] -= 1

        self._put(stream, step)

    def _wait(self, word: ctypes.c_uint32, value: int) -> None:
        self._until(lambda: word.value >= value)

    def _write(self, word: ctypes.c_uint32, value: int) -> None:
        if self.late_ns:
            time.sleep(self.late_ns / 1e9)
        self._in_turn(partial(setattr, word, "value", value))

    def _in_turn(self, act: Callable[[], None]) -> None:
        with self._device.work(self._context, self._priority, computes=False) as runs:
            self._until(runs)
            act()

    def _spin(self, word: ctypes.c_uint32, value: int) -> None:
        with self._device.work(self._context, self._priority, computes=False) as runs:
            self._until(lambda: runs() and word.value >= value)

    def _run(self, stream: int, busy_ns: int, name: str) -> None:
        with self._device.work(self._context, self._priority, computes=True) as runs:
            self._until(runs)
            kernel = Kernel(name, stream, time.monotonic_ns())
            self.kernels.append(kernel)
            seen_ns, end_ns = kernel.start_ns, kernel.start_ns + busy_ns
            while (now_ns := time.monotonic_ns()) < end_ns and not self._ended.is_set():
                if not runs():
                    end_ns += now_ns - seen_ns  # others have the device
                seen_ns = now_ns
                time.sleep(NAP_S)
            kernel.end_ns = time.monotonic_ns()

    def _until(self, done: Callable[[], bool]) -> None:
        while not done() and not self._ended.is_set():
            time.sleep(NAP_S)


def _stamp(mark: _Mark) -> None:
    mark.done_ns = time.monotonic_ns()


def _map_again(address: int, size: int) -> int:
    """Map the same shared pages once more: as the device's, they outlive the host's mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    # mremap(2): an old size of 0 makes a second mapping of shared pages
    found = libc.mremap(
        ctypes.c_void_p(address), ctypes.c_size_t(0), ctypes.c_size_t(size), ctypes.c_int(_MREMAP_MAYMOVE)
    )
    if found is None or ctypes.c_ssize_t(found).value == -1:
        raise DriverError(f"register: not shared pages (errno {ctypes.get_errno()})")
    return int(found)


def _unmap(registered: _Registered) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(registered.own), ctypes.c_size_t(registered.size))
