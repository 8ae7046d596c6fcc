"""When an instruction's boundary is true: on a CPU the host's clock says it.

Blocking gloo receives return when the data is there, so the moment before and after a wait are the bubble's ends.
On a CUDA device they would be issue times: see `cuda`.
"""

import time
from collections.abc import Callable

from ds_hooks.shared.page import ClockKind, Field
from ds_hooks.shared.page_file import Page

_PROCESS_CPU_CLOCK = 2
"""CPUCLOCK_SCHED of Linux: `~pid << 3 | 2` is the clock of all that the process `pid` has run."""


class CpuClock:
    """Writes the bubble word at the host's own time."""

    def __init__(self, page: Page, clock_ns: Callable[[], int]) -> None:
        self._words = page.words
        self._clock_ns = clock_ns
        self.epoch = page.words[Field.BUBBLE] >> 1
        self.permit_ns = 0
        """Of the bubble that was opened last; 0: it stays shut."""
        page.words[Field.CLOCK_KIND] = ClockKind.CPU

    def open(self, step: int, slot: int, permit_ns: int, opens_before_ns: int = 0) -> int:
        """The device waits from now on, and may be used as `Page.plan_slot` says. Returns the time in ns."""
        words = self._words
        self.epoch += 1
        base_ns = now_ns = self._clock_ns()
        if opens_before_ns:
            base_ns = words[Field.BUBBLE_END_NS]
            gap_ns = now_ns - base_ns
            # at least a moment: if the permit is over, there may be a renewal
            permit_ns = max(1, permit_ns - gap_ns) if gap_ns < opens_before_ns else 0
        self.permit_ns = permit_ns
        words[Field.STEP] = step
        words[Field.SLOT] = slot
        words[Field.BUBBLE_START_NS] = now_ns
        words[Field.PLAN_BASE_NS] = base_ns
        words[Field.PERMIT_UNTIL_NS] = now_ns + permit_ns if permit_ns else 0
        words[Field.BUBBLE] = self.epoch << 1 | 1
        return now_ns

    def close(self) -> int:
        """The wait is over. Returns the time in ns."""
        words = self._words
        words[Field.BUBBLE] = self.epoch << 1
        # read after the write: whoever saw the word open looked before this time
        words[Field.BUBBLE_END_NS] = now_ns = self._clock_ns()
        return now_ns

    def begin_step(self) -> int:
        """A step begins now. Returns the time in ns."""
        return self._clock_ns()

    def stamp(self) -> int:
        """This moment, in ns."""
        return self._clock_ns()

    def time_ns(self, stamp: int) -> int:
        """When that was: a stamp is a time here."""
        return stamp

    def end_step(self, step: int) -> None:
        """Nothing is due then."""

    def leave(self, *, wait: bool) -> bool:
        """Whether nobody writes to the page any more: at once."""
        return True

    def side_cpu_ns(self) -> int:
        """The CPU time that the side task's process has used so far, or 0 without one."""
        pid = self._words[Field.SIDE_PID]
        if not pid:
            return 0
        try:
            return time.clock_gettime_ns(~pid << 3 | _PROCESS_CPU_CLOCK)
        except OSError:
            return 0  # it has ended
