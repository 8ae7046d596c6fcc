"""How long will this bubble be? Steps repeat, so each slot's past tells.

A quantile of the last lengths, of which the latest count most. A low one: a bubble that ends before its forecast makes
an overrun, one that ends after it only wastes its tail.
"""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import NamedTuple

HISTORY = 32
HALF_LIFE = 8
"""A length counts half as much as one so many bubbles later: a slow drift is followed in about so many steps."""
MINIMUM_OBSERVATIONS = 2
SHIFT_AFTER = 3
"""So many lengths in a row beyond all that came before are another level, such as that of another batch size."""
SHIFT_BY = 1.1
"""And by this factor at least, or chance would be taken for a shift."""
LOW, HIGH = 0.1, 0.9
NEXT_FORECASTS = 4

_WEIGHTS = [0.5 ** (age / HALF_LIFE) for age in range(HISTORY)]
_TOTAL_WEIGHTS = [0.0, *accumulate(_WEIGHTS)]


class Forecast(NamedTuple):
    """What is expected of the next bubble of a slot.

    Attributes:
        length_ns: the quantile that was asked for.
        low_ns: nine bubbles of ten were longer, lately.
        high_ns: and nine of ten shorter; the distance tells how sure the forecast is.
        mean_ns: their mean length.
        next_ns: what is expected of a bubble that outlives `length_ns`: the same quantile of those that did; then of
            those that outlived that; and so on.
    """

    length_ns: int
    low_ns: int
    high_ns: int
    mean_ns: int
    next_ns: tuple[int, ...]


class SlotForecast:
    """Bubble lengths per slot, learnt online.

    Args:
        quantile: which quantile of a slot's last 32 lengths is its forecast, 0 (the shortest) to 0.5.
    """

    def __init__(self, quantile: float) -> None:
        later = (1 - (1 - quantile) ** times for times in range(2, 2 + NEXT_FORECASTS))
        self._shares = (quantile, LOW, HIGH, *later)
        self._lengths_ns: dict[int, deque[int]] = {}
        self._forecasts: dict[int, Forecast] = {}

    def observe(self, slot: int, length_ns: int) -> None:
        """A bubble of `slot` has ended."""
        lengths_ns = self._lengths_ns.setdefault(slot, deque(maxlen=HISTORY))
        lengths_ns.append(length_ns)
        if _has_shifted(lengths_ns):
            while len(lengths_ns) > SHIFT_AFTER:
                lengths_ns.popleft()
        if len(lengths_ns) >= MINIMUM_OBSERVATIONS:
            self._forecasts[slot] = self._forecast(lengths_ns)

    def of(self, slot: int) -> Forecast | None:
        """What is expected, or None while too little is known."""
        return self._forecasts.get(slot)

    def length_ns(self, slot: int) -> int | None:
        """The expected length, or None while too little is known."""
        forecast = self._forecasts.get(slot)
        return None if forecast is None else forecast.length_ns

    def forget(self) -> None:
        """Another job: its slots are others."""
        self._lengths_ns.clear()
        self._forecasts.clear()

    def _forecast(self, lengths_ns: deque[int]) -> Forecast:
        ordered = sorted(zip(reversed(lengths_ns), _WEIGHTS, strict=False))
        below = list(accumulate([weight for _, weight in ordered]))  # no loop: it is the daemon's time in a bubble
        total, last = _TOTAL_WEIGHTS[len(ordered)], len(ordered) - 1
        asked, low, high, *later = [ordered[min(bisect_left(below, share * total), last)][0] for share in self._shares]
        mean = sum([length_ns * weight for length_ns, weight in ordered]) / total
        return Forecast(asked, low, high, round(mean), tuple(later))


def _has_shifted(lengths_ns: deque[int]) -> bool:
    if len(lengths_ns) <= SHIFT_AFTER + MINIMUM_OBSERVATIONS:
        return False
    *before, first, second, third = lengths_ns
    latest = (first, second, third)
    return min(latest) > SHIFT_BY * max(before) or SHIFT_BY * max(latest) < min(before)
