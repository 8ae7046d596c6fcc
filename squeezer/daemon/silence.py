"""How long a main job has been silent."""

AGAIN_NS = 1_000_000_000
"""After the first notice of a silence, it is noticed again this often."""


class Silence:
    """Counts from the last message. The caller reads the clock."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._noticed_ns = 0

    def broken(self, now_ns: int) -> None:
        """A message has come."""
        self._since_ns, self._noticed_ns = now_ns, 0

    def noticed(self, now_ns: int) -> None:
        """Its length has been noticed."""
        self._noticed_ns = now_ns

    def left_s(self, patience_ns: int, now_ns: int) -> float:
        """How long until it is to be noticed; 0: now."""
        if self._since_ns is None:
            self._since_ns = now_ns
        until_ns = self._noticed_ns + AGAIN_NS if self._noticed_ns else self._since_ns + patience_ns
        return max(0, until_ns - now_ns) / 1e9
