"""What a side task asks before every unit of device work.

A *unit* is the smallest piece of work that is never interrupted: one fused layer's forward or backward, the loss,
a piece of the optimizer's step. Units are numbered; `Gate.use` names them.
"""

import os
import signal
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from typing import Protocol

from ds_hooks.page import Doing, Field, Page
from trials.ledger import (
    DECLINED_BEFORE_DOUBT,
    GATE_SIGNALS,
    HOST_UNIT,
    LOOK_AGAIN_S,
    STOP_SIGNAL,
    UNKNOWN_COST_NEEDS_NS,
    Ledger,
    StopRequested,
)
from trials.ledger import Starved as Starved  # part of what a gate says


class Gate(Protocol):
    """The side task's only view of the main job."""

    def use(self, units: Sequence[str]) -> None:
        """Declare the units that the following `enter` calls number, after a group was built or changed its K.

        Args:
            units: a name per unit, such as ``"0.Linear forward"``; the index in this list is the unit's number.
        """

    def enter(self, unit: int) -> None:
        """Return when `unit` may start on the device; the unit that ran until now has ended.

        Raises:
            StopRequested: the side task must end.
        """

    def rest(self) -> None:
        """The unit that ran until now has ended and no device work follows before the next `enter`."""


class OpenGate:
    """A gate that never closes: training outside a pipeline, and the reference in tests."""

    def use(self, units: Sequence[str]) -> None:
        """Accept any units."""

    def enter(self, unit: int) -> None:
        """Return at once."""

    def rest(self) -> None:
        """Return at once."""


class PageGate(Ledger):
    """The gate of a side task: opens and closes with the shared page's words.

    Open costs a few memory reads. Closed, the process sleeps in the kernel until a signal comes: it never polls. The
    signals must be blocked before any thread starts (`block_signals`), so none is lost between the look and the sleep.

    A unit starts only if it is forecast to end within the permit. Its forecast follows its thread CPU time, rising fast
    and falling slowly, so it settles near the 0.9 expectile of what it costs. One that waits in vain for many bubbles
    is tried in one of the longest; if it proves to be longer, `take_starved` names it.

    Args:
        page: the device's page; the caller has claimed the side task's role.
        units_file: receives one `record` (start_ns, wall_ns, cpu_ns, unit, group) per unit that ran; None: nowhere.
        names_file: receives the names of the units of every group, as JSON.
    """

    def __init__(self, page: Page, units_file: Path | None = None, names_file: Path | None = None) -> None:
        super().__init__(page, units_file, names_file)
        self._running: int | None = None
        self._start_ns = 0
        self._start_cpu_ns = 0
        self._longest_ns = 0  # of the bubbles in which the running unit was declined, if they were too many
        self._parent_pid = os.getppid()

    def enter(self, unit: int) -> None:
        """See `Gate.enter`."""
        # said before the look: a main job that finds us asleep at a bubble's end may count on it
        self._words[Field.SIDE_DOING] = Doing.HOST if unit == HOST_UNIT else Doing.UNIT
        cpu_ns = thread_time_ns()
        if self._running is not None:
            self._end_unit(monotonic_ns(), cpu_ns)
        start_ns = self._start_of(unit)
        if not start_ns:
            start_ns, cpu_ns = self._pause(unit), thread_time_ns()
        self._running = unit
        self._start_ns, self._start_cpu_ns = start_ns, cpu_ns

    def rest(self) -> None:
        """See `Gate.rest`."""
        if self._running is not None:
            self._end_unit(monotonic_ns(), thread_time_ns())
            self._running = None
        self._words[Field.SIDE_DOING] = Doing.ASLEEP

    def close(self) -> bool:
        """Write what is buffered. Returns whether the page may be unmapped: it may."""
        self.rest()
        self._close_file()
        return True

    def _start_of(self, unit: int) -> int:
        """The time at which `unit` starts: now, or 0 if it may not.

        The main job may take the core at any moment of this, for as long as it likes. The word is the same before and
        after the clock is read, so that time lies within the bubble.
        """
        words = self._words
        bubble = words[Field.BUBBLE]
        now_ns = monotonic_ns()
        if not bubble & 1:
            return 0
        cost_ns = self._costs_ns[unit] or UNKNOWN_COST_NEEDS_NS
        fits = now_ns + cost_ns <= words[Field.PERMIT_UNTIL_NS]
        return now_ns if fits and words[Field.BUBBLE] == bubble else 0

    def _end_unit(self, now_ns: int, now_cpu_ns: int) -> None:
        unit = self._running
        assert unit is not None
        longest_ns, self._longest_ns = self._longest_ns, 0
        wall_ns, cpu_ns = now_ns - self._start_ns, now_cpu_ns - self._start_cpu_ns
        self._account(unit, self._start_ns, wall_ns, cpu_ns, longest_ns, self._group)

    def _pause(self, unit: int) -> int:
        """Sleep until `unit` may start, and return that time. Waking in vain counts as declined.

        One slow run, or a unit longer than every bubble, must not keep it out for ever: after many bubbles in vain its
        forecast is forgotten, and it is tried in one of the longest, and stopped at its end if it must be.
        """
        words = self._words
        left_ns: deque[int] = deque(maxlen=DECLINED_BEFORE_DOUBT)
        while True:
            words[Field.SIDE_DOING] = Doing.ASLEEP
            received = None
            # a bubble that began before we said that we sleep found nobody to wake: look once more
            if not self._start_of(unit):
                received = signal.sigtimedwait(GATE_SIGNALS, LOOK_AGAIN_S)
            if (received is not None and received.si_signo == STOP_SIGNAL) or os.getppid() != self._parent_pid:
                self._running = None
                raise StopRequested
            words[Field.SIDE_DOING] = Doing.HOST if unit == HOST_UNIT else Doing.UNIT
            start_ns = self._start_of(unit)
            if start_ns:
                return start_ns
            if received is not None:
                words[Field.UNITS_DECLINED] += 1
                left = words[Field.PERMIT_UNTIL_NS] - monotonic_ns()
                if words[Field.BUBBLE] & 1 and left > 0:
                    left_ns.append(left)
                self._longest_ns = self._doubt(unit, left_ns)


def block_signals() -> None:
    """Block the gate's signals in this thread and all that it will start. Call it before importing torch."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GATE_SIGNALS)
