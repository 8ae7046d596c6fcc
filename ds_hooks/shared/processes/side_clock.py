"""The CPU time of a side task and of its own processes, such as data-loading workers.

Hooks and side task both read it, so what one sees and the other reports is the same.
"""

import time

from ds_hooks.shared.page.layout import PROCESS_WORDS, Field

_PROCESS_CPU_CLOCK = 2
"""CPUCLOCK_SCHED of Linux: `~pid << 3 | 2` names the clock of all CPU time of process `pid`."""
_WORDS = range(Field.FORKED_PROCESSES, Field.FOUND_PROCESSES + PROCESS_WORDS)


class SideClock:
    """The clock of one device's side tasks.

    Args:
        words: the page's.
    """

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        self._others_ns = 0
        self._counted_ns: dict[int, int] = {}  # of each own process that runs
        self._ended: dict[int, int] = {}  # by its word

    def now_ns(self) -> int:
        """The CPU time so far; 0: there is no side task."""
        words = self._words
        # from its start, before it opens the page: else all that it has used by then would count in one bubble
        pid = words[Field.SIDE_PROCESS] or words[Field.SIDE_PID]
        if not pid:
            return 0
        own_ns = _cpu_ns(pid)
        if own_ns is None:
            return 0
        if words[Field.SIDE_FORKS] or words[Field.FOUND_PROCESSES]:
            self._count_own_processes()
        return own_ns + self._others_ns

    def _count_own_processes(self) -> None:
        """Add what the side task's own processes have used since the last call. One that was found late begins now."""
        words, counted_ns = self._words, self._counted_ns
        if len(counted_ns) > len(_WORDS):  # others have their words by now
            for pid in counted_ns.keys() - {words[index] for index in _WORDS}:
                del counted_ns[pid]
        for index in _WORDS:
            pid = words[index]
            if not pid or self._ended.get(index) == pid:
                continue
            now_ns = _cpu_ns(pid)
            if now_ns is None:
                self._ended[index] = pid
                counted_ns.pop(pid, None)
                continue
            before_ns = counted_ns.get(pid, now_ns if index >= Field.FOUND_PROCESSES else 0)
            self._others_ns += max(0, now_ns - before_ns)
            counted_ns[pid] = now_ns


def _cpu_ns(pid: int) -> int | None:
    """None: the process has ended."""
    try:
        return time.clock_gettime_ns(~pid << 3 | _PROCESS_CPU_CLOCK)
    except OSError as error:
        if error.errno is None:
            raise  # not the kernel's: a signal handler of the main job's has run here, and says that time is up
        return None
