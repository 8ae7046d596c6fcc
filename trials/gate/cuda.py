"""The gate of a side task whose device has streams: each unit waits on the device itself for the bubble.

The host runs ahead of the device, so it asks early: a unit is queued behind a wait for the page's `DEVICE_GATE`, which
the main job's device opens and closes. The host only decides whether the unit is forecast to fit.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING

from ds_hooks.shared.device_uuid import read_device_uuid
from ds_hooks.shared.driver import Driver, DriverError, address_of
from ds_hooks.shared.page import PAGE_BYTES, DeviceGate, Field, SideActivity
from ds_hooks.shared.page_file import Page
from ds_hooks.shared.signals import END_SIGNAL
from trials.gate.base import HOST_UNIT, GateError, StopRequested
from trials.gate.bubble_watch import BubbleWatch
from trials.gate.parent_watch import ParentWatch
from trials.gate.process import nap
from trials.gate.unit_costs import DECLINED_BEFORE_DOUBT, LOOK_AGAIN_S, UNKNOWN_COST_NEEDS_NS, UnitCosts
from trials.gate.unit_records import UnitRecords

if TYPE_CHECKING:
    from trials.gate.per_op import PerOp

IN_FLIGHT = 2
"""Units that are queued at most: the one that runs and the next. What is queued cannot be called back."""

PROBE_S = 1.0
"""How long the start-up probe waits for the device at most; it takes microseconds."""

_LOOKS_AT_ONCE = 16
_RUNNING_NAP_S = 5e-5
_DUE_NAP_S = 1e-4
"""Also how late the begin of a bubble is known at most, and so what a permit loses."""
_EVENT_PAIRS = IN_FLIGHT + 1
"""One more than is queued, since times are told from the last event that was read."""
_OFFSETS_KEPT = 64
_AWAKE_NS = 20_000_000
"""For so long after the last sign of the main job its device may be about to tell of another bubble."""
_PATIENCE = 1000
"""Who has waited this many times as long as a nap sleeps longer, and so loses a thousandth."""


@dataclass(slots=True)
class _Queued:
    """A unit that the device has been given.

    Attributes:
        unit: its number.
        group: the index of the units in use when it was asked for.
        longest_ns: of the bubbles in which it was declined, if they were too many; else 0.
        start: the event behind the wait: the unit runs.
        end: the event behind its work.
        whole: whether all of its work is queued, and `end` behind it.
        missed: how many bubbles have begun while it waited at the head of the queue.
    """

    unit: int
    group: int
    longest_ns: int
    start: int
    end: int
    whole: bool = False
    missed: int = 0


class CudaGate(UnitCosts):
    """Queues units on one stream, at most two, each behind a wait for the bubble. Never synchronizes.

    A unit is queued if it is forecast to end within what is left of the permit, after what is queued already; in a
    bubble that is still to come, within that one's permit. Then it starts by the device's own word, without the host.
    Costs and records are times of the device, which events tell when a unit has ended; of host work they say nothing,
    so that it counts as idle. A bubble cannot have begun before the host last saw it closed: that is taken as its
    begin.

    All that the side task runs must be queued on `stream`, by one thread at a time. The signals must be blocked before
    any thread starts (`block_signals`). Whoever ends a side task must force the gate open first, since the stream may
    wait; until it does, what is queued stays queued, and nothing more is. If the parent ends, the gate forces itself.

    Args:
        page: the device's page; the caller has claimed the side task's role.
        driver: the device.
        stream: where the side task's work is queued.
        records: see `UnitCosts`.
        device_uuid: the 128 bits of the device's name, to find out that the main job's is another; 0: unknown.
        on_overrun: told (slot, ns) of a unit that ran on after its bubble.
        clock_ns: the host's clock.
        nap: sleeps for some seconds, or until a signal comes, which it returns.

    Raises:
        GateError: the device cannot wait for the page's words.
        StopRequested: the side task must end.
    """

    def __init__(
        self,
        page: Page,
        driver: Driver,
        stream: int,
        records: UnitRecords | None = None,
        *,
        device_uuid: int = 0,
        on_overrun: Callable[[int, int], None] = lambda slot, overrun_ns: None,
        clock_ns: Callable[[], int] = monotonic_ns,
        nap: Callable[[float], int | None] = nap,
    ) -> None:
        super().__init__(page, records)
        self._driver, self._stream, self._uuid = driver, stream, device_uuid
        self._on_overrun, self._clock_ns, self._nap = on_overrun, clock_ns, nap
        self._parent_pid = os.getppid()
        self._fault: str | None = None
        self._gone: bool | None = None
        self._each: PerOp | None = None
        self._each_thread = 0
        self._holds_each = False
        self._has_run: set[tuple[int, int]] = set()
        self._threads = {threading.get_ident()}
        self._queued: deque[_Queued] = deque()
        self._free: deque[tuple[int, int]] = deque()
        self._watch = BubbleWatch(self._words, clock_ns)
        self._last: int | None = None  # the event by which times are told, and its time by a clock of the device
        self._last_ns = 0
        self._offsets_ns: deque[int] = deque(maxlen=_OFFSETS_KEPT)
        self._address = address_of(self._words)
        with self._shut_on_error():
            self._device_address = driver.register(self._address, PAGE_BYTES)
            self._free.extend((driver.create_event(), driver.create_event()) for _ in range(_EVENT_PAIRS))
            self._probe()
        self._parent = ParentWatch(self._words, self._parent_pid)

    def enter(self, unit: int) -> None:
        """See `Gate.enter`.

        Raises:
            StopRequested: the side task must end.
            GateError: the device has refused a call, now or before.
        """
        with self._shut_on_error():
            self._adopt_thread()
            self._end_unit()
            longest_ns = self._await_room(unit)
            self._check_device()
            start, end = self._free.popleft()
            # not in a bubble that is planned for less than half of it, should it miss the one that it is meant for
            least = DeviceGate.open_for(min(int(self._cost_ns(unit) / 2), self._watch.planned_ns()))
            self._driver.wait_at_least(self._stream, self._word(Field.DEVICE_GATE), least)
            self._driver.record(start, self._stream)
            self._queued.append(_Queued(unit, self._group, longest_ns, start, end))
        self._hold_each(unit == HOST_UNIT)
        self._words[Field.SIDE_ACTIVITY] = SideActivity.HOST if unit == HOST_UNIT else SideActivity.UNIT

    def settle(self) -> None:
        """See `Gate.settle`. Who lets the host wait in the driver does not see meanwhile when bubbles begin and end.

        Raises:
            StopRequested: the side task must end.
            GateError: the device has refused a call, now or before.
        """
        with self._shut_on_error():
            self._adopt_thread()
            self._end_unit()
            self._hold_each(False)
            looks = 0
            self._read()
            while self._queued:
                self._sleep(looks)
                looks += 1
                self._read()

    def rest(self) -> None:
        """See `Gate.rest`. What is queued goes on.

        Raises:
            GateError: the device has refused a call, now or before.
        """
        with self._shut_on_error():
            self._adopt_thread()
            self._end_unit()
            self._hold_each(False)
            self._read()
            self._say()

    def close(self) -> bool:
        """Wait until all that was queued has ended, and write what is buffered.

        Returns:
            Whether the device needs the page no more; else it must stay mapped. A second call says the same.
        """
        self._hold_each(False)
        if self._gone is not None:
            return self._gone
        try:
            with self._shut_on_error():
                self._adopt_thread()
                self._end_unit()
                self._drain()
                self._driver.unregister(self._address)
            done = True
        except GateError:
            done = False
        self._parent.close()
        self._gone = done
        self._words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
        self._records.close()
        return done

    def _hold_each(self, wanted: bool) -> None:
        """Whether each operation waits for a bubble, or only the first one of a unit."""
        self._holds_each = wanted
        if wanted and self._each is None:
            from trials.gate.per_op import (
                PerOp,  # imports torch, and so starts threads: not before signals are blocked
            )

            self._each = PerOp(self._hold)
            self._each.__enter__()
            self._each_thread = threading.get_ident()
        elif not wanted and self._each is not None and threading.get_ident() == self._each_thread:
            self._each.__exit__(None, None, None)
            self._each = None

    def _hold(self) -> None:
        if not self._holds_each:
            return  # a backward pass has begun in a thread of its own
        with self._shut_on_error():
            self._driver.wait_at_least(self._stream, self._word(Field.DEVICE_GATE), DeviceGate.open_for(0))

    # What is queued

    def _end_unit(self) -> None:
        """All work of the unit that was queued last is queued."""
        if self._queued and not self._queued[-1].whole:
            self._driver.record(self._queued[-1].end, self._stream)
            self._queued[-1].whole = True

    def _read(self) -> None:
        """Look at the words, and take what has ended off the queue."""
        if self._watch.look():
            self._count_missed()
        while self._queued and self._queued[0].whole and self._driver.is_done(self._queued[0].end):
            self._take(self._queued.popleft())

    def _take(self, ended: _Queued) -> None:
        """Note the times of a unit that has ended."""
        now_ns = self._clock_ns()
        elapsed_ns = self._driver.elapsed_ns
        wall_ns = elapsed_ns(ended.start, ended.end)
        start_ns = self._last_ns + (0 if self._last is None else elapsed_ns(self._last, ended.start))
        self._last, self._last_ns = ended.end, start_ns + wall_ns
        self._free.append((ended.start, ended.end))
        # no look comes before what it sees, so the fastest of the last ones tells how the clocks differ
        self._offsets_ns.append(now_ns - self._last_ns)
        start_ns += min(self._offsets_ns)
        busy_ns = 0 if ended.unit == HOST_UNIT else wall_ns  # until the next unit asks, so mostly of the host
        for closed_ns, slot in self._watch.closings if busy_ns else ():
            if start_ns < closed_ns < start_ns + wall_ns:
                self._on_overrun(slot, start_ns + wall_ns - closed_ns)
                break
        # the first time it also takes what is loaded and allocated
        new = (ended.group, ended.unit) not in self._has_run and not self._is_known(ended.group, ended.unit)
        self._has_run.add((ended.group, ended.unit))
        self._account(ended.unit, start_ns, wall_ns, busy_ns, ended.longest_ns, ended.group, learn=not new)

    def _is_running(self) -> bool:
        """Whether the device works for us, or may at once, as far as the last look told."""
        return bool(self._queued) and self._driver.is_done(self._queued[0].start)

    def _count_missed(self) -> None:
        """Bubbles may have become so short that what waits on the device for one fits none any more."""
        if not self._queued or self._driver.is_done(self._queued[0].start):
            return
        self._queued[0].missed += 1
        if self._queued[0].missed > DECLINED_BEFORE_DOUBT:
            raise DriverError("what waits for a bubble is too long for all that have come since")

    def _cost_ns(self, unit: int) -> float:
        return self._costs_ns[unit] or UNKNOWN_COST_NEEDS_NS

    def _await_room(self, unit: int) -> int:
        """Return when `unit` may be queued, as in `CpuGate`; a bubble in which it does not fit counts as declined.

        Returns:
            The longest of the bubbles in which it was declined, if they were too many; else 0.
        """
        left_of_each_ns: deque[int] = deque(maxlen=DECLINED_BEFORE_DOUBT)
        longest_ns = declined = looks = 0
        while True:
            self._read()
            if len(self._queued) < IN_FLIGHT:
                needed_ns = sum(self._cost_ns(queued.unit) for queued in self._queued) + self._cost_ns(unit)
                left_ns = self._watch.left_ns(needed_ns)
                if needed_ns <= left_ns:
                    return longest_ns
                if self._watch.is_open and declined != self._watch.bubble:
                    declined = self._watch.bubble
                    self._words[Field.UNITS_DECLINED] += 1
                    if left_ns > 0:
                        left_of_each_ns.append(left_ns)
                    longest_ns = self._doubt(unit, left_of_each_ns)
            self._sleep(looks)
            looks += 1

    def _sleep(self, looks: int) -> None:
        """Until something may have changed, or a signal comes."""
        running = self._say()
        quiet_ns = self._watch.quiet_ns
        if running:
            seconds = 0.0 if looks < _LOOKS_AT_ONCE else _RUNNING_NAP_S
        elif self._watch.is_open or self._watch.is_due or quiet_ns < _AWAKE_NS:
            seconds = min(max(_DUE_NAP_S, quiet_ns / 1e9 / _PATIENCE), LOOK_AGAIN_S)
        else:
            seconds = LOOK_AGAIN_S
        received = self._nap(seconds)
        if received == END_SIGNAL or os.getppid() != self._parent_pid:
            raise StopRequested
        if received is not None:
            self._watch.stir()  # a bubble was planned just now

    def _say(self) -> bool:
        """Tell the main job whether we sleep. What waits on the device for a bubble does: it needs no waking."""
        running = self._is_running()
        self._words[Field.SIDE_ACTIVITY] = SideActivity.UNIT if running else SideActivity.ASLEEP
        return running

    def _drain(self) -> None:
        """Wait until nothing is queued: whoever told us to end has forced the gate, or it forces itself."""
        self._read()
        while self._queued:
            self._say()
            self._nap(_DUE_NAP_S)
            self._read()

    # The device

    def _word(self, field: int) -> int:
        return self._device_address + 8 * field

    def _check_device(self) -> None:
        """By now a main job has planned a bubble, so it has told where it is."""
        there = read_device_uuid(self._words)
        if self._uuid and there and there != self._uuid:
            raise DriverError(f"the main job's device is {there:032x}, the side task's is {self._uuid:032x}")

    def _adopt_thread(self) -> None:
        """A backward pass runs in a thread of its own, which must know the device."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._driver.adopt_thread()
            self._threads.add(thread)

    @contextmanager
    def _shut_on_error(self) -> Iterator[None]:
        if self._fault is None:
            try:
                yield
            except DriverError as error:
                self._fault, self._holds_each = str(error), False
            else:
                return
        raise GateError(f"the device's gate is shut for good, and nothing more runs: {self._fault}")

    def _probe(self) -> None:
        """Let the stream wait for a word that the host writes then: it must neither pass too early nor never."""
        driver, words = self._driver, self._words
        begun, passed = self._free[0]
        words[Field.SIDE_BYTES] = 0
        driver.record(begun, self._stream)
        driver.wait_at_least(self._stream, self._word(Field.SIDE_BYTES), 1)
        driver.record(passed, self._stream)
        try:
            came = self._comes(begun)
            too_early = driver.is_done(passed)
        finally:
            words[Field.SIDE_BYTES] = 1  # also where it has failed: the stream must get through
        if not (self._comes(passed) and came) or too_early:
            raise DriverError("the device does not wait for the page's words")
        words[Field.SIDE_BYTES] = 0

    def _comes(self, event: int) -> bool:
        end_ns = self._clock_ns() + PROBE_S * 1e9
        while not self._driver.is_done(event):
            if self._clock_ns() > end_ns:
                return False
            if self._nap(_RUNNING_NAP_S) == END_SIGNAL:
                raise StopRequested
        return True
