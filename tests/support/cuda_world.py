"""A device with streams that is made up, on which time passes only while the side task sleeps, and a page."""

import ctypes
import itertools
from collections import deque
from collections.abc import Callable

from ds_hooks.shared.cuda_driver import DriverError, Words
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import PAGE_BYTES, ClockKind, DeviceGate, Field
from ds_hooks.shared.page.plan import plan_steps
from trials.gate.cuda import CudaGate
from trials.gate.unit_records import UnitRecords

US, MS = 1_000, 1_000_000
STREAM = 7
OFFSET = 1 << 44


class World:
    """A page, a device with one stream, and a main job; time passes only where the test or the gate lets it."""

    def __init__(self, page: Page) -> None:
        self.page, self.words = page, page.words
        self.words[Field.CLOCK_KIND] = ClockKind.CUDA
        self.now_ns = 10 * MS
        self.naps: list[float] = []
        self.signals: deque[int] = deque()
        self.kernels: list[tuple[str, int, int]] = []
        self.overruns: list[tuple[int, int]] = []
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.registered = 0
        self.adopted = 0
        self.fails: dict[str, int] = {}
        self._handles = itertools.count(1)
        self._done_ns: dict[int, int | None] = {}
        self._work: deque[tuple[str, int, int]] = deque()
        self._busy_until_ns = 0
        self.gates: list[CudaGate] = []

    def gate(self, records: UnitRecords | None = None, device_uuid: int = 0) -> CudaGate:
        made = CudaGate(
            self.page,
            self,
            STREAM,
            records,
            device_uuid=device_uuid,
            on_overrun=lambda slot, ns: self.overruns.append((slot, ns)),
            clock_ns=lambda: self.now_ns,
            nap=self._nap,
            start_host_watch=lambda look: None,  # a test calls `look_for_host` where it wants to
        )
        self.gates.append(made)
        return made

    def leave(self) -> None:
        """Nobody asks the gates any more."""
        for gate in self.gates:
            gate._hold_each(False)
            gate._parent.close()
        self.page.close()

    # The main job

    def due(self, epoch: int, permit_ns: int) -> None:
        """The plan opens bubble 3 of step `epoch`, and no other."""
        self.words[Field.PERMITS + 3] = permit_ns // 1000  # and no word about renewals
        plan_steps(self.words, epoch, epoch + 1)

    def open(self, epoch: int, permit_ns: int, slot: int = 3) -> None:
        self.words[Field.STEP], self.words[Field.SLOT] = epoch, slot
        self.words[Field.PERMIT_LENGTH_NS] = permit_ns
        self.words[Field.BUBBLE] = epoch << 1 | 1
        self.words[Field.PERMIT_LEFT] = DeviceGate.ANY
        self.words[Field.DEVICE_GATE] = DeviceGate.open_for(permit_ns)

    def close(self, epoch: int) -> None:
        self.words[Field.DEVICE_GATE] = DeviceGate.CLOSED
        self.words[Field.BUBBLE] = epoch << 1

    def at(self, ns: int, *acts: Callable[[], None]) -> None:
        """Let something happen so long from now."""
        self.later += [(self.now_ns + ns, act) for act in acts]
        self.later.sort(key=lambda entry: entry[0])

    def bubble(self, epoch: int, from_ns: int, length_ns: int, permit_ns: int = 0) -> None:
        """A planned bubble that begins so long from now; it is due at once."""
        permit_ns = permit_ns or length_ns
        self.due(epoch, permit_ns)
        self.at(from_ns, lambda: self.open(epoch, permit_ns))
        self.at(from_ns + length_ns, lambda: self.close(epoch))

    # The side task

    def run(self, gate: CudaGate, unit: int, busy_ns: int, name: str = "") -> None:
        """Ask, and queue a kernel."""
        gate.enter(unit)
        self._work.append((name or str(unit), busy_ns, 0))

    def pass_time(self, ns: int) -> None:
        end_ns = self.now_ns + ns
        while True:
            self._serve()
            times = [at for at, _ in self.later[:1]] + ([self._busy_until_ns] if self._busy_until_ns else [])
            if not times or min(times) > end_ns:
                break
            self.now_ns = max(self.now_ns, min(times))
            while self.later and self.later[0][0] <= self.now_ns:
                self.later.pop(0)[1]()
        self.now_ns = end_ns

    def _nap(self, seconds: float) -> int | None:
        self.naps.append(seconds)
        assert len(self.naps) < 100_000, "it waits for ever"
        end_ns = self.now_ns + max(round(seconds * 1e9), US)
        while not self.signals and self.now_ns < end_ns:
            self.pass_time(min([end_ns, *(at for at, _ in self.later[:1])]) - self.now_ns)
        return self.signals.popleft() if self.signals else None

    def _serve(self) -> None:
        while self._work:
            kind, value, least = self._work[0]
            if kind == "record":
                self._done_ns[value] = self.now_ns
            elif kind == "wait":
                if ctypes.c_int32.from_address(value).value < least:
                    return
            elif not self._busy_until_ns:
                self.kernels.append((kind, self.now_ns, self.now_ns + value))
                self._busy_until_ns = self.now_ns + value
                return
            elif self._busy_until_ns > self.now_ns:
                return
            else:
                self._busy_until_ns = 0
            self._work.popleft()

    # The driver

    def _called(self, name: str) -> None:
        if name in self.fails:
            self.fails[name] -= 1
            if self.fails[name] < 0:
                raise DriverError(f"{name}: no more")

    def adopt_thread(self) -> None:
        self.adopted += 1

    def create_event(self) -> int:
        self._called("create_event")
        return next(self._handles)

    def record(self, event: int, stream: int) -> None:
        self._called("record")
        assert stream == STREAM
        self._done_ns[event] = None
        self._work.append(("record", event, 0))
        self._serve()

    def is_done(self, event: int) -> bool:
        self._called("is_done")
        self._serve()
        return self._done_ns[event] is not None

    def elapsed_ns(self, start: int, end: int) -> int:
        self._called("elapsed_ns")
        start_ns, end_ns = self._done_ns[start], self._done_ns[end]
        assert start_ns is not None and end_ns is not None
        return end_ns - start_ns

    def register(self, address: int, size: int) -> int:
        self._called("register")
        assert size == PAGE_BYTES
        self.registered += 1
        return address + OFFSET

    def unregister(self, address: int) -> None:
        self._called("unregister")
        assert not self._work, "the device still needs the page"
        self.registered -= 1

    def wait_for_words(self, stream: int, values: Words) -> None:
        self._called("wait_for_words")
        assert stream == STREAM
        self._work.extend(("wait", device_address - OFFSET, value) for device_address, value in values)

    def spare_recordings(self) -> None: ...
    def create_stream(self) -> int: ...  # type: ignore[empty-body]
    def destroy_stream(self, stream: int) -> None: ...
    def destroy_event(self, event: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def write_word(self, stream: int, device_address: int, value: int) -> None: ...
    def write_words(self, stream: int, values: Words) -> None: ...
    def wait_at_least(self, stream: int, device_address: int, value: int) -> None: ...


def learn(world: World, gate: CudaGate, *costs_ns: int, trials: int = 1) -> None:
    """Let unit k of a group of `trials` be known to take costs_ns[k]."""
    gate.use([f"unit {k}" for k in range(len(costs_ns))], trials)
    for unit, cost_ns in enumerate(costs_ns):
        gate._costs_ns[unit] = float(cost_ns)
