"""The gate of a side task on a CPU: it sleeps in the kernel until the main job wakes it, and never polls."""

import os
import signal
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns, thread_time_ns

from ds_hooks.shared.page import Field, SideActivity
from ds_hooks.shared.page_file import Page
from ds_hooks.shared.plan import find_renewal
from ds_hooks.shared.signals import END_SIGNAL
from trials.gate.base import GATE_SIGNALS, HOST_UNIT, StopRequested
from trials.gate.unit_costs import DECLINED_BEFORE_DOUBT, LEAST_COST_NS, LOOK_AGAIN_S, UNKNOWN_COST_NEEDS_NS, UnitCosts
from trials.gate.unit_records import UnitRecords

GRAIN_NS = 1_000_000
"""Units in a row that are forecast to take no longer than this together are measured and recorded as one. Each still
asks; but most of what asking costs is to read the thread's clock, and to account for what it says."""

PREEMPTIVE_GRAIN_NS = 20_000_000
"""The same where a unit may be stopped in its middle, so that no forecast needs to be exact, and only a
row looks for more than whether there is a bubble."""

ROWS_PER_LESSON = 16
"""Where a unit may be stopped, host work joins a row, too, since no forecast needs to be exact. One row in so many
keeps it out, and teaches what its units take."""

AS_FORECAST = (0.9, 1.02)
"""A row that takes this share of its forecast teaches next to nothing."""

ACCOUNT_EVERY_NS = 20_000_000
"""What units took is learned and recorded for so much of it at once: each time, that code is cold and slow."""


