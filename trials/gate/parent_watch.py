"""How a side task ends whose daemon was killed: nobody else is left to open the gate, and its stream may wait there."""

import os
import select
import signal
import threading
import time

from ds_hooks.shared.page import DeviceGate, Field

FORCE_EVERY_S = 1e-3
"""The main job's device may shut the gate again."""

PATIENCE_S = 20.0
"""What is queued takes milliseconds. A side task that has not come to its end by then never will."""


class ParentWatch:
    """Instead of `die_with_parent`, in a thread that sleeps while the parent lives.

    Once the parent has ended, the gate is forced open until `close`, which the side task calls when nothing waits any
    more, since it sees that the parent has ended. Then the gate is shut and the process killed, so that its trials are
    as those of any killed side task: another takes them over.

    Args:
        words: the page's.
        parent_pid: whose end is watched.
        patience_s: for how long the gate is forced at most.
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
        """Nothing waits for the gate any more."""
        if self._thread.is_alive():
            os.eventfd_write(self._over_fd, 1)
            self._thread.join()

    def _watch(self) -> None:
        if not self._outlives_us():
            words, end_s = self._words, time.monotonic() + self._patience_s
            while not self._is_over(FORCE_EVERY_S) and time.monotonic() < end_s:
                words[Field.DEVICE_GATE] = DeviceGate.FORCED
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
