"""What the host of a side task knows of bubbles that the main job's device opens and closes: it looks now and then."""

from collections import deque
from collections.abc import Callable

from ds_hooks.shared.page import DeviceGate, Field
from ds_hooks.shared.plan import find_renewal

_CLOSINGS_KEPT = 8
_LONGEST_PERMIT_NS = 2**36


class BubbleWatch:
    """Follows the page's words.

    Attributes:
        bubble: the bubble word as it was last seen.
        closings: (when, slot) of the last bubbles that were seen to have ended.
        ahead: whether a bubble counts that is due, but has not begun.
    """

    def __init__(self, words: "memoryview[int]", clock_ns: Callable[[], int]) -> None:
        self._words, self._clock_ns = words, clock_ns
        self.bubble = words[Field.BUBBLE]
        self.closings: deque[tuple[int, int]] = deque(maxlen=_CLOSINGS_KEPT)
        self.ahead = True
        self._slot = 0
        self._looked_ns = self._stirred_ns = clock_ns()
        self._begin_ns = self._looked_ns - _LONGEST_PERMIT_NS  # nobody knows how old it is

    def look(self) -> bool:
        """See whether a bubble is open. Whether one has begun since the last look, which is when at the earliest."""
        words, looked_ns = self._words, self._clock_ns()
        bubble = words[Field.BUBBLE]
        has_begun = False
        if bubble != self.bubble:
            if self.bubble & 1:
                self.closings.append((looked_ns, self._slot))
            if bubble & 1:
                self._begin_ns, self._slot, has_begun = self._looked_ns, words[Field.SLOT], True
            self.bubble = bubble
            self._stirred_ns = looked_ns
        self._looked_ns = looked_ns
        return has_begun

    def stir(self) -> None:
        """The main job has given another sign of itself."""
        self._stirred_ns = self._clock_ns()

    @property
    def quiet_ns(self) -> int:
        """How long there has been no sign of the main job."""
        return self._looked_ns - self._stirred_ns

    @property
    def is_open(self) -> bool:
        """Whether a bubble was open when it was last looked at."""
        return bool(self.bubble & 1)

    @property
    def is_due(self) -> bool:
        """Whether the next bubble is known, and has not begun."""
        return self.ahead and self._words[Field.DUE_EPOCH] > self.bubble >> 1

    def planned_ns(self) -> int:
        """What the open bubble was planned for, renewals aside, or else the one that is due."""
        return self._words[Field.PERMIT_LENGTH_NS if self.is_open else Field.DUE_PERMIT_NS]

    def left_ns(self, needs_ns: float) -> int:
        """How long what is queued now may run in this bubble, or else in the one that is due.

        Args:
            needs_ns: how long it takes: if the permit is over, a renewal that is long enough counts.
        """
        words = self._words
        if words[Field.DEVICE_GATE] == DeviceGate.FORCED:
            return 0  # what was queued gets through; the process ends, or is saved
        if self.is_open:
            elapsed_ns, permit_ns = self._clock_ns() - self._begin_ns, words[Field.PERMIT_LENGTH_NS]
            left_ns = permit_ns - elapsed_ns
            if permit_ns and left_ns < needs_ns:
                from_ns, until_ns = find_renewal(words, self._slot, elapsed_ns, needs_ns) or (elapsed_ns, 0)
                if from_ns <= elapsed_ns:
                    left_ns = max(left_ns, until_ns - elapsed_ns)
            return left_ns if words[Field.BUBBLE] == self.bubble else 0
        return words[Field.DUE_PERMIT_NS] if self.is_due else 0
