"""One line every ten seconds, for the whole job: how well rank 0 uses its bubbles."""

from ds_hooks.shared.statuses import Progress

EVERY_NS = 10_000_000_000


class ProgressLine:
    """Compares now with ten seconds ago. Only rank 0 shows its line, so a job has one however many ranks it has."""

    def __init__(self) -> None:
        self._last_ns = 0
        self._last_bubble_ns = self._last_busy_ns = 0

    def line(self, step: int, bubble_ns: int, busy_ns: int, progress: Progress | None, now_ns: int) -> str | None:
        """The line, or None while it is too early for the next one.

        Args:
            step: the main job's.
            bubble_ns: all bubbles so far.
            busy_ns: all the side task's device time so far.
            progress: what the side task reported last; None: nothing yet.
            now_ns: the present time.
        """
        if now_ns < self._last_ns + EVERY_NS:
            return None
        text = None
        if self._last_ns:
            new_bubble_ns = max(1, bubble_ns - self._last_bubble_ns)
            text = f"step {step}: idle {new_bubble_ns / (now_ns - self._last_ns):.0%} of the time"
            if progress is not None:
                busy = (busy_ns - self._last_busy_ns) / new_bubble_ns
                text += f", {busy:.0%} of it used; {progress.trials_running} trials running"
        self._last_ns, self._last_bubble_ns, self._last_busy_ns = now_ns, bubble_ns, busy_ns
        return text
