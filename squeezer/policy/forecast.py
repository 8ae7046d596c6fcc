"""Forecasts when a slot's bubbles end. Steps repeat, so each slot's past shows its future.

A bubble ends when a peer's message arrives. If the peers keep pace, the time from the end of the bubble before is
always the same, however long our own work took in between. If they do not, the bubble's own length is the better
guide. So ends are counted both ways, and the steadier one is used.

Where a side task can delay a bubble's end, the permit would follow the delay, and the delay the permit. So a bubble
that was opened counts there as no longer than the longest of those that stayed shut.

Later values weigh more, and the forecast is their quantile. Where many ends lie close together, running work would
overrun, so the time around them is left out. Where ends are far apart, avoiding each would waste more than it saves.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate
from operator import mul
from typing import NamedTuple

HISTORY = 32
HALF_LIFE = 8
"""In bubbles: a length counts half as much as one this many bubbles later, so forecasts follow a drift as fast."""
MINIMUM_OBSERVATIONS = 2
REFRESH_EVERY = 4
"""In bubbles. A forecast changes little from one bubble to the next, and takes some of the main job's idle time."""
FEW = 8
"""With fewer observations than this, every one refreshes the forecast."""
CLEARLY = 2.0
"""Ends are counted from the end of the bubble before only if they then vary less by this factor."""
SHIFT_AFTER = 3
"""This many lengths in a row beyond all earlier ones are a new level, as after a change of the batch size."""
SHIFT_BY = 1.1
"""They must lie beyond by this factor, or chance would pass for a shift."""
LOW, HIGH = 0.1, 0.9
SHORTEST_INTERVAL_NS = 500_000
"""A wake-up for less costs as much as it gains."""
MOST_INTERVALS = 4
"""The most per bubble; the longest are kept."""
STALLED = 2
"""No forecast holds for a bubble that lasts this many times longer than any before. Its end may be far away."""
STALE_AFTER = 1024
"""After this many bubbles of a slot that a side task may have prolonged, what was seen before them counts no more."""
LONGEST_NS = 60_000_000_000
"""Longer than any bubble. It must be finite, in case the main job hangs in one."""

_RESCALE_AFTER = 64 * HALF_LIFE
_WEIGHTS = [2.0 ** (number / HALF_LIFE) for number in range(_RESCALE_AFTER)]


class Forecast(NamedTuple):
    """When a slot's next bubble is expected to end: how long after its start, or after the end of the bubble before.

    Attributes:
        length_ns: the quantile that was asked for.
        low_ns: 90% of the latest bubbles took longer.
        high_ns: 90% took less. The closer the two, the surer the forecast.
        mean_ns: their mean.
    """

    length_ns: int
    low_ns: int
    high_ns: int
    mean_ns: int


