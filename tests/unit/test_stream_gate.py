"""The gate of a device with streams: what it queues when, and what it says. Device, clock and sleep are made up."""

import ctypes
import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import trials.stream_gate as gate_module
from ds_hooks.driver import DriverError
from ds_hooks.page import PAGE_BYTES, DeviceGate, Doing, Field, Page, page_path
from ds_hooks.stream_marks import write_uuid
from squeezer.record import UNIT
from trials.ledger import HOST_UNIT, HOST_WORK_NEEDS_NS, NEARLY_LONGEST, UNKNOWN_COST_NEEDS_NS, Starved, StopRequested
from trials.stream_gate import GateError, StreamGate

US, MS = 1_000, 1_000_000
STREAM = 7
OFFSET = 1 << 44
GATE_CALLS = ("register", "create_event", "record", "wait_at_least", "is_done", "elapsed_ns", "unregister")


class World:
    """A page, a device with one stream, and a main job; time passes only where the test or the gate lets it."""

    def __init__(self, page: Page) -> None:
        self.page, self.words = page, page.words
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
        self.gates: list[StreamGate] = []

    def gate(self, *files: Path, device_uuid: int = 0) -> StreamGate:
        made = StreamGate(
            self.page,
            self,
            STREAM,
            *files,
            device_uuid=device_uuid,
            on_overrun=lambda slot, ns: self.overruns.append((slot, ns)),
            clock_ns=lambda: self.now_ns,
            nap=self._nap,
        )
        self.gates.append(made)
        return made

    # The main job

    def due(self, epoch: int, permit_ns: int) -> None:
        self.words[Field.DUE_PERMIT_NS] = permit_ns
        self.words[Field.DUE_EPOCH] = epoch

    def open(self, epoch: int, permit_ns: int, slot: int = 3) -> None:
        self.words[Field.SLOT] = slot
        self.words[Field.PERMIT_LENGTH_NS] = permit_ns
        self.words[Field.BUBBLE] = epoch << 1 | 1
        self.words[Field.DEVICE_GATE] = max(self.words[Field.DEVICE_GATE], DeviceGate.open_for(permit_ns))

    def close(self, epoch: int) -> None:
        if self.words[Field.DEVICE_GATE] != DeviceGate.FORCED:
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

    def run(self, gate: StreamGate, unit: int, busy_ns: int, name: str = "") -> None:
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

    def wait_at_least(self, stream: int, device_address: int, value: int) -> None:
        self._called("wait_at_least")
        assert stream == STREAM
        self._work.append(("wait", device_address - OFFSET, value))

    def create_stream(self) -> int: ...  # type: ignore[empty-body]
    def destroy_stream(self, stream: int) -> None: ...
    def destroy_event(self, event: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def write_word(self, stream: int, device_address: int, value: int) -> None: ...


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    page = Page.open(page_path(tmp_path / "pages", 0))
    made = World(page)
    yield made
    for gate in made.gates:
        gate._hold_each(False)
    page.close()


def learn(world: World, gate: StreamGate, *costs_ns: int) -> None:
    """Let unit k be known to take costs_ns[k]."""
    gate.use([f"unit {k}" for k in range(len(costs_ns))])
    for unit, cost_ns in enumerate(costs_ns):
        gate._costs_ns[unit] = float(cost_ns)


def test_a_unit_that_is_queued_ahead_starts_when_the_device_says_so(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    begin_ns = world.now_ns + 5 * MS
    world.bubble(1, 5 * MS, 8 * MS)
    world.run(gate, 0, 1 * MS)
    assert world.now_ns < begin_ns, "the host does not wait for the bubble"
    world.pass_time(9 * MS)
    assert world.kernels == [("0", begin_ns, begin_ns + 1 * MS)]


def test_at_most_two_units_are_queued_and_the_third_waits_for_the_first_to_end(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS)
    begin_ns = world.now_ns + 5 * MS
    world.bubble(1, 5 * MS, 30 * MS)
    for _ in range(3):
        world.run(gate, 0, 2 * MS)
    assert begin_ns + 2 * MS <= world.now_ns < begin_ns + 2.2 * MS
    world.pass_time(20 * MS)
    assert [start for _, start, _ in world.kernels] == [begin_ns, begin_ns + 2 * MS, begin_ns + 4 * MS]
    assert world.words[Field.UNITS_RUN] == 1, "what has ended is noted when the gate is asked"


@pytest.mark.parametrize("queued", [0, 1])
def test_a_unit_that_does_not_fit_is_not_queued_and_starts_in_the_next_bubble(world: World, queued: int) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS, 3 * MS)
    world.bubble(1, 1 * MS, 6 * MS)
    world.run(gate, 0, 4 * MS)
    if not queued:
        world.pass_time(5 * MS + 100 * US)
    second_ns = world.now_ns + 20 * MS
    world.at(10 * MS, lambda: world.bubble(2, second_ns - world.now_ns, 6 * MS))
    world.run(gate, 1, 3 * MS)
    world.pass_time(second_ns - world.now_ns + 5 * MS)
    assert [(name, start) for name, start, _ in world.kernels][1:] == [("1", second_ns)]
    assert world.words[Field.UNITS_DECLINED] == 1


def test_what_is_queued_counts_before_what_asks(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS, 3 * MS)
    world.due(1, 7 * MS - 1)
    world.run(gate, 0, 4 * MS)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(1)
    world.due(1, 7 * MS)
    world.run(gate, 1, 3 * MS)


def test_a_close_between_two_queued_units_holds_the_second_back_for_the_next_bubble(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS, 1 * MS)
    world.bubble(1, 1 * MS, 3 * MS)
    world.run(gate, 0, 4 * MS)  # it takes longer than it was forecast to
    world.run(gate, 1, 1 * MS)
    second_ns = world.now_ns + 20 * MS
    world.at(10 * MS, lambda: world.bubble(2, second_ns - world.now_ns, 6 * MS))
    world.pass_time(25 * MS)
    assert [(name, start) for name, start, _ in world.kernels][1:] == [("1", second_ns)]


def test_a_bubble_is_taken_to_have_begun_when_it_was_last_seen_shut(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 3 * MS)
    world.bubble(1, 2 * MS, 10 * MS, 6 * MS)
    gate.rest()  # a look
    world.pass_time(5 * MS)  # 3 ms of 6 would be left, but for all we know the bubble may be 5 ms old
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(0)
    learn(world, gate, 1 * MS)
    world.run(gate, 0, 1 * MS)
    assert world.words[Field.BUBBLE] & 1


def test_nothing_starts_in_a_bubble_that_nobody_saw_begin(world: World) -> None:
    world.open(4, 50 * MS)
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(0)
    assert world.kernels == []


def test_a_unit_that_never_ran_needs_room(world: World) -> None:
    gate = world.gate()
    gate.use(["a"])
    world.due(1, UNKNOWN_COST_NEEDS_NS - 1)
    world.signals.append(signal.SIGTERM)
    with pytest.raises(StopRequested):
        gate.enter(0)
    world.due(1, UNKNOWN_COST_NEEDS_NS)
    gate.enter(0)


@pytest.mark.parametrize("how", ["signal", "orphan"])
def test_the_end_signal_and_a_dead_daemon_end_it(world: World, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    gate = world.gate()
    if how == "signal":
        world.signals.append(signal.SIGTERM)
    else:
        monkeypatch.setattr(gate_module.os, "getppid", lambda: 1)
    with pytest.raises(StopRequested):
        gate.enter(HOST_UNIT)


def test_it_sleeps_long_where_nothing_is_due_and_briefly_where_something_is(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.pass_time(1000 * MS)
    world.at(1600 * MS, lambda: world.signals.append(signal.SIGUSR1))
    world.at(1610 * MS, lambda: world.bubble(1, 5 * MS, 5 * MS))
    gate.enter(0)
    assert world.naps[:4] == [0.5] * 4, "until the signal came"
    assert max(world.naps[5:]) <= 0.5
    world.naps.clear()
    learn(world, gate, 6 * MS)
    world.at(7 * MS, lambda: world.bubble(2, 20 * MS, 9 * MS))
    gate.enter(0)
    assert 0 < max(world.naps) < 0.001


def test_it_says_that_it_sleeps_while_nothing_runs_and_not_before(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS, 9 * MS)
    world.bubble(1, 1 * MS, 4 * MS)
    world.run(gate, 0, 2 * MS)
    assert world.words[Field.SIDE_DOING] == Doing.UNIT
    said: list[tuple[int, int]] = []
    for ms in range(1, 8):
        world.at(ms * MS + 500 * US, lambda: said.append((world.now_ns, world.words[Field.SIDE_DOING])))
    world.at(8 * MS, lambda: world.signals.append(signal.SIGTERM))
    with pytest.raises(StopRequested):
        gate.enter(1)
    assert [doing for _, doing in said] == [Doing.UNIT] * 2 + [Doing.ASLEEP] * 5


def test_what_waits_on_the_device_is_asleep(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 2 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 2 * MS)
    gate.rest()
    assert world.words[Field.SIDE_DOING] == Doing.ASLEEP
    world.open(1, 9 * MS)
    gate.rest()
    assert world.words[Field.SIDE_DOING] == Doing.UNIT


def test_costs_are_the_devices_rise_fast_fall_slowly_and_belong_to_the_units_that_were_asked_for(world: World) -> None:
    gate = world.gate()
    gate.trials = 8
    gate.use(["a", "b"])
    gate._has_run |= {(0, 0), (0, 1), (1, 0)}
    world.due(1, 10**9)
    gate.rest()
    world.open(1, 10**9)
    for busy_ns in (1000 * US, 3000 * US, 1000 * US):
        world.run(gate, 0, busy_ns)
        gate.rest()
        world.pass_time(5 * MS)
    world.run(gate, 1, 700 * US)
    assert gate._costs_ns[0] == pytest.approx(1950 * US, rel=0.01)  # 1000 -> 2000 -> 1950
    gate.trials = 4
    gate.use(["c"])  # while b still runs
    world.run(gate, 0, 300 * US)
    gate.rest()
    world.pass_time(5 * MS)
    gate.rest()
    assert gate._costs_ns[0] == pytest.approx(300 * US, rel=0.01)
    gate.trials = 8
    gate.use(["b", "a"])
    assert gate._costs_ns[:2] == [pytest.approx(700 * US, rel=0.01), pytest.approx(1950 * US, rel=0.01)]
    assert world.words[Field.BUSY_NS] == 6 * MS


def test_the_first_time_says_nothing_of_what_a_unit_takes(world: World) -> None:
    gate = world.gate()
    gate.use(["a"])
    world.due(1, 10**9)
    world.open(1, 10**9)
    known_ns = []
    for busy_ns in (300 * MS, 1 * MS):
        world.run(gate, 0, busy_ns)
        gate.settle()
        known_ns.append(gate._costs_ns[0])
    assert known_ns == [0.0, pytest.approx(1 * MS, rel=0.01)]


def test_settling_waits_for_what_runs_and_sees_meanwhile_that_the_bubble_ends(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 5 * MS)
    world.bubble(1, 1 * MS, 6 * MS)
    world.run(gate, 0, 9 * MS)
    gate.settle()
    assert not gate._queued and world.overruns and world.overruns[0][1] == pytest.approx(3 * MS, rel=0.1)


def test_each_operation_of_host_work_waits_for_a_bubble(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.due(1, 9 * MS)
    gate.enter(HOST_UNIT)
    before = len(world._work)
    torch.ones(2).add_(1)
    held = [work for work in list(world._work)[before:] if work[0] == "wait"]
    assert len(held) == 2 and {least for _, _, least in held} == {1}
    gate.enter(0)
    after = len(world._work)
    torch.ones(2).add_(1)
    assert len(world._work) == after, "a unit's own operations do not"
    gate.rest()


def test_a_unit_longer_than_all_bubbles_is_tried_in_one_of_the_longest_and_named(world: World) -> None:
    gate = world.gate()
    gate.trials = 16
    learn(world, gate, 12 * MS)
    lengths_ms = [3, 8, 3, 5] * 8 + [7, 8, 8]

    def next_bubble(epoch: int) -> None:
        length_ns = lengths_ms[epoch] * MS
        world.bubble(epoch + 1, 1 * MS, length_ns)
        if epoch + 1 < len(lengths_ms):
            world.at(length_ns + 3 * MS, lambda: next_bubble(epoch + 1))

    next_bubble(0)
    world.run(gate, 0, 11 * MS)
    assert world.words[Field.UNITS_DECLINED] in (32, 33)
    gate.rest()
    assert gate.take_starved() == [], "not before it has run"
    for _ in range(200):
        world.pass_time(100 * US)
        gate.rest()
    (found,) = gate.take_starved()
    assert found == Starved(unit="unit 0", trials=16, needs_ns=11 * MS, longest_ns=found.longest_ns)
    assert 8 * MS * NEARLY_LONGEST < found.longest_ns <= 8 * MS
    assert [slot for slot, _ in world.overruns] == [3]


def test_host_work_that_was_tried_in_a_long_bubble_needs_as_little_as_ever_then(world: World) -> None:
    gate = world.gate()
    gate._doubt(HOST_UNIT, deque([8 * MS] * 32))
    world.due(1, 8 * MS)
    gate.enter(HOST_UNIT)
    world.open(1, 8 * MS)
    gate.rest()
    assert gate._costs_ns[HOST_UNIT] == HOST_WORK_NEEDS_NS


def test_what_runs_on_after_its_bubble_is_told_with_its_slot(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS, 1 * MS)
    world.bubble(1, 1 * MS, 3 * MS)
    world.run(gate, 0, 1 * MS)
    world.run(gate, 1, 5 * MS)  # until 3 ms after the end
    world.at(10 * MS, lambda: world.bubble(2, 1 * MS, 3 * MS))
    world.run(gate, 0, 1 * MS)
    world.run(gate, 0, 1 * MS)
    ((slot, overrun_ns),) = world.overruns
    assert slot == 3
    assert overrun_ns == pytest.approx(3 * MS, rel=0.05)


def test_a_forced_gate_lets_through_what_is_queued_and_nothing_more(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 1 * MS, "queued")
    world.words[Field.DEVICE_GATE] = DeviceGate.FORCED
    world.at(5 * MS, lambda: world.signals.append(signal.SIGTERM))
    with pytest.raises(StopRequested):
        world.run(gate, 0, 1 * MS, "too late")
    assert [name for name, _, _ in world.kernels] == ["queued"]
    assert gate.close()
    assert world.registered == 0


def test_what_missed_its_bubble_starts_in_none_that_is_much_too_short(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 4 * MS, "first")
    world.run(gate, 0, 4 * MS, "second")
    world.bubble(1, 1 * MS, 2 * MS, 9 * MS)  # the first one runs on
    world.bubble(2, 20 * MS, 1 * MS, 1 * MS)
    world.bubble(3, 40 * MS, 9 * MS, 9 * MS)
    world.bubble(4, 60 * MS, 9 * MS, 9 * MS)
    begin_ns = world.now_ns
    world.run(gate, 0, 1 * MS, "third")
    world.pass_time(80 * MS)
    starts_ms = {name: (start - begin_ns) / MS for name, start, _ in world.kernels}
    assert starts_ms["second"] >= 40, "not in the one that begins at 20"


def test_a_unit_that_no_bubble_lets_start_any_more_shuts_the_gate_for_good(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 4 * MS)
    world.due(1, 9 * MS)
    for name in ("too long now", "behind it"):
        world.run(gate, 0, 4 * MS, name)
    for epoch in range(1, 50):
        world.bubble(epoch, epoch * 10 * MS, 2 * MS, 1 * MS)
    with pytest.raises(GateError, match="too long for all that have come since"):
        world.run(gate, 0, 4 * MS, "never")
    assert not world.kernels


def test_it_lets_go_of_the_page_when_the_device_has(world: World) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.bubble(1, 50 * MS, 9 * MS)
    world.run(gate, 0, 1 * MS)
    assert gate.close()
    assert (world.registered, len(world.kernels), world.words[Field.UNITS_RUN]) == (0, 1, 1)


def test_an_orphan_leaves_the_page_to_the_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = world.gate()
    learn(world, gate, 1 * MS)
    world.due(1, 9 * MS)
    world.run(gate, 0, 1 * MS)
    monkeypatch.setattr(gate_module.os, "getppid", lambda: 1)
    assert not gate.close()
    assert world.registered == 1


@pytest.mark.parametrize("call", GATE_CALLS)
@pytest.mark.parametrize("after", range(5))
def test_a_refused_call_shuts_the_gate_for_good(world: World, call: str, after: int) -> None:
    world.fails[call] = after
    entered = 0
    gate = None
    world.due(1, 10**9)
    world.at(1 * MS, lambda: world.open(1, 10**9))
    try:
        gate = world.gate()
        for _ in range(12):
            gate.enter(HOST_UNIT)
            entered += 1
    except GateError as error:
        assert call in str(error)
        fell = len(world.kernels)
        world.fails.clear()
        if gate is not None:
            for ask in (gate.rest, lambda: gate.enter(HOST_UNIT)):
                with pytest.raises(GateError, match=call):
                    ask()
            assert not gate.close(), "nobody knows what the device still needs"
        world.pass_time(50 * MS)
        assert len(world.kernels) == fell
        return
    assert call in ("register", "create_event", "unregister") and entered == 12
    assert gate is not None
    assert gate.close() == (call != "unregister" or after > 0)


def test_a_device_that_does_not_wait_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "wait_at_least", lambda *_: None)
    with pytest.raises(GateError, match="does not wait"):
        world.gate()


def test_a_device_that_never_sees_the_page_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ctypes.create_string_buffer(PAGE_BYTES)
    monkeypatch.setattr(world, "register", lambda *_: ctypes.addressof(elsewhere) + OFFSET)
    with pytest.raises(GateError, match="does not wait"):
        world.gate()


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [(0, 5, True), (5, 0, True), (2**127 + 2**63 + 1, 2**127 + 2**63 + 1, True), (2**127 + 5, 5, False), (4, 5, False)],
)
def test_a_side_task_on_another_device_than_the_main_job_never_runs(
    world: World, theirs: int, ours: int, same: bool
) -> None:
    write_uuid(world.words, theirs)
    gate = world.gate(device_uuid=ours)
    world.due(1, 10**9)
    if same:
        gate.enter(HOST_UNIT)
    else:
        with pytest.raises(GateError, match="the main job's device is"):
            gate.enter(HOST_UNIT)


def test_another_thread_is_made_known_to_the_device_once(world: World) -> None:
    gate = world.gate()
    world.due(1, 10**9)
    gate.enter(HOST_UNIT)
    assert world.adopted == 0

    def backward() -> None:
        gate.rest()
        gate.rest()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert world.adopted == 1


def test_units_are_recorded_as_the_report_reads_them(world: World, tmp_path: Path) -> None:
    units = tmp_path / "units.bin"
    gate = world.gate(units, tmp_path / "units.json")
    gate.use(["a"])
    begin_ns = world.now_ns + 2 * MS
    world.bubble(1, 2 * MS, 50 * MS)
    world.run(gate, 0, 3 * MS)
    world.run(gate, 0, 1 * MS)
    gate.enter(HOST_UNIT)
    assert gate.close()
    first, second, host = UNIT.iter_unpack(units.read_bytes())
    assert first[1:] == (3 * MS, 3 * MS, 0, 0) and second[1:] == (1 * MS, 1 * MS, 0, 0)
    assert host[2:] == (0, HOST_UNIT, 0), "host work is not the device's"
    assert begin_ns <= first[0] < begin_ns + 60 * US
    assert second[0] == first[0] + 3 * MS
