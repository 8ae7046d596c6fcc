"""The side task's processes that have left its process group, so that a signal to the group does not reach them.

The daemon finds them and names them on the page. Who signals makes sure by the start time that a number still means the
same process, and keeps its pidfd.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from ds_hooks.shared.page.layout import STRAY_WORDS, Field
from ds_hooks.shared.processes.identity import start_time

_PID_BITS = 22
"""Linux has no higher process ids."""


def name_strays(words: "memoryview[int]", starts: Mapping[int, int]) -> None:
    """Name processes on the page, as many as there is room for; those named already come first.

    Args:
        words: the page's.
        starts: of each process, in ticks since boot.
    """
    wanted = {start << _PID_BITS | pid for pid, start in starts.items()}
    before = _named(words)
    kept = [word for word in before if word in wanted]
    named = [*kept, *sorted(wanted - set(kept))][:STRAY_WORDS]
    for index, word in enumerate((*named, *[0] * (STRAY_WORDS - len(named)))):
        words[Field.STRAYS + index] = word


class Strays:
    """Signals to the strays of one page.

    Args:
        words: the page's.
    """

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        self._pidfds: dict[int, int] = {}  # by the word; -1: it has ended

    def stop(self) -> None:
        """Stop those that the page names."""
        if not self._words[Field.STRAYS]:
            return
        for word in _named(self._words):
            if word not in self._pidfds:
                self._pidfds[word] = _open(word)
            self._send(word, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue those, and stopped ones that are no longer named."""
        if not self._pidfds and not self._words[Field.STRAYS]:
            return
        named = _named(self._words)
        for word in named:
            if word not in self._pidfds:  # another process may have stopped it
                self._pidfds[word] = _open(word)
        for word in list(self._pidfds):
            self._send(word, signal.SIGCONT)
            if word not in named:
                self._forget(word)

    def close(self) -> None:
        """Forget them."""
        for word in list(self._pidfds):
            self._forget(word)

    def _send(self, word: int, number: signal.Signals) -> None:
        if self._pidfds[word] >= 0:
            with suppress(ProcessLookupError, PermissionError):  # it has ended
                signal.pidfd_send_signal(self._pidfds[word], number)

    def _forget(self, word: int) -> None:
        pidfd = self._pidfds.pop(word)
        if pidfd >= 0:
            os.close(pidfd)


def _named(words: "memoryview[int]") -> list[int]:
    named: list[int] = []
    for index in range(Field.STRAYS, Field.STRAYS + STRAY_WORDS):
        word = words[index]
        if not word:
            break
        named.append(word)
    return named


def _open(word: int) -> int:
    pid, start = word & (1 << _PID_BITS) - 1, word >> _PID_BITS
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    if start_time(pid) == start:
        return pidfd
    os.close(pidfd)  # another process has its number now
    return -1
