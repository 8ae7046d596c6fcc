"""The units that a side task has queued on its CUDA stream, each behind a wait for the bubble, and when they ran."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ds_hooks.shared.cuda_driver import Driver, DriverError, address_of
from ds_hooks.shared.page.layout import PAGE_BYTES, Field
from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.gate.base import StopRequested
from trials.gate.unit_costs import DECLINED_BEFORE_DOUBT

IN_FLIGHT = 2
"""At most this many units are queued: the one that runs and the next. A queued unit cannot be called back."""

PROBE_S = 1.0
"""The start-up probe waits for the device at most this long. It normally takes microseconds."""

PROBE_NAP_S = 5e-5

_EVENT_PAIRS = IN_FLIGHT + 1
"""One more than is queued, because times are measured from the last event that was read."""

_OFFSETS_KEPT = 64


@dataclass(slots=True)
class QueuedUnit:
    """A unit that the device has been given.

    Attributes:
        unit: its number.
        group: the index of the units in use when it was asked for.
        longest_ns: the longest of the bubbles in which it was declined, if they were too many; else 0.
        start: the event behind the wait. Once it is done, the unit runs.
        end: the event behind its work.
        is_complete: whether all of its work is queued, and `end` behind it.
        missed: how many bubbles have begun while it was first in the queue and did not start.
        seen_ns: when it was first seen to run; 0: not yet.
        holds: the events before and behind each wait in its middle.
    """

    unit: int
    group: int
    longest_ns: int
    start: int
    end: int
    is_complete: bool = False
    missed: int = 0
    seen_ns: int = 0
    holds: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndedUnit:
    """A unit that has ended.

    Attributes:
        unit: its number.
        group: the index of the units in use when it was asked for.
        longest_ns: see `QueuedUnit`.
        start_ns: when it began, by the host's clock.
        wall_ns: from its begin to its end, by the device's clock.
        first_ns: from its begin to its first wait in the middle; without one, to its end.
        busy_ns: `wall_ns` without such waits.
    """

    unit: int
    group: int
    longest_ns: int
    start_ns: int
    wall_ns: int
    first_ns: int
    busy_ns: int


class UnitQueue:
    """Queues units on one CUDA stream, each behind a wait for a word of the page. Never synchronizes.

    Args:
        words: the page's. The device can read them until `release`.
        driver: the device.
        stream: where the side task's work is queued.
        clock_ns: the host's clock.
        nap: sleeps for some seconds, or until a signal comes, which it returns.

    Raises:
        DriverError: the device refuses. Every method may raise it.
    """

    def __init__(
        self,
        words: "memoryview[int]",
        driver: Driver,
        stream: int,
        clock_ns: Callable[[], int],
        nap: Callable[[float], int | None],
    ) -> None:
        self._words, self._driver, self._stream = words, driver, stream
        self._clock_ns, self._nap = clock_ns, nap
        self._threads = {threading.get_ident()}
        self._units: deque[QueuedUnit] = deque()
        self._last: int | None = None  # the event from which times are measured, and its time by the device's clock
        self._last_ns = 0
        self._offsets_ns: deque[int] = deque(maxlen=_OFFSETS_KEPT)
        self._address = address_of(words)
        self._device_address = driver.register(self._address, PAGE_BYTES)
        self._free_holds: list[tuple[int, int]] = []
        self._ending = threading.Lock()  # held while the end of a unit is queued, or a wait in its middle
        self._free = deque(self._new_pair() for _ in range(_EVENT_PAIRS))

    def __len__(self) -> int:
        """The number of units that have not ended, as far as the last look saw."""
        return len(self._units)

    def __iter__(self) -> Iterator[QueuedUnit]:
        """Those units, the oldest first."""
        return iter(self._units)

    def probe(self) -> None:
        """Have the stream wait for a word that the host then writes: it must pass afterwards, and not before.

        Raises:
            StopRequested: the side task must end.
            DriverError: the device does not wait.
        """
        driver, words = self._driver, self._words
        begun, passed = self._free[0]
        words[Field.SIDE_BYTES] = 0
        driver.record(begun, self._stream)
        self._wait_for((Field.SIDE_BYTES, 1))
        driver.record(passed, self._stream)
        try:
            has_begun = self._comes(begun)
            too_early = driver.is_done(passed)
        finally:
            words[Field.SIDE_BYTES] = 1  # even after a failure: the stream must get through
        if not (self._comes(passed) and has_begun) or too_early:
            raise DriverError("the device does not wait for the page's words")
        words[Field.SIDE_BYTES] = 0

    def adopt_thread(self) -> None:
        """Make the device known to this thread. A backward pass runs in a thread of its own."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._driver.adopt_thread()
            self._threads.add(thread)

    def add(self, unit: int, group: int, longest_ns: int, least: int, left: int) -> None:
        """Queue the wait of `unit`; its work follows.

        Args:
            unit: its number.
            group: the index of the units in use.
            longest_ns: see `QueuedUnit`.
            least: the smallest value of the page's device gate that lets it through.
            left: the smallest value of `PERMIT_LEFT` that does.
        """
        start, end = self._free.popleft()
        # in this order: between bubbles what is left holds nothing back, so the gate must have the last word
        self._wait_for((Field.PERMIT_LEFT, left), (Field.DEVICE_GATE, least))
        self._driver.record(start, self._stream)
        self._units.append(QueuedUnit(unit, group, longest_ns, start, end))

    def wait_for_gate(self, least: int) -> None:
        """Have what is queued next wait until the page's device gate is at least `least`."""
        self._wait_for((Field.DEVICE_GATE, least))

    def complete_last(self) -> None:
        """Note that all work of the last unit is queued."""
        if self._units and not self._units[-1].is_complete:
            with self._ending:
                self._driver.record(self._units[-1].end, self._stream)
                self._units[-1].is_complete = True

    def hold_rest(self) -> None:
        """Let what is still to come of a unit that runs wait for another bubble. For another thread than the unit's.

        Raises:
            DriverError: see the class.
        """
        if not self._ending.acquire(blocking=False):
            return  # nothing is to come; and the driver may hold who queues its end
        try:
            last = self._units[-1]
            if last.is_complete or not self._driver.is_done(last.holds[-1][1] if last.holds else last.start):
                return
            before, behind = self._free_holds.pop() if self._free_holds else self._new_pair()
            self._driver.record(before, self._stream)
            self._wait_for((Field.PERMIT_LEFT, 1), (Field.DEVICE_GATE, 1))
            self._driver.record(behind, self._stream)
            last.holds.append((before, behind))
        finally:
            self._ending.release()

    def _new_pair(self) -> tuple[int, int]:
        return self._driver.create_event(), self._driver.create_event()

    def take_ended(self) -> Iterator[EndedUnit]:
        """Take the units off the queue that have ended, the oldest first."""
        while self._units and self._units[0].is_complete and self._driver.is_done(self._units[0].end):
            yield self._timed(self._units.popleft())

    def is_running(self) -> bool:
        """Whether the oldest unit has started, as far as the last look saw."""
        if not self._units or not self._driver.is_done(self._units[0].start):
            return False
        self._units[0].seen_ns = self._units[0].seen_ns or self._clock_ns()
        return True

    def ran_ns(self, queued: QueuedUnit) -> int:
        """For how long a unit has been seen to run; it may have started earlier."""
        return self._clock_ns() - queued.seen_ns if queued.seen_ns else 0

    def note_bubble(self) -> bool:
        """Note that a bubble has begun. Bubbles may have become too short for the unit that waits on the device.

        Returns:
            Whether the oldest unit has missed too many of them.

        Raises:
            DriverError: see the class.
        """
        if not self._units or self._driver.is_done(self._units[0].start):
            return False
        self._units[0].missed += 1
        return self._units[0].missed > DECLINED_BEFORE_DOUBT

    def release(self) -> None:
        """The device needs the page no more; nothing may be queued."""
        self._driver.unregister(self._address)

    def _timed(self, ended: QueuedUnit) -> EndedUnit:
        now_ns = self._clock_ns()
        elapsed_ns = self._driver.elapsed_ns
        wall_ns = elapsed_ns(ended.start, ended.end)
        first_ns = elapsed_ns(ended.start, ended.holds[0][0]) if ended.holds else wall_ns
        busy_ns = wall_ns - sum(elapsed_ns(before, behind) for before, behind in ended.holds)
        self._free_holds += ended.holds
        start_ns = self._last_ns + (0 if self._last is None else elapsed_ns(self._last, ended.start))
        self._last, self._last_ns = ended.end, start_ns + wall_ns
        self._free.append((ended.start, ended.end))
        # a look always comes after what it sees, so the smallest of the last differences is closest to the clocks' own
        self._offsets_ns.append(now_ns - self._last_ns)
        times = start_ns + min(self._offsets_ns), wall_ns, first_ns, busy_ns
        return EndedUnit(ended.unit, ended.group, ended.longest_ns, *times)

    def _wait_for(self, *words: tuple[int, int]) -> None:
        """Have what is queued next wait for each of (field, least), one after the other."""
        waits = [(self._device_address + 8 * field, least) for field, least in words]
        self._driver.wait_for_words(self._stream, waits)

    def _comes(self, event: int) -> bool:
        end_ns = self._clock_ns() + PROBE_S * 1e9
        while not self._driver.is_done(event):
            if self._clock_ns() > end_ns:
                return False
            if self._nap(PROBE_NAP_S) == END_SIGNAL:
                raise StopRequested
        return True
