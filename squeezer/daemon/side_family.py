"""The processes that a side task has started, such as data-loading workers: found, and given idle time only.

Those that it has forked have done that themselves, and are named on the page. Here are the others: started anew by a
`spawn` or a `forkserver`, as programs, or in a session of their own.
"""

from contextlib import suppress

import psutil

from ds_hooks.shared.page import WORKER_WORDS, Field
from squeezer.device import SideProcess, run_when_idle

SOONEST_NS = 1_000_000_000
LATEST_NS = 64_000_000_000
"""To look costs milliseconds, for all processes of the machine: where nothing is new, twice as long passes."""


class SideFamily:
    """The processes of one side task.

    Args:
        words: the page's.
    """

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        self.clear()

    def clear(self) -> None:
        """There is no side task."""
        words = self._words
        words[Field.SIDE_CHILDREN] = words[Field.SIDE_FORKS] = words[Field.SEARCH_PROCESS] = 0
        for index in range(WORKER_WORDS):
            words[Field.WORKERS + index] = words[Field.FOUND_WORKERS + index] = 0
        self._forks = 0
        self._known: set[int] = set()
        self._interval_ns = SOONEST_NS
        self._due_ns = 0

    def look(self, side: SideProcess, now_ns: int) -> None:
        """Look for new ones, if it is time."""
        words = self._words
        forks = words[Field.SIDE_FORKS]
        if now_ns < self._due_ns and forks == self._forks:
            return
        found = _descendants(side.pid, but=words[Field.SEARCH_PROCESS])
        for pid in found - self._known:
            run_when_idle(pid)
        self._interval_ns = SOONEST_NS if found - self._known else min(2 * self._interval_ns, LATEST_NS)
        self._due_ns = now_ns + self._interval_ns
        self._forks, self._known = forks, found
        forked = {words[Field.WORKERS + index] for index in range(WORKER_WORDS)}
        self._name(found - forked)

    def _name(self, pids: set[int]) -> None:
        """Name them on the page, each in the word that it had."""
        words = self._words
        places = range(Field.FOUND_WORKERS, Field.FOUND_WORKERS + WORKER_WORDS)
        for index in places:
            if words[index] not in pids:
                words[index] = 0
        free = [index for index in places if not words[index]]
        named = {words[index] for index in places}
        for index, pid in zip(free, sorted(pids - named), strict=False):
            words[index] = pid


def _descendants(pid: int, but: int) -> set[int]:
    """All descendants of process `pid`, without `but` and its own."""
    found: set[int] = set()
    with suppress(psutil.Error):  # it has ended: the loop sees that by its pidfd
        for child in psutil.Process(pid).children():
            if child.pid != but:
                found.add(child.pid)
                with suppress(psutil.Error):
                    found |= {each.pid for each in child.children(recursive=True)}
    return found