class _Sample:
    """The last values of one kind, weighted by age.

    A new value gets more weight than its predecessor, so no other weight has to change. This runs for every bubble, in
    the main job's idle time.

    Attributes:
        values: in ascending order.
        number: how many were added since weights were last scaled down.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self._weights: list[float] = []
        self._order: deque[int] = deque()
        self.number = 0

    def add(self, value: int) -> bool:
        """Add the latest value. Returns whether it is the third on a new level; then earlier values are forgotten."""
        if self.number == _RESCALE_AFTER:
            self.number = 0
            self._weights = [weight / 2.0**64 for weight in self._weights]
        if len(self._order) == HISTORY:
            self._forget_first()
        self._order.append(value)
        at = bisect_right(self.values, value)
        self.values.insert(at, value)
        self._weights.insert(at, _WEIGHTS[self.number])
        self.number += 1
        if not self._has_shifted():
            return False
        while len(self._order) > SHIFT_AFTER:
            self._forget_first()
        return True

    def below(self) -> list[float]:
        """Per value, the weight of all smaller ones; last, the weight of all values."""
        return list(accumulate(self._weights, initial=0.0))

    def forecast(self, quantile: float) -> Forecast:
        """What is expected of the next value."""
        values, below, last = self.values, self.below(), len(self.values)
        total = below[-1]
        shares = (quantile, LOW, HIGH)
        asked, low, high = [values[min(bisect_left(below, share * total, 1), last) - 1] for share in shares]
        return Forecast(asked, low, high, round(sum(map(mul, values, self._weights)) / total))

    def _forget_first(self) -> None:
        at = bisect_left(self.values, self._order.popleft())  # of equal ones the first
        del self.values[at], self._weights[at]

    def _has_shifted(self) -> bool:
        values = self.values
        if len(values) <= SHIFT_AFTER + MINIMUM_OBSERVATIONS:
            return False
        # if the latest three are beyond all others, they are the outermost three
        order = self._order
        latest = order[-1], order[-2], order[-3]
        return min(latest) > SHIFT_BY * values[-1 - SHIFT_AFTER] or SHIFT_BY * max(latest) < values[SHIFT_AFTER]


class _Slot:
    """What is known of one slot.

    Attributes:
        lengths: how long its bubbles were.
        ends: when they ended, after the end of the bubble before.
        by_end: whether its intervals count from the end of the bubble before.
        length: the forecast of the next length; None: too little is known.
        end: the same of its end.
    """

    def __init__(self) -> None:
        self.lengths, self.ends = _Sample(), _Sample()
        self._true_ns: deque[int] = deque(maxlen=HISTORY)  # lengths that no side task can have changed
        self._since_true = 0
        self.by_end = False
        self.length: Forecast | None = None
        self.end: Forecast | None = None
        self.intervals: dict[int, list[tuple[int, int]]] = {}

    def believed_ns(self, length_ns: int, *, may_be_late: bool) -> int:
        """As how long a bubble counts. One that is far longer than all that stayed shut is on another level."""
        if not may_be_late:
            self._true_ns.append(length_ns)
            self._since_true = 0
            return length_ns
        self._since_true += 1
        if len(self._true_ns) < FEW or self._since_true > STALE_AFTER:
            return length_ns
        longest_ns = max(self._true_ns)
        return min(length_ns, longest_ns) if length_ns < STALLED * longest_ns else length_ns

    def refresh(self, quantile: float) -> None:
        """Update the forecasts."""
        self.intervals.clear()
        self.length = self.lengths.forecast(quantile)
        if len(self.ends.values) >= FEW:
            self.end = self.ends.forecast(quantile)
            spread_ns = (self.end.high_ns - self.end.low_ns) * (1.0 if self.by_end else CLEARLY)
            self.by_end = spread_ns < self.length.high_ns - self.length.low_ns
        else:
            self.by_end = False


class SlotForecast:
    """When bubbles end, per slot, learnt online.

    Args:
        quantile: of a slot's last 32 bubbles, the forecast; from 0 (the shortest) to 0.5. Also the share of the bubbles
            still open that must end close to one another for that time to be left out.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._slots: dict[int, _Slot] = {}

    def observe(self, slot: int, length_ns: int, gap_ns: int | None = None, *, may_be_late: bool = False) -> None:
        """Take a bubble of `slot` that has ended.

        Args:
            slot: its number.
            length_ns: how long it was.
            gap_ns: how long after the end of the bubble before it began; None: unknown, or irrelevant.
            may_be_late: whether a side task may have delayed its end.
        """
        known = self._slots.get(slot)
        if known is None:
            known = self._slots[slot] = _Slot()
        length_ns = known.believed_ns(length_ns, may_be_late=may_be_late)
        lengths, ends = known.lengths, known.ends
        has_shifted = lengths.add(length_ns)
        if gap_ns is not None:
            has_shifted = ends.add(gap_ns + length_ns) or has_shifted
        count = len(lengths.values)
        is_due = (lengths.number + slot) % REFRESH_EVERY == 0  # not for all slots in the same step
        if count >= MINIMUM_OBSERVATIONS and (is_due or has_shifted or count < FEW):
            known.refresh(self._quantile)

    def of(self, slot: int, gap_ns: int | None = None) -> Forecast | None:
        """What is expected of the next bubble of `slot`; None: too little is known.

        Args:
            slot: its number.
            gap_ns: how long after the end of the bubble before it has begun; None: unknown.
        """
        known = self._slots.get(slot)
        if known is None or known.length is None:
            return None
        if gap_ns is None or not known.by_end or known.end is None:
            return known.length
        return Forecast(*[max(0, each_ns - gap_ns) for each_ns in known.end])

    def length_ns(self, slot: int) -> int | None:
        """The expected length; None: too little is known."""
        forecast = self.of(slot)
        return None if forecast is None else forecast.length_ns

    def end(self, slot: int) -> Forecast | None:
        """When it is expected to end, after the end of the bubble before; None: its length is as good a guide."""
        known = self._slots.get(slot)
        return known.end if known is not None and known.by_end else None

    def intervals_ns(self, slot: int, margin_ns: int) -> list[tuple[int, int]]:
        """When work may run in a bubble of `slot`, because no end is near: (from, until) in ns, in order.

        Times count from the bubble's start, or from the end of the bubble before if there is an `end`.

        Work stops `margin_ns` before an end near which many bubbles end: within `margin_ns` of it, at least a share
        `quantile` of those still open. The last end always counts. If ends are just as frequent back to the one before,
        the time between is left out as well. The last interval is for a bubble far longer than any before.

        Args:
            slot: its number.
            margin_ns: how long before an end work must stop; not below 0.

        Returns:
            At most five, or four if none begins with the bubble; none if too little is known or the slot's bubbles are
            too short.
        """
        known = self._slots.get(slot)
        if known is None or known.length is None:
            return []
        intervals_ns = known.intervals.get(margin_ns)
        if intervals_ns is None:
            sample, gap_ns = known.lengths, 0
            if known.by_end and known.end is not None:
                sample, gap_ns = known.ends, known.end.mean_ns - known.length.mean_ns
            intervals_ns = known.intervals[margin_ns] = self._intervals_ns(sample, margin_ns, gap_ns)
        return intervals_ns

    def forget(self) -> None:
        """Another job begins, with other slots."""
        self._slots.clear()

    def _intervals_ns(self, sample: _Sample, margin_ns: int, gap_ns: int) -> list[tuple[int, int]]:
        """The intervals, if the bubble usually begins `gap_ns` after what they count from."""
        values, below = sample.values, sample.below()
        found, from_ns, last_ns, total = [], 0, 0, below[-1]
        for index, value in enumerate(values):
            until_ns = value - margin_ns
            before = below[bisect_left(values, until_ns)]
            near = below[bisect_right(values, value + margin_ns)] - before
            if near >= self._quantile * (total - before):
                left = len(values) - index
                if index and 2 * margin_ns >= self._quantile * left * (value - last_ns):
                    until_ns = min(until_ns, last_ns)
                if until_ns - max(from_ns, gap_ns) >= SHORTEST_INTERVAL_NS:
                    found.append((from_ns, until_ns))
                from_ns = value
            last_ns = value
        if not found:
            return []
        longest = sorted(found, key=lambda each: each[1] - max(each[0], gap_ns))[-MOST_INTERVALS:]
        if min(longest)[0]:  # none is the permit, so all are renewals, of which a slot has four
            longest = longest[1 - MOST_INTERVALS :]
        return [*sorted(longest), (STALLED * values[-1], LONGEST_NS)]
