"""How long will this bubble be? Steps repeat, so each slot's past tells.

A low quantile of the last lengths: a bubble that ends before its forecast makes an overrun, one that ends after it only
wastes its tail.
"""

from collections import deque

HISTORY = 32
MINIMUM_OBSERVATIONS = 2


class SlotForecast:
    """Bubble lengths per slot, learnt online.

    Args:
        quantile: which quantile of a slot's last 32 lengths is its forecast, 0 (the shortest) to 0.5.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._lengths_ns: dict[int, deque[int]] = {}

    def observe(self, slot: int, length_ns: int) -> None:
        """A bubble of `slot` has ended."""
        self._lengths_ns.setdefault(slot, deque(maxlen=HISTORY)).append(length_ns)

    def length_ns(self, slot: int) -> int | None:
        """The forecast, or None while too little is known."""
        lengths_ns = self._lengths_ns.get(slot)
        if lengths_ns is None or len(lengths_ns) < MINIMUM_OBSERVATIONS:
            return None
        ordered = sorted(lengths_ns)
        return ordered[int(self._quantile * (len(ordered) - 1))]

    def forget(self) -> None:
        """Another job: its slots are others."""
        self._lengths_ns.clear()
