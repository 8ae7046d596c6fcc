"""The processes that a side task has started, such as data-loading workers: found, and given idle time only.

Those that it has forked have done that themselves, and are named on the page. Here are the others: started anew by a
`spawn` or a `forkserver`, as programs, or in a session of their own. A control group lists them all, and is read
whenever the daemon wakes; without one, all processes of the machine are looked at now and then.

Those that have left the side task's process group are named once more, since only so the main job can stop them.
"""

import os
from contextlib import suppress

import psutil

from ds_hooks.shared.page.layout import PROCESS_WORDS, Field
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.strays import name_strays
from squeezer.daemon.side_processes.control_group import SideGroup
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
        for index in range(PROCESS_WORDS):
            words[Field.FORKED_PROCESSES + index] = words[Field.FOUND_PROCESSES + index] = 0
        name_strays(words, {})
        self._forks = 0
        self._forked: set[int] = set()
        self._known: dict[int, int] = {}  # each one's start
        self._walked: dict[int, int] = {}
        self._strays: dict[int, int] = {}
        self._interval_ns = SOONEST_NS
        self._due_ns = 0

    def look(self, side: SideProcess, group: SideGroup | None, now_ns: int) -> None:
        """Look for new ones, if it is time.

        Args:
            side: the side task's process.
            group: its control group, if it has one.
            now_ns: the time.
        """
        words = self._words
        if not words[Field.SEARCH_PROCESS]:
            return  # it may be among them, and must never be stopped, nor be idle as a whole
        but = {side.pid, words[Field.SEARCH_PROCESS]}
        listed = None if group is None else self._listed(group)
        forks = words[Field.SIDE_FORKS]
        if now_ns >= self._due_ns or (listed is None and forks != self._forks):
            walked = _descendants(side.pid, but=words[Field.SEARCH_PROCESS])
            is_new = bool(walked.keys() - self._known)
            self._interval_ns = SOONEST_NS if is_new else min(2 * self._interval_ns, LATEST_NS)
            self._due_ns, self._forks, self._walked = now_ns + self._interval_ns, forks, walked
        elif listed is None:
            return
        found = {pid: start for pid, start in (self._walked | (listed or {})).items() if pid not in but}
        for pid in found.keys() - self._known:
            run_when_idle(pid)
        forked = {words[Field.FORKED_PROCESSES + index] for index in range(PROCESS_WORDS)}
        if (found.keys(), forked) != (self._known.keys(), self._forked):
            self._name(found.keys() - forked)
        self._known, self._forked = found, forked
        self._name_strays(side.pid)

    def _listed(self, group: SideGroup) -> dict[int, int] | None:
        """Those that are in the group, and when they started; None: the group is gone."""
        pids = group.processes()
        if pids is None:
            return None
        started = {pid: start for pid in pids - self._known.keys() if (start := start_time(pid))}
        if started:  # a number that now means a process elsewhere is not in the group any more
            pids &= group.processes() or set()
        starts = self._known | started
        return {pid: starts[pid] for pid in pids if pid in starts}

    def _name(self, pids: set[int]) -> None:
        """Name them on the page, each in the word that it had."""
        words = self._words
        indices = range(Field.FOUND_PROCESSES, Field.FOUND_PROCESSES + PROCESS_WORDS)
        for index in indices:
            if words[index] not in pids:
                words[index] = 0
        free = [index for index in indices if not words[index]]
        named = {words[index] for index in indices}
        for index, pid in zip(free, sorted(pids - named), strict=False):
            words[index] = pid

    def _name_strays(self, leader: int) -> None:
        """Name those that a signal to the process group of `leader` does not reach."""
        strays = {pid: start for pid, start in self._known.items() if _process_group(pid) not in (leader, 0)}
        if strays != self._strays:
            name_strays(self._words, strays)
            self._strays = strays


def _process_group(pid: int) -> int:
    """The process group of `pid`; 0: it has ended."""
    with suppress(OSError):
        return os.getpgid(pid)
    return 0


def _descendants(pid: int, but: int) -> dict[int, int]:
    """All descendants of process `pid`, without `but` and its own, and when they started."""
    found: set[int] = set()
    with suppress(psutil.Error):  # it has ended: the loop sees that by its pidfd
        for child in psutil.Process(pid).children():
            if child.pid != but:
                found.add(child.pid)
                with suppress(psutil.Error):
                    found |= {each.pid for each in child.children(recursive=True)}
    return {each: start for each in found if (start := start_time(each))}
