"""Bubbles that the main job's device opens and closes, as seen by a host that looks now and then."""

from collections import deque
from collections.abc import Callable

from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field
from ds_hooks.shared.page.memory_order import light_fence
from ds_hooks.shared.page.plan import find_renewal, next_permit_ns

_CLOSINGS_KEPT = 8
_LONGEST_PERMIT_NS = 2**36
_LONGEST_OPENED_NS = 2**32 - 1
"""The device writes no longer permit than fits into half a word."""


class BubbleWatch:
    """Follows the page's words.

    Attributes:
        bubble: the bubble word as it was last seen.
        closings: (time, slot) of the last bubbles that were seen to end; time in ns of the host's clock.
        ahead: whether work may be queued for the next bubble of the plan before it begins.
    """

    def __init__(self, words: "memoryview[int]", clock_ns: Callable[[], int]) -> None:
        self._words, self._clock_ns = words, clock_ns
        self.bubble = words[Field.BUBBLE]
        self.closings: deque[tuple[int, int]] = deque(maxlen=_CLOSINGS_KEPT)
        self.ahead = True
        self._slot = 0
        self._looked_ns = self._stirred_ns = clock_ns()
        self._begin_ns = self._looked_ns - _LONGEST_PERMIT_NS  # its age is unknown

    def look(self) -> bool:
        """Read the words. Returns whether a bubble has begun since the last look, which then counts as its begin."""
        words, looked_ns = self._words, self._clock_ns()
        bubble = words[Field.BUBBLE]
        light_fence()
        if self._is_left_alone():
            bubble &= ~1
        has_begun = False
        if bubble != self.bubble:
            if self.bubble & 1:
                self.closings.append((looked_ns, self._slot))
            if bubble & 1:
                self._begin_ns, self._slot, has_begun = self._looked_ns, words[Field.SLOT], True
            self.bubble = bubble
            self._stirred_ns = looked_ns
        self._looked_ns = looked_ns
        self._show_left()
        return has_begun

    def _show_left(self) -> None:
        """Write how much of the permit is left, for the units that the device has been given.

        Between bubbles every unit passes this word, and waits for the gate. So a unit that comes late, because the one
        before it took longer than forecast, waits for the next bubble.
        """
        words = self._words
        if words[Field.DEVICE_GATE] == DeviceGate.FORCED:
            left = DeviceGate.FORCED
        elif self.is_open:
            left = max(0, min(self.left_ns(0) // 1000, DeviceGate.ANY))
        elif self._is_left_alone():
            left = 0
        else:
            left = DeviceGate.ANY
        words[Field.PERMIT_LEFT] = left

    def _is_left_alone(self) -> bool:
        """Whether the main job's clock has left the page: then nobody may be there who would ever shut the word."""
        return self._words[Field.CLOCK_KIND] == ClockKind.CPU

    def stir(self) -> None:
        """Note another sign of life of the main job."""
        self._stirred_ns = self._clock_ns()

    @property
    def quiet_ns(self) -> int:
        """The time since the last sign of life of the main job."""
        return self._looked_ns - self._stirred_ns

    @property
    def is_open(self) -> bool:
        """Whether a bubble was open at the last look."""
        return bool(self.bubble & 1)

    @property
    def may_run(self) -> bool:
        """Whether the device let a unit through at the last look."""
        words = self._words
        return words[Field.DEVICE_GATE] == DeviceGate.FORCED or (self.is_open and words[Field.PERMIT_LEFT] > 0)

    @property
    def is_due(self) -> bool:
        """Whether the plan opens another bubble, which has not begun."""
        return not self.is_open and self._next_ns() > 0

    def planned_ns(self) -> int:
        """The planned length of the open bubble, without renewals; if none is open, of the next."""
        return self._words[Field.PERMIT_LENGTH_NS] if self.is_open else self._next_ns()

    def _next_ns(self) -> int:
        """The permit of the next bubble of the plan."""
        planned_ns = next_permit_ns(self._words, self._words[Field.STEP], self._words[Field.SLOT])
        return min(planned_ns, _LONGEST_OPENED_NS)

    def left_ns(self, needs_ns: float) -> int:
        """How long work that is queued now may run in the open bubble or, if none is open, in the next.

        Args:
            needs_ns: how long it takes. If the permit leaves less, a renewal that leaves enough counts.
        """
        words = self._words
        if words[Field.DEVICE_GATE] == DeviceGate.FORCED or self._is_left_alone():
            return 0  # queued work gets through; then the process ends, or is saved
        if self.is_open:
            elapsed_ns, permit_ns = self._clock_ns() - self._begin_ns, words[Field.PERMIT_LENGTH_NS]
            left_ns = permit_ns - elapsed_ns
            if permit_ns and left_ns < needs_ns:
                from_ns, until_ns = find_renewal(words, self._slot, elapsed_ns, needs_ns) or (elapsed_ns, 0)
                if from_ns <= elapsed_ns:
                    left_ns = max(left_ns, until_ns - elapsed_ns)
            light_fence()
            return left_ns if words[Field.BUBBLE] == self.bubble else 0
        return self._next_ns() if self.ahead and self.is_due else 0
