"""The gate of a side task on a CUDA device: each unit waits on the device itself for the bubble.

The host runs ahead of the device, so it asks early: a unit is queued behind a wait for the page's `DEVICE_GATE`, which
the main job's device opens and closes. The host only decides whether the unit is forecast to fit.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING

from ds_hooks.shared.cuda_driver import Driver, DriverError
from ds_hooks.shared.device_uuid import read_device_uuid
from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import DeviceGate, Field, SideActivity
from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.gate.base import HOST_UNIT, GateError, StopRequested
from trials.gate.bubble_watch import BubbleWatch
from trials.gate.cuda_queue import IN_FLIGHT, EndedUnit, UnitQueue
from trials.gate.host_watch import HostWatch, where_is
from trials.gate.parent_watch import ParentWatch
from trials.gate.process import nap
from trials.gate.unit_costs import DECLINED_BEFORE_DOUBT, LOOK_AGAIN_S, UNKNOWN_COST_NEEDS_NS, UnitCosts
from trials.gate.unit_records import UnitRecords
from trials.own_logger import own_logger

if TYPE_CHECKING:
    from trials.gate.per_op import PerOp

_LOOKS_AT_ONCE = 16
_RUNNING_NAP_S = 5e-5
_DUE_NAP_S = 1e-4
"""The start of a bubble is noticed at most this much late; the permit loses the same time."""
_AWAKE_NS = 20_000_000
"""For this long after its last sign, the main job's device may be about to announce another bubble."""
_AWAY_LOOK_S, _HERE_LOOK_S = 1e-3, 1e-2
"""How often another thread looks while units are queued and the training thread is not at the gate; and else."""
NEARLY_ALL = 0.9
"""A unit that is queued behind one that takes longer than forecast starts only if this share of its cost is left."""
_PATIENCE = 1000
"""Sleep 1/1000 of the time already waited, so a late wake-up costs 0.1%."""

log = own_logger(__name__)


