"""One line every ten seconds about how well the bubbles are used."""

from collections.abc import Mapping
from typing import Any

EVERY_NS = 10_000_000_000


class ProgressLine:
    """Counts what `line` tells.

    Args:
        rank: whose device it is.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.side: Mapping[str, Any] = {}
        self._last_ns = 0
        self._last_bubble_ns = self._last_busy_ns = 0

    def line(self, step: int, total_bubble_ns: int, busy_ns: int, now_ns: int) -> str | None:
        """The line, or None while it is too early for the next one.

        Args:
            step: the main job's.
            total_bubble_ns: all bubbles so far.
            busy_ns: the side task's device time so far.
            now_ns: the present time.
        """
        if now_ns < self._last_ns + EVERY_NS:
            return None
        text = None
        if self._last_ns:
            bubble_ns = max(1, total_bubble_ns - self._last_bubble_ns)
            share = bubble_ns / (now_ns - self._last_ns)
            busy = (busy_ns - self._last_busy_ns) / bubble_ns
            text = (
                f"[squeezer] rank {self._rank}: step {step}, bubbles {share:.0%} of the time, {busy:.0%} of them used"
            )
            if self.side:
                text += f", {self.side['trials_running']} trials running, {self.side['epochs']} epochs trained"
        self._last_ns, self._last_bubble_ns, self._last_busy_ns = now_ns, total_bubble_ns, busy_ns
        return text
