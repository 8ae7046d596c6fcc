"""The side task's processes as the main job sees them: woken when a bubble begins, halted when it ends.

The main job does both itself, since it knows both moments first, and no other process has to wake up in between.
Signals go through a pidfd, so they never hit another process. The side task leads a process group, which has its own
processes too, such as data-loading workers: they are stopped and continued with it, and so are those that have left the
group.
"""

import errno
import os
import signal
from collections.abc import Collection
from contextlib import suppress

from ds_hooks.shared.page.layout import Field, SideActivity
from ds_hooks.shared.page.memory_order import light_fence
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.signals import WAKE_SIGNAL
from ds_hooks.shared.processes.strays import Strays


class SideProcess:
    """The side task's process, whichever it is now, if any.

    Args:
        words: of the page that names it.
        can_halt: whether stopping the process stops its work. False on a device that runs what is queued.
    """

    def __init__(self, words: "memoryview[int]", *, can_halt: bool = True) -> None:
        self._words = words
        self._strays = Strays(words)
        self._can_halt = can_halt
        self._pid = 0
        self._pidfd = -1
        self._stopped = self._surely = False

    def wake(self) -> None:
        """Let it run, or continue it.

        Raises:
            OSError: this process can no longer signal it: see `halt`.
        """
        if not self._is_there():
            return
        words = self._words
        is_there_yet = words[Field.SIDE_PID] == self._pid
        if is_there_yet and words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP:
            self._send(WAKE_SIGNAL)
        if self._stopped or not is_there_yet:
            self._stopped = False
            # the daemon may have stopped it while it starts; the wake signal would end it, not being blocked yet
            self._send_to_group(signal.SIGCONT)
            self._strays.resume()

    def halt(self, spared: Collection[int] = ()) -> bool:
        """Stop it unless it sleeps by itself, and its own processes. Returns whether it was stopped while awake.

        Args:
            spared: let it run on if its `SideActivity` is one of these, unless it has processes of its own: those would
                run on as long. A second call, without this, stops it if it still runs.

        Raises:
            OSError: this process can no longer signal it, because it has become another user's, say, or has opened all
                the files that it may; or the page is damaged. Whoever cannot halt a side task must not let it run.
        """
        if not self._can_halt:
            return False
        words = self._words
        if not self._is_there() or (self._stopped and self._surely):
            return False
        is_asleep = words[Field.SIDE_ACTIVITY] == SideActivity.ASLEEP
        is_spared = words[Field.SIDE_ACTIVITY] in spared and words[Field.SIDE_PID] == self._pid
        if (is_asleep or is_spared) and not words[Field.SIDE_CHILDREN] and not words[Field.STRAYS]:
            return False
        self._stopped = self._surely = True
        self._send_to_group(signal.SIGSTOP)
        self._strays.stop()
        return self._stopped and not is_asleep

    def has_run_on(self) -> None:
        """It has computed since it was halted: others may have continued it, so that it has to be stopped again."""
        self._surely = False

    def leave(self) -> None:
        """Leave it alone from now on. The daemon continues it when the main job goes."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._strays.close()
        self._pid, self._pidfd, self._stopped = 0, -1, False

    def _is_there(self) -> bool:
        pid = self._words[Field.SIDE_PROCESS]
        if pid == self._pid:
            return self._pidfd >= 0
        self.leave()
        if not pid:
            return False
        if pid <= 1 or pid in (os.getpid(), os.getpgrp()):  # group 1 would be all processes, the others are the job
            raise OSError(errno.EINVAL, f"the page is damaged: it names process {pid} as the side task")
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pid = pid
            return False  # it has ended
        self._pid = pid
        light_fence()
        if self._words[Field.SIDE_PROCESS_START] not in (0, start_time(pid)):
            self.leave()  # its daemon was killed, it has ended too, and another process has its number now
            self._pid = pid
            return False
        self._stopped, self._surely = True, False  # perhaps, by the hooks of another engine
        return True

    def _send_to_group(self, number: signal.Signals) -> None:
        """To its group, whose number is its own as long as a signal reaches it, and to itself.

        First to the group: the kernel passes a group's signal on to a child that is being forked, unless the same one
        waits for the parent already.
        """
        if self._send(0):
            with suppress(ProcessLookupError, PermissionError):  # it leads none
                os.killpg(self._pid, number)
            self._send(number)

    def _send(self, number: int) -> bool:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            self._stopped = False  # it has ended
            return False
        return True
