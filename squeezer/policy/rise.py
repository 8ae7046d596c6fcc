"""Notices that squeezed steps have become longer, which may be squeezing's doing. Pure.

This proves nothing: the machine may have become slower, or the job's work more. It only says when to look. So few steps
need be left alone while all stays as it was, and a slowdown that begins late is found all the same.
"""

import math
from collections import deque
from statistics import median_low

from squeezer.policy.slowdown import estimate

LATEST = 4, 24, 80
"""So many steps are compared with those before them: a few for a large rise, more for a small one. With the first two
alone, one of 4% at a noise of 3% was passed over in three of six runs, and then cost five times as much."""
LOOKS = 4
"""So often each of these windows is compared while it fills once. More would cost CPU time, and show little."""
LEAST_BEFORE = 24
MEMORY_STEPS = 256
CLEAR = 4.0
"""In standard errors. Noise alone has one in some 10,000 steps."""
NOTICES, STEPS_PER_NOTICE = 2, 500
"""So many rises may be noticed at once, and one more after so many steps: machines have moods."""
MEDIAN_VARIANCE = math.pi / 2
"""The variance of a median of normal noise ÷ that of the mean."""


class Rise:
    """The lengths of squeezed steps, as they end.

    Args:
        least: a smaller rise does not matter; as a log ratio.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._logs: deque[float] = deque(maxlen=MEMORY_STEPS)
        self._steps = 0
        self._notices = 1.0

    def begin_anew(self) -> None:
        """What follows is not comparable with the steps so far."""
        self._logs.clear()

    def add(self, log: float) -> float:
        """Take one more length, as a logarithm. Returns by how much the latest are longer; 0: not clearly."""
        self._notices = min(NOTICES, self._notices + 1 / STEPS_PER_NOTICE)
        self._logs.append(log)
        self._steps += 1
        due = [count for count in LATEST if not self._steps % (count // LOOKS)]
        rise = max([self._of_latest(count) for count in due]) if self._notices >= 1 else 0.0
        if rise:
            self._notices -= 1
            self._logs.clear()
        return rise

    def _of_latest(self, count: int) -> float:
        """By how much their median exceeds the mean before, if their mean does so, too.

        A median knows no single long step. A mean hardly depends on which of two sorts of steps a window has more of.
        """
        logs = list(self._logs)
        before, latest = logs[:-count], logs[-count:]
        if len(before) < LEAST_BEFORE:
            return 0.0
        usual, middle = sum(before) / len(before), median_low(latest)
        least = min(middle, sum(latest) / count) - usual
        if least <= self._least:
            return 0.0
        error = estimate(before).deviation * math.sqrt(MEDIAN_VARIANCE / count + 1 / len(before))
        return middle - usual if least > CLEAR * error else 0.0
