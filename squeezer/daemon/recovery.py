"""After a death that leaves the device unusable for a while: whose fault the next failure is, and when to try again.

An MPS server that lost a client with work outstanding clears up first, and refuses new clients meanwhile. A side task
that starts then fails although its study is sound. This is not told from other failures to start, so every one within
`LASTS_NS` is excused; after that they count again, so a study that never starts is still given up.
"""

LASTS_NS = 60_000_000_000
FIRST_PAUSE_NS = 1_000_000_000
"""Between two tries; each time twice as long."""


class Recovery:
    """The recoveries of one device."""

    def __init__(self) -> None:
        self._until_ns = 0
        self._pause_ns = 0
        self._next_ns = 0

    def died(self, was_ready: bool, now_ns: int) -> bool:
        """A process that used the device ended by a signal or an error.

        Args:
            was_ready: whether it had started.
            now_ns: the time.

        Returns:
            Whether that is excused.
        """
        excused = not was_ready and now_ns < self._until_ns
        if not excused:
            self.begin(now_ns)
        self.pause(now_ns)
        return excused

    def begin(self, now_ns: int) -> None:
        """The device may be unusable from now on."""
        self._until_ns, self._pause_ns = now_ns + LASTS_NS, FIRST_PAUSE_NS // 2

    def lasts(self, now_ns: int) -> bool:
        """Whether the device may still be recovering."""
        return now_ns < self._until_ns

    def pause(self, now_ns: int) -> None:
        """The next try has to wait, for twice as long as before."""
        self._pause_ns *= 2
        self._next_ns = now_ns + self._pause_ns

    def is_too_early(self, now_ns: int) -> bool:
        """Whether the next try has to wait."""
        return now_ns < self._next_ns
