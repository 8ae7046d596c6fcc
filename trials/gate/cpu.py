"""The gate of a side task on a CPU. It sleeps in the kernel until the main job wakes it, and never polls."""

import os
import signal
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns, process_time_ns, thread_time_ns

from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import Field, SideActivity
from ds_hooks.shared.page.memory_order import full_fence, light_fence
from ds_hooks.shared.page.plan import find_renewal
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.side_clock import SideClock
from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.gate.base import GATE_SIGNALS, HOST_UNIT, StopRequested, block_signals
from trials.gate.process import runs_on_asleep
from trials.gate.unit_costs import DECLINED_BEFORE_DOUBT, LEAST_COST_NS, LOOK_AGAIN_S, UNKNOWN_COST_NEEDS_NS, UnitCosts
from trials.gate.unit_records import UnitRecords

GRAIN_NS = 1_000_000
"""Consecutive units that are forecast to take at most this long together are a burst, measured and recorded as one.
Each unit still asks; but reading the thread's clock and accounting for it are most of the cost of asking."""

PREEMPTIVE_GRAIN_NS = 20_000_000
"""The same where a unit may be stopped in the middle. No forecast needs to be exact there, so the units of a burst only
check that a bubble is open."""

BURSTS_PER_LESSON = 16
"""Where a unit may be stopped, host work joins bursts too. One burst in this many leaves it out, and so
learns what the units alone take."""

AS_FORECAST = (0.9, 1.02)
"""A burst whose time over its forecast lies in this range changes no forecast."""

ACCOUNT_EVERY_NS = 20_000_000
"""Account for units once they have taken this much CPU time together: that code runs seldom, so it is cold and slow."""

OTHERS_RUN_NS = 1_000_000
"""If further threads have used more than this while the one that asks slept, they run on when it sleeps: those of a
library that prefetches, say, which Python does not know."""

FINISHES_S = 5.0
"""How long work in progress may take when it is asked to end; while a main job lives, in bubbles only."""


