"""CPU time of a side task's processes that the main job's hooks have not seen, by their control group.

The hooks read the clocks of the processes that the page names, at each bubble's start and end. The group counts all of
them: also those that ended before they were found, and those for which the page has no room.
"""

from squeezer.daemon.correlator import Correlator


class UncountedTime:
    """Compares both from when a side task is ready, whenever the daemon has heard of bubbles.

    The hooks' last words are a bubble or so old. That error does not grow.

    Args:
        correlator: knows what the hooks have counted.
    """

    def __init__(self, correlator: Correlator) -> None:
        self._correlator = correlator
        self._begun: tuple[int, int] | None = None
        self._last = (0, 0)

    def begin(self) -> None:
        """The side task is ready: what its start has used does not count."""
        self._begun = None

    def look(self, cpu_ns: int | None) -> None:
        """Compare with the group's CPU time; None: the group is gone."""
        counted_ns = self._correlator.counted_ns
        if cpu_ns is None or counted_ns == self._last[1]:
            return  # the main job has said nothing since
        self._last = cpu_ns, counted_ns
        if self._begun is None:
            self._begun = self._last

    def take(self) -> dict[str, float | None]:
        """What a record says of a process that has ended."""
        begun, self._begun = self._begun, None
        if begun is None:
            return {"group_cpu_ms": None, "uncounted_ms": None}
        cpu_ns, counted_ns = (now - before for now, before in zip(self._last, begun, strict=True))
        return {"group_cpu_ms": cpu_ns / 1e6, "uncounted_ms": max(0, cpu_ns - counted_ns) / 1e6}
