"""Ends a CUDA side task whose daemon was killed: its stream may wait at a gate that nothing else would open."""

import os
import select
import signal
import threading
import time

from ds_hooks.shared.forced_gate import force_gate
from ds_hooks.shared.page.layout import DeviceGate, Field

FORCE_EVERY_S = 1e-3
"""Force the gate again this often, because the main job's device may shut it again."""

PATIENCE_S = 20.0
"""Queued work takes milliseconds, so a side task that has not ended by then never will."""


class ParentWatch:
    """Does the work of `die_with_parent` in a thread, which sleeps while the parent lives.

    When the parent has ended, the gate is forced open until `close`. The side task sees the end of its parent too, and
    calls `close` when nothing waits any more. Then the gate is shut and the process killed. Another side task takes its
    trials over, as those of any killed one.

    Args:
        words: the page's.
        parent_pid: the process whose end is watched.
        patience_s: the longest time for which the gate is forced.
    """

    def __init__(self, words: "memoryview[int]", parent_pid: int, patience_s: float = PATIENCE_S) -> None:
        self._words, self._patience_s = words, patience_s
        self._over_fd = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._parent_fd = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            self._parent_fd = -1
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: nothing waits for the gate any more."""
        if self._thread.is_alive():
            os.eventfd_write(self._over_fd, 1)
            self._thread.join()

    def _watch(self) -> None:
        if not self._outlives_us():
            words, end_s = self._words, time.monotonic() + self._patience_s
            while not self._is_over(FORCE_EVERY_S) and time.monotonic() < end_s:
                force_gate(words)
            words[Field.DEVICE_GATE] = DeviceGate.CLOSED
            os.kill(os.getpid(), signal.SIGKILL)
        for fd in (self._over_fd, self._parent_fd):
            os.close(fd)

    def _outlives_us(self) -> bool:
        if self._parent_fd < 0:
            return False
        ready, _, _ = select.select([self._over_fd, self._parent_fd], [], [])
        return self._parent_fd not in ready

    def _is_over(self, wait_s: float) -> bool:
        return bool(select.select([self._over_fd], [], [], wait_s)[0])
