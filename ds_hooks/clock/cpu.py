"""The clock of a CPU: bubbles begin and end by the host's clock.

A blocking gloo receive returns when the data is there, so the moments before and after a wait are the bubble's bounds.
On a CUDA device the same moments would be those of the issue: see `cuda`.
"""

import time
from collections.abc import Callable

from ds_hooks.shared.page.file import Page
from ds_hooks.shared.page.layout import ClockKind, Field
from ds_hooks.shared.page.memory_order import full_fence, light_fence
from ds_hooks.shared.processes.side_clock import SideClock


class CpuClock:
    """Writes the bubble word at once. See `BubbleClock`.

    Args:
        page: the device's page.
        clock_ns: the host's clock.
    """

    kind = ClockKind.CPU
    follows_host = True

    def __init__(self, page: Page, clock_ns: Callable[[], int]) -> None:
        self._words = page.words
        self._clock_ns = clock_ns
        self.epoch = page.words[Field.BUBBLE] >> 1
        self.permit_ns = 0
        self._side_clock = SideClock(page.words)
        page.words[Field.CLOCK_KIND] = self.kind

    def open(self, step: int, slot: int, permit_ns: int, opens_before_ns: int = 0) -> int:
        """See `BubbleClock`. The stamp is the time."""
        words = self._words
        self.epoch += 1
        base_ns = now_ns = self._clock_ns()
        if opens_before_ns:
            base_ns = words[Field.BUBBLE_END_NS]
            gap_ns = now_ns - base_ns
            # 1 ns at least: when the permit is over, a renewal may follow
            permit_ns = max(1, permit_ns - gap_ns) if gap_ns < opens_before_ns else 0
        self.permit_ns = permit_ns
        words[Field.STEP] = step
        words[Field.SLOT] = slot
        words[Field.BUBBLE_START_NS] = now_ns
        words[Field.PLAN_BASE_NS] = base_ns
        words[Field.PERMIT_UNTIL_NS] = now_ns + permit_ns if permit_ns else 0
        light_fence()
        words[Field.BUBBLE] = self.epoch << 1 | 1
        if permit_ns:
            full_fence()  # written before the main job looks whether the side task sleeps
        return now_ns

    def close(self) -> int:
        """See `BubbleClock`. The stamp is the time."""
        words = self._words
        words[Field.BUBBLE] = self.epoch << 1
        # read after the write: a reader that saw the word open looked before this time
        full_fence()
        words[Field.BUBBLE_END_NS] = now_ns = self._clock_ns()
        return now_ns

    def begin_step(self) -> int:
        """See `BubbleClock`. The stamp is the time."""
        return self._clock_ns()

    def end_step(self, step: int) -> None:
        """See `BubbleClock`. Nothing to do."""

    def stamp(self) -> int:
        """See `BubbleClock`. The stamp is the time."""
        return self._clock_ns()

    def time_ns(self, stamp: int) -> int:
        """See `BubbleClock`. Known at once."""
        return stamp

    def side_cpu_ns(self) -> int:
        """See `BubbleClock`."""
        return self._side_clock.now_ns()

    def main_cpu_ns(self) -> int:
        """See `BubbleClock`."""
        return time.process_time_ns()

    def leave(self, *, wait: bool) -> bool:
        """See `BubbleClock`. Nobody else writes, so it never waits."""
        self._words[Field.BUBBLE] &= ~1
        return True
