"""One line every ten seconds, for the whole job: how well rank 0 uses its bubbles."""

from collections.abc import Mapping
from typing import Any

EVERY_NS = 10_000_000_000


class ProgressLine:
    """Makes the line. Only rank 0's daemon prints it, so a job has one however many ranks it has."""

    def __init__(self) -> None:
        self.side: Mapping[str, Any] = {}
        """The side task's last "progress" status; empty without a side task."""
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
            text = f"[squeezer] step {step}: rank 0 idle {bubble_ns / (now_ns - self._last_ns):.0%} of the time"
            if self.side:
                busy = (busy_ns - self._last_busy_ns) / bubble_ns
                text += f", {busy:.0%} of it used; {self.side['trials_running']} trials running"
        self._last_ns, self._last_bubble_ns, self._last_busy_ns = now_ns, total_bubble_ns, busy_ns
        return text
