"""What audits cost, and may cost."""

import time
from collections.abc import Callable

MOST_COST = 0.006
"""The share of the other work that audits may cost, those of first batches excepted.

It keeps the whole cost below 1%: an audit also leaves colder caches to the steps after it, and to ask in each step
whether one is due takes 2 µs, up to 0.3% of the smallest models' steps.
"""


class Budget:
    """What all audits of a side task cost, in CPU time of this process.

    Args:
        clock_ns: the time.

    Attributes:
        spent_ns: on audits.
        first_ns: of that, on first batches.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.process_time_ns) -> None:
        self._clock_ns, self._began_ns = clock_ns, clock_ns()
        self.spent_ns = self.first_ns = 0

    @property
    def all_ns(self) -> int:
        """All CPU time so far."""
        return self._clock_ns() - self._began_ns

    def allows(self, cost_ns: int) -> bool:
        """Whether an audit of this cost, other than of a first batch, keeps within `MOST_COST`."""
        return self.spent_ns - self.first_ns + cost_ns <= MOST_COST * (self.all_ns - self.spent_ns)

    def spend(self, ns: int, *, is_first: bool) -> None:
        """Count an audit."""
        self.spent_ns += ns
        self.first_ns += ns if is_first else 0
