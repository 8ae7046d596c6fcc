"""Notices that squeezed steps have become longer, which may be squeezing's doing. Pure.

This proves nothing: the machine may have become slower, or the job's work more. It only says when to look. So few steps
need be left alone while all stays as it was, and a slowdown that begins late is found all the same.
"""

import math
from collections import deque
from statistics import fmean, median_low

from squeezer.policy.slowdown import estimate

LATEST = 4, 24, 80
"""So many steps are compared with those before them: a few for a large rise, more for a small one. With the first two
alone, one of 4% at a noise of 3% was passed over in three of six runs, and then cost five times as much."""
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
        self._notices = 1.0

    def begin_anew(self) -> None:
        """What follows is not comparable with the steps so far."""
        self._logs.clear()

    def add(self, log: float) -> float:
        """Take one more length, as a logarithm. Returns by how much the latest are longer; 0: not clearly."""
        self._notices = min(NOTICES, self._notices + 1 / STEPS_PER_NOTICE)
        self._logs.append(log)
        rise = max(map(self._of_latest, LATEST)) if self._notices >= 1 else 0.0
        if rise:
            self._notices -= 1
            self._logs.clear()
        return rise

    def _of_latest(self, count: int) -> float:
        """Their median, less the mean before: neither one long step counts, nor a sort of steps that is often long."""
        logs = list(self._logs)
        before, latest = logs[:-count], logs[-count:]
        rise = median_low(latest) - fmean(before) if len(before) >= LEAST_BEFORE else 0.0
        if rise <= self._least:
            return 0.0
        error = estimate(before).deviation * math.sqrt(MEDIAN_VARIANCE / count + 1 / len(before))
        return rise if rise > CLEAR * error else 0.0