class CpuGate(UnitCosts):
    """The gate of a side task: opens and closes with the shared page's words.

    Open costs a few memory reads. Closed, the process sleeps in the kernel until a signal comes: it never polls. The
    signals must be blocked before any thread starts (`block_signals`), so none is lost between the look and the sleep.

    A unit starts only if it is forecast to end within the permit, or, if the bubble outlives that, within a renewal.
    Its forecast follows its thread CPU time, rising fast and falling slowly, so it settles near the 0.9 expectile of
    what it costs. One that waits in vain for many bubbles is tried in one of the longest; if it proves to be longer,
    `take_starved` names it.

    Short units in a row share a record, under a name such as "0.Linear forward … 2.ReLU forward". What they took
    together is shared out among their forecasts.

    Args:
        page: the device's page; the caller has claimed the side task's role.
        records: see `UnitCosts`.
    """

    def __init__(self, page: Page, records: UnitRecords | None = None) -> None:
        super().__init__(page, records)
        self._running: int | None = None
        self._row: list[int] = []  # units that joined the running one
        self._room_ns = 0.0
        self._may_be_stopped = False  # in the middle of the running row, by whoever ends the bubble
        self._host_joins = False  # the running row
        self._rows_begun = 0
        self._ended: list[tuple[int, tuple[int, ...], int, int, int, int]] = []
        self._ended_ns = 0
        self._rows: dict[tuple[int, int, int], int] = {}  # (group, first, last unit) to its number
        self._bubble = 0
        self._until_ns = 0  # the end of the permit, or of the renewal, in which the running unit began
        self._start_ns = 0
        self._start_cpu_ns = 0
        self._longest_ns = 0  # of the bubbles in which the running unit was declined, if they were too many
        self._parent_pid = os.getppid()

    def use(self, units: Sequence[str], trials: int) -> None:
        """See `UnitCosts.use`."""
        if self._running is not None:  # a row that goes on would have units of both numberings
            now_ns, cpu_ns = monotonic_ns(), thread_time_ns()
            self._end_running(now_ns, cpu_ns)
            self._running, self._room_ns = HOST_UNIT, 0.0
            self._start_ns, self._start_cpu_ns = now_ns, cpu_ns
        self._settle()
        super().use(units, trials)

    def enter(self, unit: int) -> None:
        """See `Gate.enter`."""
        words = self._words
        cost_ns = self._costs_ns[unit]
        if (
            0.0 < cost_ns <= self._room_ns
            and (unit != HOST_UNIT or self._host_joins)
            and (
                words[Field.BUBBLE] & 1  # which may be a later one
                if self._may_be_stopped
                else monotonic_ns() + cost_ns <= self._until_ns and words[Field.BUBBLE] == self._bubble
            )
        ):
            self._room_ns -= cost_ns
            self._row.append(unit)
            return
        # said before the look: a main job that finds us asleep at a bubble's end may count on it
        words[Field.SIDE_ACTIVITY] = SideActivity.HOST if unit == HOST_UNIT else SideActivity.UNIT
        cpu_ns = thread_time_ns()
        if self._running is not None:
            self._end_running(monotonic_ns(), cpu_ns)
        start_ns = self._start_of(unit)
        if not start_ns:
            start_ns, cpu_ns = self._pause(unit), thread_time_ns()
        self._running = unit
        self._start_ns, self._start_cpu_ns = start_ns, cpu_ns
        # what is host work, unknown, or was declined too often is measured by itself
        own_ns = self._costs_ns[unit]
        if unit == HOST_UNIT or not own_ns or self._longest_ns:
            self._room_ns = 0.0
        else:
            self._may_be_stopped = bool(words[Field.PREEMPTIVE])
            self._room_ns = (PREEMPTIVE_GRAIN_NS if self._may_be_stopped else GRAIN_NS) - own_ns
            self._rows_begun += 1
            self._host_joins = self._may_be_stopped and bool(self._rows_begun % ROWS_PER_LESSON)

    def settle(self) -> None:
        """Return at once: what ran has ended when the host goes on."""

    def rest(self) -> None:
        """See `Gate.rest`."""
        if self._running is not None:
            self._end_running(monotonic_ns(), thread_time_ns())
            self._running = None
        self._room_ns = 0.0
        self._words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP

    def close(self) -> bool:
        """Write what is buffered. Returns whether the page may be unmapped: it may."""
        self.rest()
        self._settle()
        self._records.close()
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
        until_ns = words[Field.PERMIT_UNTIL_NS]
        if now_ns + self._needs_ns(unit) > until_ns:
            from_ns, until_ns = self._renewal(unit, now_ns)
            if not from_ns or from_ns > now_ns:
                return 0
        if words[Field.BUBBLE] != bubble:
            return 0
        self._bubble, self._until_ns = bubble, until_ns
        return now_ns

    def _needs_ns(self, unit: int) -> float:
        return self._costs_ns[unit] or UNKNOWN_COST_NEEDS_NS

    def _renewal(self, unit: int, now_ns: int) -> tuple[int, int]:
        """The times (from, until) of the open bubble's next renewal into which `unit` fits; (0, 0): there is none."""
        words = self._words
        base_ns = words[Field.PLAN_BASE_NS]
        found = None
        if words[Field.BUBBLE] & 1 and words[Field.PERMIT_UNTIL_NS]:
            found = find_renewal(words, words[Field.SLOT], now_ns - base_ns, self._needs_ns(unit))
        return (0, 0) if found is None else (base_ns + found[0], base_ns + found[1])

    def _end_running(self, now_ns: int, now_cpu_ns: int) -> None:
        unit = self._running
        assert unit is not None
        cpu_ns = now_cpu_ns - self._start_cpu_ns
        row = tuple(self._row)
        self._ended.append((unit, row, self._start_ns, now_ns - self._start_ns, cpu_ns, self._longest_ns))
        self._row.clear()
        self._ended_ns += cpu_ns
        # what was unknown or in doubt may be asked for again at once
        if not self._costs_ns[unit] or self._longest_ns or self._ended_ns >= ACCOUNT_EVERY_NS:
            self._settle()
        self._longest_ns = 0

    def _settle(self) -> None:
        """Learn from what has ended, and record it."""
        if not self._ended:
            return
        units, busy_ns, group = 0, 0, self._group
        for unit, row, start_ns, wall_ns, cpu_ns, longest_ns in self._ended:
            units += 1 + len(row)
            busy_ns += cpu_ns
            number = unit
            if row:
                number = self._learn_row((unit, *row), cpu_ns)
            else:
                self._learn(unit, cpu_ns, longest_ns, group)
            self._records.add(start_ns, wall_ns, cpu_ns, number, group)
        self._ended.clear()
        self._ended_ns = 0
        self._count(units, busy_ns)

    def _learn_row(self, row: tuple[int, ...], cpu_ns: int) -> int:
        """Share out what a row of units took; the number under which it is recorded."""
        if HOST_UNIT in row:
            while row[-1] == HOST_UNIT:
                row = row[:-1]
        else:
            self._share_out(row, cpu_ns)
        ends = (self._group, row[0], row[-1])
        number = self._rows.get(ends)
        if number is None:
            number = self._rows[ends] = self._records.add_row(*ends)
        return number

    def _share_out(self, row: tuple[int, ...], cpu_ns: int) -> None:
        """Learn from what a row of units took together."""
        costs_ns = self._costs_ns
        # of the present forecasts: an earlier row of the same units may have changed them since this one ran
        ratio = cpu_ns / sum([costs_ns[unit] for unit in row])
        if not AS_FORECAST[0] < ratio < AS_FORECAST[1]:
            factor = 1 + (ratio - 1) * (0.5 if ratio > 1 else 0.05)
            for unit in set(row):
                costs_ns[unit] = max(LEAST_COST_NS, costs_ns[unit] * factor)

    def _pause(self, unit: int) -> int:
        """Sleep until `unit` may start, and return that time. Waking in vain counts as declined.

        One slow run, or a unit longer than every bubble, must not keep it out for ever: after many bubbles in vain its
        forecast is forgotten, and it is tried in one of the longest, and stopped at its end if it must be.
        """
        words = self._words
        left_ns: deque[int] = deque(maxlen=DECLINED_BEFORE_DOUBT)
        while True:
            words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
            received = None
            # a bubble that began before we said that we sleep found nobody to wake: look once more
            if not self._start_of(unit):
                now_ns = monotonic_ns()
                from_ns, _ = self._renewal(unit, now_ns)
                wait_s = max(from_ns - now_ns, 0) / 1e9 if from_ns else LOOK_AGAIN_S
                received = signal.sigtimedwait(GATE_SIGNALS, min(wait_s, LOOK_AGAIN_S))
            if (received is not None and received.si_signo == END_SIGNAL) or os.getppid() != self._parent_pid:
                self._running = None
                raise StopRequested
            words[Field.SIDE_ACTIVITY] = SideActivity.HOST if unit == HOST_UNIT else SideActivity.UNIT
            start_ns = self._start_of(unit)
            if start_ns:
                return start_ns
            if received is not None:
                words[Field.UNITS_DECLINED] += 1
                left = words[Field.PERMIT_UNTIL_NS] - monotonic_ns()
                if words[Field.BUBBLE] & 1 and left > 0:
                    left_ns.append(left)
                self._longest_ns = self._doubt(unit, left_ns)
