"""What audits cost, and may cost."""

import math
import time
from collections.abc import Callable

MOST_COST = 0.006
"""The share of the other work that audits may cost, those of first batches excepted.

It keeps the whole cost below 1%: an audit also leaves colder caches to the steps after it.
"""

ASKING_NS, READING_NS = 2_000, 10_000
"""What it takes to ask whether an audit is due: mainly to name the batch's kind; and to read the CPU clock. Behind a
step, with cold caches, reading takes ten times as long as in a loop: 1% of the smallest models' steps."""

READING_SHARE, MOST_UNREAD = 0.1, 64
"""Reading the clock may take at most a tenth of what audits may cost, so it is read seldom, but at the latest when
asked this many times."""


class Budget:
    """What all audits of a side task cost, in CPU time of this process, the asking for them included.

    Args:
        clock_ns: the time.
        asking_ns: what each asking takes, the clock excepted.
        reading_ns: what it takes to read the clock.

    Attributes:
        spent_ns: on audits.
        first_ns: of that, on first batches.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.process_time_ns,
        *,
        asking_ns: int = ASKING_NS,
        reading_ns: int = READING_NS,
    ) -> None:
        self._clock_ns, self._began_ns = clock_ns, clock_ns()
        self._asking_ns, self._reading_ns = asking_ns, reading_ns
        self.spent_ns = self.first_ns = 0
        self._unread = self._read_at = 0
        self._read_ns = 0

    @property
    def all_ns(self) -> int:
        """All CPU time so far."""
        return self._clock_ns() - self._began_ns

    def allows(self, cost_ns: int) -> bool:
        """Whether an audit of this cost, other than of a first batch, is sure to keep within `MOST_COST`."""
        self.spent_ns += self._asking_ns
        self._unread += 1
        if self._unread < self._read_at:
            return False
        self.spent_ns += self._reading_ns
        all_ns = self.all_ns
        since_ns = max(1, all_ns - self._read_ns)
        seldom = math.ceil(self._unread * self._reading_ns / (READING_SHARE * MOST_COST * since_ns))
        self._unread, self._read_at, self._read_ns = 0, min(seldom, MOST_UNREAD), all_ns
        return self.spent_ns - self.first_ns + cost_ns <= MOST_COST * (all_ns - self.spent_ns)

    def spend(self, ns: int, *, is_first: bool) -> None:
        """Count an audit."""
        self.spent_ns += ns
        self.first_ns += ns if is_first else 0