class CpuGate(UnitCosts):
    """Opens and closes with the words of the shared page.

    An open gate costs a few memory reads. At a closed gate the process sleeps in the kernel until a signal comes. The
    signals must be blocked before any thread starts (`block_signals`), so that none is lost between the look and the
    sleep.

    A unit starts only if it is forecast to end within the permit or, if the bubble outlives the permit, within a
    renewal. The forecast follows the unit's thread CPU time. It rises fast and falls slowly, so it settles near the 0.9
    expectile. A unit that has waited in vain for many bubbles is tried in one of the longest. If it is longer than that
    bubble, `take_starved` names it.

    The short units of a burst share one record, under a name such as "0.Linear forward … 2.ReLU forward". The time that
    they took together updates all their forecasts.

    Args:
        page: the device's page; the caller has claimed the side task's role.
        records: see `UnitCosts`.
    """

    def __init__(self, page: Page, records: UnitRecords | None = None) -> None:
        super().__init__(page, records)
        self._running: int | None = None
        self._burst: list[int] = []  # the units that joined the running one
        self._room_ns = 0.0
        self._may_be_stopped = False  # the running burst, in its middle, when the bubble ends
        self._host_joins = False  # in the running burst
        self._bursts_begun = 0
        self._ended: list[tuple[int, tuple[int, ...], int, int, int, int]] = []
        self._ended_ns = 0
        self._bursts: dict[tuple[int, int, int], int] = {}  # (group, first, last unit) to its number
        self._bubble = 0
        self._until_ns = 0  # the end of the permit, or of the renewal, in which the running unit began
        self._start_ns = 0
        self._start_cpu_ns = 0
        self._longest_ns = 0  # of the bubbles in which the running unit was declined, if they were too many
        self._parent_pid = os.getppid()
        self._asked_ns = 0  # when it was asked to end
        self._main_job = 0, 0  # the last one seen: its process and when that started; 0: none
        self._note_main_job()
        self._clock = SideClock(page.words)
        self._others_run = False  # see `OTHERS_RUN_NS`

    def use(self, units: Sequence[str], trials: int) -> None:
        """See `UnitCosts.use`. From here on, all is host work.

        Raises:
            StopRequested: the side task must end.
        """
        if self._running is not None:  # else a burst could hold units of both numberings
            self._room_ns = 0.0
            self.enter(HOST_UNIT)
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
            self._burst.append(unit)
            return
        # written before the look: the main job relies on it if it finds the side task asleep at a bubble's end
        words[Field.SIDE_ACTIVITY] = SideActivity.HOST if unit == HOST_UNIT else SideActivity.UNIT
        full_fence()
        cpu_ns = thread_time_ns()
        if self._running is not None:
            self._end_running(monotonic_ns(), cpu_ns)
        start_ns = 0 if self._asked_ns else self._start_of(unit)
        if not start_ns:
            start_ns, cpu_ns = self._pause(unit), thread_time_ns()
        self._running = unit
        self._start_ns, self._start_cpu_ns = start_ns, cpu_ns
        # host work, unknown units and those declined too often are measured by themselves
        own_ns = self._costs_ns[unit]
        if unit == HOST_UNIT or not own_ns or self._longest_ns:
            self._room_ns = 0.0
        else:
            self._may_be_stopped = bool(words[Field.PREEMPTIVE])
            self._room_ns = (PREEMPTIVE_GRAIN_NS if self._may_be_stopped else GRAIN_NS) - own_ns
            self._bursts_begun += 1
            self._host_joins = self._may_be_stopped and bool(self._bursts_begun % BURSTS_PER_LESSON)

    def settle(self) -> None:
        """Return at once: on a CPU, a unit has ended when its call returns."""

    def rest(self) -> None:
        """See `Gate.rest`."""
        if self._running is not None:
            self._end_running(monotonic_ns(), thread_time_ns())
            self._running = None
        self._room_ns = 0.0
        self._words[Field.SIDE_CHILDREN] = self._others_run or runs_on_asleep()
        self._words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP

    def busy_ns(self) -> int:
        """Return the CPU time of this process and of those that it has started, as the main job sees it."""
        return self._clock.now_ns()

    def is_alone(self) -> bool:
        """See `Gate.is_alone`.

        A main job whose hooks have left still computes, as long as its process lives. One that has begun again computes
        before its hooks come; but its daemon waits already for this side task's.
        """
        if self._words[Field.NEXT_DAEMON]:
            return False
        self._note_main_job()
        pid, start = self._main_job
        return not pid or start_time(pid) != start

    def _note_main_job(self) -> None:
        if pid := self._words[Field.MAIN_PID]:
            self._main_job = pid, self._words[Field.MAIN_START]

    def close(self) -> bool:
        """Write what is buffered. Returns whether the page may be unmapped: it may."""
        self.rest()
        self._settle()
        self._records.close()
        return True

    def _start_of(self, unit: int) -> int:
        """The time at which `unit` starts: now, or 0 if it may not start.

        The main job may take the core at any moment here, for any time. The bubble word is the same before and after
        the clock is read, so that time lies within the bubble.
        """
        words = self._words
        bubble = words[Field.BUBBLE]
        light_fence()
        now_ns = monotonic_ns()
        if not bubble & 1:
            return 0
        until_ns = words[Field.PERMIT_UNTIL_NS]
        if now_ns + self._needs_ns(unit) > until_ns:
            from_ns, until_ns = self._renewal(unit, now_ns)
            if not from_ns or from_ns > now_ns:
                return 0
        light_fence()
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
        burst = tuple(self._burst)
        self._ended.append((unit, burst, self._start_ns, now_ns - self._start_ns, cpu_ns, self._longest_ns))
        self._burst.clear()
        self._ended_ns += cpu_ns
        # a unit that was unknown or in doubt may be asked for again at once
        if not self._costs_ns[unit] or self._longest_ns or self._ended_ns >= ACCOUNT_EVERY_NS:
            self._settle()
        self._longest_ns = 0

    def _settle(self) -> None:
        """Learn from what has ended, and record it."""
        if not self._ended:
            return
        units, busy_ns, group = 0, 0, self._group
        for unit, burst, start_ns, wall_ns, cpu_ns, longest_ns in self._ended:
            units += 1 + len(burst)
            busy_ns += cpu_ns
            number = unit
            if burst:
                number = self._learn_burst((unit, *burst), cpu_ns)
            else:
                self._learn(unit, cpu_ns, longest_ns, group)
            self._records.add(start_ns, wall_ns, cpu_ns, number, group)
        self._ended.clear()
        self._ended_ns = 0
        self._count(units, busy_ns)

    def _learn_burst(self, burst: tuple[int, ...], cpu_ns: int) -> int:
        """Learn from what a burst took together. Returns the number under which it is recorded."""
        if HOST_UNIT in burst:
            while burst[-1] == HOST_UNIT:
                burst = burst[:-1]
        else:
            self._share_out(burst, cpu_ns)
        ends = (self._group, burst[0], burst[-1])
        number = self._bursts.get(ends)
        if number is None:
            number = self._bursts[ends] = self._records.add_burst(*ends)
        return number

    def _share_out(self, burst: tuple[int, ...], cpu_ns: int) -> None:
        """Scale the forecasts of a burst's units by what they took together."""
        costs_ns = self._costs_ns
        # the present forecasts: an earlier burst of the same units may have changed them since this one ran
        ratio = cpu_ns / sum([costs_ns[unit] for unit in burst])
        if not AS_FORECAST[0] < ratio < AS_FORECAST[1]:
            factor = 1 + (ratio - 1) * (0.5 if ratio > 1 else 0.05)
            for unit in set(burst):
                costs_ns[unit] = max(LEAST_COST_NS, costs_ns[unit] * factor)

    def _pause(self, unit: int) -> int:
        """Sleep until `unit` may start, and return that time. A wake-up in vain counts as declined.

        One slow run must not keep a unit out for ever. After many bubbles in vain its forecast is dropped, and it is
        tried in one of the longest bubbles. If it is too long for that one too, it is stopped at the bubble's end.
        """
        words = self._words
        block_signals()  # multiprocessing's resource tracker unblocks SIGTERM when it starts
        left_ns: deque[int] = deque(maxlen=DECLINED_BEFORE_DOUBT)
        self._note_main_job()
        while True:
            if self._asked_ns and (not self.finishes or monotonic_ns() > self._asked_ns + FINISHES_S * 1e9):
                self._running = None
                raise StopRequested
            if self._asked_ns and self.is_alone():
                return monotonic_ns()
            words[Field.SIDE_CHILDREN] = self._others_run or runs_on_asleep()
            words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
            full_fence()
            received = None
            # a bubble that began before ASLEEP was written woke no one: look once more
            if not self._start_of(unit):
                now_ns = monotonic_ns()
                from_ns, _ = self._renewal(unit, now_ns)
                wait_s = max(from_ns - now_ns, 0) / 1e9 if from_ns else LOOK_AGAIN_S
                others_ns = process_time_ns() - thread_time_ns()
                received = signal.sigtimedwait(GATE_SIGNALS, min(wait_s, LOOK_AGAIN_S))
                self._others_run |= process_time_ns() - thread_time_ns() - others_ns > OTHERS_RUN_NS
            if os.getppid() != self._parent_pid:
                self._running = None
                raise StopRequested
            if received is not None and received.si_signo == END_SIGNAL:
                self._asked_ns = self._asked_ns or monotonic_ns()
                continue
            words[Field.SIDE_ACTIVITY] = SideActivity.HOST if unit == HOST_UNIT else SideActivity.UNIT
            full_fence()
            start_ns = self._start_of(unit)
            if start_ns:
                return start_ns
            if received is not None:
                words[Field.UNITS_DECLINED] += 1
                left = words[Field.PERMIT_UNTIL_NS] - monotonic_ns()
                if words[Field.BUBBLE] & 1 and left > 0:
                    left_ns.append(left)
                self._longest_ns = self._doubt(unit, left_ns)