class CudaGate(UnitCosts):
    """Queues units on one CUDA stream, at most two, each behind a wait for the bubble. Never synchronizes.

    A unit is queued if it is forecast to end within what is left of the permit, after what is queued already. In a
    bubble that is still to come, that bubble's permit counts. The device then starts the unit by itself, without the
    host. Costs and records are the device's times, which events report when a unit has ended. They say nothing about
    host work, so host work counts as idle. A bubble is taken to begin when the host last saw it closed: it cannot have
    begun earlier.

    All work of the side task must be queued on `stream`, by one thread at a time. The signals must be blocked before
    any thread starts (`block_signals`). The stream may be waiting, so the gate must be forced open before the side task
    is ended. Until it ends, queued work stays queued, and nothing is added. If the parent ends, the gate forces itself.

    The thread that trains may be slow in the middle of a unit, or held by the driver, in a call that waits for what
    waits for a bubble. So another one, `HostWatch`, looks at the page while it is away. After a bubble's end it lets
    what is still to come of the unit wait for the next bubble. A unit that has become too long for every bubble is let
    through at the next one's begin, since it cannot be called back; then the gate is shut for good.

    Args:
        page: the device's page; the caller has claimed the side task's role.
        driver: the device.
        stream: where the side task's work is queued.
        records: see `UnitCosts`.
        device_uuid: the device's UUID, 128 bits, to notice a main job on another device; 0: unknown.
        on_overrun: called with (slot, ns) of a unit that ran on after its bubble.
        clock_ns: the host's clock.
        nap: sleeps for some seconds, or until a signal comes, which it returns.
        start_host_watch: see `HostWatch`.

    Attributes:
        device_type: what PyTorch calls the kind of device, whose operations wait one by one in host work.

    Raises:
        GateError: the device cannot wait for the page's words.
        StopRequested: the side task must end.
    """

    device_type = "cuda"

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
        start_host_watch: Callable[[Callable[[], float | None]], object] = HostWatch,
    ) -> None:
        super().__init__(page, records)
        self._uuid, self._on_overrun, self._nap = device_uuid, on_overrun, nap
        self._parent_pid = os.getppid()
        self._fault: str | None = None
        self._is_released: bool | None = None  # once it is closed
        self._is_hopeless = False  # a unit has become too long for every bubble
        self._host_thread = threading.get_ident()
        self._lock = threading.Lock()  # held while the thread that trains looks at the page, or another does
        self._each: PerOp | None = None
        self._each_thread = 0
        self._holds_each = False
        self._has_run: set[tuple[int, int]] = set()
        self._watch = BubbleWatch(self._words, clock_ns)
        self._depth = IN_FLIGHT
        with self._shut_on_error():
            self._queue = UnitQueue(self._words, driver, stream, clock_ns, nap)
            self._probe()
        self._parent = ParentWatch(self._words, self._parent_pid)
        start_host_watch(self.look_for_host)

    def limit_queue(self, depth: int) -> None:
        """Queue at most `depth` units; 1: and that one only in an open bubble.

        For a device on which the host cannot leave much work behind a shut gate.
        """
        self._depth, self._watch.ahead = min(depth, IN_FLIGHT), depth > 1

    def enter(self, unit: int) -> None:
        """See `Gate.enter`.

        Raises:
            StopRequested: the side task must end.
            GateError: the device has refused a call, now or before.
        """
        with self._shut_on_error():
            self._queue.adopt_thread()
            self._complete_last()
            longest_ns = self._await_room(unit)
            self._check_device()
            # a unit that misses its bubble must not run in one planned for less than half of its cost
            cost_ns = self._cost_ns(unit)
            least = DeviceGate.open_for(min(int(cost_ns / 2), self._watch.planned_ns()))  # which knows no renewals
            left = DeviceGate.open_for(int(NEARLY_ALL * cost_ns))
            with self._maybe_held():
                self._queue.add(unit, self._group, longest_ns, least, left)
        self._hold_each(unit == HOST_UNIT)
        self._words[Field.SIDE_ACTIVITY] = SideActivity.HOST if unit == HOST_UNIT else SideActivity.UNIT

    def settle(self) -> None:
        """See `Gate.settle`. Sleeping here, not in the driver, keeps an eye on when bubbles begin and end.

        Raises:
            StopRequested: the side task must end.
            GateError: the device has refused a call, now or before.
        """
        with self._shut_on_error():
            self._queue.adopt_thread()
            self._complete_last()
            self._hold_each(False)
            looks = 0
            self._read()
            while self._queue:
                self._sleep(looks)
                looks += 1
                self._read()

    def rest(self) -> None:
        """See `Gate.rest`. Queued units still run.

        Raises:
            GateError: the device has refused a call, now or before.
        """
        with self._shut_on_error():
            self._queue.adopt_thread()
            self._complete_last()
            self._hold_each(False)
            self._read()
            self._show_activity()

    def busy_ns(self) -> int:
        """Return the time of units that have ended on the device."""
        return int(self._words[Field.BUSY_NS])

    def close(self) -> bool:
        """Wait until all that was queued has ended, and write what is buffered.

        Returns:
            Whether the device needs the page no more; else it must stay mapped. A second call returns the same.
        """
        self._hold_each(False)
        if self._is_released is not None:
            return self._is_released
        try:
            with self._shut_on_error():
                self._queue.adopt_thread()
                self._complete_last()
                self._drain()
                self._queue.release()
                self._is_released = True
        except GateError:
            self._is_released = False
        self._parent.close()
        self._words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
        self._records.close()
        return self._is_released

    def look_for_host(self) -> float | None:
        """Look at the page in place of the thread that trains, unless that is here. For another thread.

        Returns:
            In how many seconds to look again; None: the gate is closed, or shut for good.
        """
        if not self._lock.acquire(blocking=False):
            return _HERE_LOOK_S
        try:
            if self._is_released is not None or self._fault is not None:
                return None
            if not self._queue:
                return _HERE_LOOK_S
            self._queue.adopt_thread()
            was_hopeless = self._is_hopeless
            self._look()
            if not (self._watch.may_run or self._holds_each or self._is_hopeless):
                self._queue.hold_rest()
            if self._is_hopeless and not was_hopeless:
                log.warning("the host is at %s, and a unit is too long for every bubble", where_is(self._host_thread))
            return _AWAY_LOOK_S
        except DriverError as error:
            self._fault = str(error)
            return None
        finally:
            self._lock.release()

    # Permission

    def _await_room(self, unit: int) -> int:
        """Return when `unit` may be queued. As in `CpuGate`, a bubble that it does not fit counts as declined.

        Returns:
            The longest of the bubbles in which it was declined, if they were too many; else 0.
        """
        left_of_each_ns: deque[int] = deque(maxlen=DECLINED_BEFORE_DOUBT)
        longest_ns = declined = looks = 0
        while True:
            self._read()
            if len(self._queue) < self._depth and not self._is_hopeless:
                needed_ns = self._queued_ns() + self._cost_ns(unit)
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

    def _queued_ns(self) -> float:
        """What the queued units have yet to run, by forecast."""
        queue = self._queue
        return sum(max(0.0, self._cost_ns(queued.unit) - queue.ran_ns(queued)) for queued in queue)

    def _cost_ns(self, unit: int) -> float:
        return self._costs_ns[unit] or UNKNOWN_COST_NEEDS_NS

    def _sleep(self, looks: int) -> None:
        """Sleep until something may have changed, or a signal comes."""
        running = self._show_activity()
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

    def _show_activity(self) -> bool:
        """Show the main job whether the side task sleeps. A unit that waits on the device does: it needs no waking.

        Returns:
            Whether a unit runs.
        """
        running = self._queue.is_running()
        self._words[Field.SIDE_ACTIVITY] = SideActivity.UNIT if running else SideActivity.ASLEEP
        return running

    def _drain(self) -> None:
        """Wait until nothing is queued. The gate has been forced open from outside, or it forces itself."""
        self._read()
        while self._queue:
            self._show_activity()
            self._nap(_DUE_NAP_S)
            self._read()

    # What units took

    def _read(self) -> None:
        """Look at the page's words, and account for the units that have ended."""
        self._look()
        for ended in self._queue.take_ended():
            self._take(ended)
        if self._is_hopeless and not self._queue:
            self._words[Field.DEVICE_GATE] = DeviceGate.CLOSED  # it may have been forced just after the bubble's end
            raise DriverError("a unit that the device had been given was too long for every bubble that came since")

    def _look(self) -> None:
        if self._watch.look():
            self._permits_ns.append(self._watch.planned_ns())
            self._is_hopeless = self._queue.note_bubble() or self._is_hopeless
            if self._is_hopeless:
                force_gate(self._words)  # the main job's device shuts it again at the bubble's end

    def _take(self, ended: EndedUnit) -> None:
        busy_ns = (
            0 if ended.unit == HOST_UNIT else ended.busy_ns
        )  # its time lasts until the next unit asks, so it is mostly the host's
        end_ns = ended.start_ns + ended.first_ns
        for closed_ns, slot in self._watch.closings if busy_ns else ():
            if ended.start_ns < closed_ns < end_ns:
                self._on_overrun(slot, end_ns - closed_ns)
                break
        # the first run also loads kernels and allocates memory
        is_first = (ended.group, ended.unit) not in self._has_run and not self._is_known(ended.group, ended.unit)
        self._has_run.add((ended.group, ended.unit))
        self._account(
            *(ended.unit, ended.start_ns, ended.wall_ns, busy_ns, ended.longest_ns, ended.group), learn=not is_first
        )

    # The device

    def _probe(self) -> None:
        self._queue.probe()

    def _check_device(self) -> None:
        """By now a main job has planned a bubble, so it has written which device it uses."""
        there = read_device_uuid(self._words)
        if self._uuid and there and there != self._uuid:
            raise DriverError(f"the main job's device is {there:032x}, the side task's is {self._uuid:032x}")

    def _hold_each(self, wanted: bool) -> None:
        """Choose whether each operation waits for a bubble, or only the first one of a unit."""
        self._holds_each = wanted
        if wanted and self._each is None:
            from trials.gate.per_op import PerOp  # imports torch, which starts threads: not before signals are blocked

            self._each = PerOp(self._hold, self.device_type)
            self._each.__enter__()
            self._each_thread = threading.get_ident()
        elif not wanted and self._each is not None and threading.get_ident() == self._each_thread:
            self._each.__exit__(None, None, None)
            self._each = None

    def _hold(self) -> None:
        if not self._holds_each:
            return  # a backward pass has begun in a thread of its own
        with self._shut_on_error(), self._maybe_held():
            self._queue.wait_for_gate(DeviceGate.open_for(0))

    def _complete_last(self) -> None:
        with self._maybe_held():
            self._queue.complete_last()

    @contextmanager
    def _maybe_held(self) -> Iterator[None]:
        """Around what queues: with no room in the stream it waits for a bubble, so the other thread must look."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    @contextmanager
    def _shut_on_error(self) -> Iterator[None]:
        with self._lock:
            self._host_thread = threading.get_ident()
            if self._fault is None:
                try:
                    yield
                except DriverError as error:
                    self._fault, self._holds_each = str(error), False
                else:
                    return
        raise GateError(f"the device's gate is shut for good, and nothing more runs: {self._fault}")
