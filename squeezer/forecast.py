"""How long will this bubble be, and when in it is its end near? Steps repeat, so each slot's past tells.

Of the last lengths the latest count most. Their quantile is the forecast. Where ends lie close together, something that
still runs then makes an overrun, so their neighbourhood is left out; where they are far between, to wait for each of
them would waste more than it saves.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate
from operator import mul
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
SHORTEST_WINDOW_NS = 500_000
"""For less, waking up again costs as much as it gives."""
MOST_WINDOWS = 4
"""Of a bubble; the longest ones."""
STALLED = 2
"""What lasts so many times as long as any bubble before has no forecast, and its end may be far."""
LONGEST_NS = 60_000_000_000
"""Longer than any bubble; an end must be, in case the main job hangs in one."""

_RESCALE_AFTER = 64 * HALF_LIFE
_WEIGHTS = [2.0 ** (number / HALF_LIFE) for number in range(_RESCALE_AFTER)]


class Forecast(NamedTuple):
    """What is expected of the next bubble of a slot.

    Attributes:
        length_ns: the quantile that was asked for.
        low_ns: nine bubbles of ten were longer, lately.
        high_ns: and nine of ten shorter; the distance tells how sure the forecast is.
        mean_ns: their mean length.
    """

    length_ns: int
    low_ns: int
    high_ns: int
    mean_ns: int


class _Sample:
    """The last values of one kind, in ascending order, each with a weight that tells how late it came.

    A new value's weight is more than its predecessor's, so that no other one changes: this is done for every bubble,
    in the main job's own idle time.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self._weights: list[float] = []
        self._order: deque[int] = deque()
        self._number = 0

    def add(self, value: int) -> None:
        """The latest one; if it is the third on another level, what was before is forgotten."""
        if self._number == _RESCALE_AFTER:
            self._number = 0
            self._weights = [weight / 2.0**64 for weight in self._weights]
        if len(self._order) == HISTORY:
            self._forget_first()
        self._order.append(value)
        at = bisect_right(self.values, value)
        self.values.insert(at, value)
        self._weights.insert(at, _WEIGHTS[self._number])
        self._number += 1
        if self._has_shifted():
            while len(self._order) > SHIFT_AFTER:
                self._forget_first()

    def below(self) -> list[float]:
        """The weight of all that come before, per value, and of all."""
        return list(accumulate(self._weights, initial=0.0))

    def quantiles(self, shares: tuple[float, ...], below: list[float]) -> list[int]:
        """The values that so much of the weight does not exceed; `below` is of this sample."""
        values, total, last = self.values, below[-1], len(self.values)
        return [values[min(bisect_left(below, share * total, 1), last) - 1] for share in shares]

    def mean(self, below: list[float]) -> int:
        """By the weights; `below` is of this sample."""
        return round(sum(map(mul, self.values, self._weights)) / below[-1])

    def _forget_first(self) -> None:
        at = bisect_left(self.values, self._order.popleft())  # of equal ones the first
        del self.values[at], self._weights[at]

    def _has_shifted(self) -> bool:
        values = self.values
        if len(values) <= SHIFT_AFTER + MINIMUM_OBSERVATIONS:
            return False
        # beyond all others: then they are the outermost three
        order = self._order
        latest = order[-1], order[-2], order[-3]
        return min(latest) > SHIFT_BY * values[-1 - SHIFT_AFTER] or SHIFT_BY * max(latest) < values[SHIFT_AFTER]


class SlotForecast:
    """Bubble lengths per slot, learnt online.

    Args:
        quantile: which quantile of a slot's last 32 lengths is its forecast, 0 (the shortest) to 0.5; and of bubbles
            that are still open, the share that must end close to one another for that time to be left out.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._samples: dict[int, _Sample] = {}
        self._forecasts: dict[int, Forecast] = {}

    def observe(self, slot: int, length_ns: int) -> None:
        """A bubble of `slot` has ended."""
        sample = self._samples.get(slot)
        if sample is None:
            sample = self._samples[slot] = _Sample()
        sample.add(length_ns)
        if len(sample.values) >= MINIMUM_OBSERVATIONS:
            below = sample.below()
            asked, low, high = sample.quantiles((self._quantile, LOW, HIGH), below)
            self._forecasts[slot] = Forecast(asked, low, high, sample.mean(below))

    def of(self, slot: int) -> Forecast | None:
        """What is expected, or None while too little is known."""
        return self._forecasts.get(slot)

    def length_ns(self, slot: int) -> int | None:
        """The expected length, or None while too little is known."""
        forecast = self._forecasts.get(slot)
        return None if forecast is None else forecast.length_ns

    def windows_ns(self, slot: int, margin_ns: int) -> list[tuple[int, int]]:
        """When in a bubble of `slot` its end is not near: (from, until) in ns after its start, in order.

        An end is kept clear of, from `margin_ns` before it, if of the bubbles that are open then a share of `quantile`
        or more end no later than `margin_ns` after it. So the last end always is. If ends are as frequent since the
        one before it, that time is left out, too. A last window begins where a bubble is longer by far than all that
        were.

        Args:
            slot: its number.
            margin_ns: how long before an end nothing may run any more; not below 0.

        Returns:
            At most five, or four if none begins with the bubble; none if too little is known, or the slot's bubbles are
            too short for any.
        """
        if slot not in self._forecasts:
            return []
        lengths_ns, below = self._samples[slot].values, self._samples[slot].below()
        found, from_ns, last_ns, total = [], 0, 0, below[-1]
        for index, length_ns in enumerate(lengths_ns):
            until_ns = length_ns - margin_ns
            before = below[bisect_left(lengths_ns, until_ns)]
            near = below[bisect_right(lengths_ns, length_ns + margin_ns)] - before
            if near >= self._quantile * (total - before):
                left = len(lengths_ns) - index
                if index and 2 * margin_ns >= self._quantile * left * (length_ns - last_ns):
                    until_ns = min(until_ns, last_ns)
                if until_ns - from_ns >= SHORTEST_WINDOW_NS:
                    found.append((from_ns, until_ns))
                from_ns = length_ns
            last_ns = length_ns
        if not found:
            return []
        longest = sorted(found, key=lambda window: window[1] - window[0])[-MOST_WINDOWS:]
        if min(longest)[0]:  # none is the permit, so all are renewals, of which a slot has four
            longest = longest[1 - MOST_WINDOWS :]
        return [*sorted(longest), (STALLED * lengths_ns[-1], LONGEST_NS)]

    def forget(self) -> None:
        """Another job: its slots are others."""
        self._samples.clear()
        self._forecasts.clear()
