"""How long a main job has been silent, and how long it may be."""

AGAIN_NS = 1_000_000_000
"""After the first notice of a silence, it is noticed again this often."""
NO_REMEDY = 1.2
"""What is done about a silence ends it soon if it was the remedy. One that lasts this many times as long as it was
borne is the job's own way: an evaluation, say, or a busy machine. A shorter one may be either, and is taken for the
job's own once: should the next end by itself, it is."""
LONGER = 1.5
"""The next silences are borne this many times as long as such a one, ..."""
LONGEST_NS = 60_000_000_000
"""... but for this reason no longer than this."""


class Silence:
    """Counts from the last message of one main job. The caller reads the clock."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._noticed_ns = self._borne_ns = 0
        self._usual_ns = 0
        """How long its own silences are to be borne."""
        self._has_doubted = False  # whether one has been taken for its own that a remedy may have ended

    def broken(self, now_ns: int) -> None:
        """A message has come."""
        if self._noticed_ns and self._since_ns is not None:
            length_ns = now_ns - self._since_ns
            is_its_own = length_ns > NO_REMEDY * self._borne_ns
            if is_its_own or not self._has_doubted:
                self._has_doubted = self._has_doubted or not is_its_own
                self._usual_ns = max(self._usual_ns, min(int(LONGER * length_ns), LONGEST_NS))
        self._since_ns, self._noticed_ns = now_ns, 0

    def noticed(self, now_ns: int) -> None:
        """Its length has been noticed."""
        if not self._noticed_ns and self._since_ns is not None:
            self._borne_ns = now_ns - self._since_ns
        self._noticed_ns = now_ns

    def left_s(self, patience_ns: int, now_ns: int) -> float:
        """How long until it is to be noticed; 0: now."""
        if self._since_ns is None:
            self._since_ns = now_ns
        borne_ns = max(patience_ns, self._usual_ns)
        until_ns = self._noticed_ns + AGAIN_NS if self._noticed_ns else self._since_ns + borne_ns
        return max(0, until_ns - now_ns) / 1e9
