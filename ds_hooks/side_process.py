"""The side task as the main job sees it: a process that it wakes when a bubble begins, and halts when it ends.

Done by the main job itself, since it knows both moments first: no other process has to wake up in between. Signals go
through a pidfd, so they never hit another process.
"""

import os
import signal

from ds_hooks.shared.page import Field, SideActivity


class SideTask:
    """The side task of the page whose words are `words`, whichever process that is now, if any."""

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        self._pid = 0
        self._pidfd = -1
        self._stopped = False

    def wake(self) -> None:
        """Let it run, or go on."""
        if not self._is_there():
            return
        words = self._words
        if self._stopped or words[Field.SIDE_PID] != self._pid:
            self._stopped = False
            self._send(signal.SIGCONT)  # while it starts, the daemon may have stopped it, and SIGUSR1 would end it
        elif words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP:
            self._send(signal.SIGUSR1)

    def halt(self, *, let_end: bool = False) -> bool:
        """Stop it unless it sleeps by itself. Whether it was stopped.

        Args:
            let_end: let it end its unit of device work first, which is what a device needs that cannot stop one; a
                second call, without it, stops who has not ended by then.
        """
        words = self._words
        if not self._is_there() or self._stopped or words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP:
            return False
        if let_end and words[Field.SIDE_ACTIVITY] == SideActivity.UNIT and words[Field.SIDE_PID] == self._pid:
            return False
        self._stopped = True
        self._send(signal.SIGSTOP)
        return self._stopped

    def leave(self) -> None:
        """Let it alone from now on; a daemon that sees us go lets it run on."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pid, self._pidfd, self._stopped = 0, -1, False

    def _is_there(self) -> bool:
        pid = self._words[Field.SIDE_PROCESS]
        if pid == self._pid:
            return self._pidfd >= 0
        self.leave()
        self._pid = pid
        if not pid:
            return False
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            return False  # it has ended
        return True

    def _send(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:
            self._stopped = False  # it has ended
