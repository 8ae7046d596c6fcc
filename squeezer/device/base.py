"""The daemon's interface to a device. Nothing else in it depends on the kind of device."""

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from ds_hooks.shared.processes.priority import MOST_NICE
from squeezer.device.nvml import Meters


@dataclass(frozen=True, kw_only=True, slots=True)
class SideProcess:
    """A running side task: its process id for messages, its pidfd for signals that can never hit another process."""

    pid: int
    pidfd: int


class CannotShareError(Exception):
    """No side task may run beside the main job; the text says why, and what to do.

    Attributes:
        may_pass: it could not be found out, so it is worth to ask again soon.
    """

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


class Device(Protocol):
    """One device that a main job's rank and a side task share.

    Attributes:
        name: of its kind.
        stops: whether it can halt the side task in the middle of its work; else a unit that has started runs to its
            end, and only the side task itself can measure its overrun.
        needs_job: whether a side task may start only once the main job has said hello.
    """

    name: str
    stops: bool
    needs_job: bool

    own_session: bool
    """Whether a side task that starts now needs a session of its own: see `weighed_by_session`."""

    def join(self, main_pid: int, side: SideProcess | None) -> bool:
        """Let this daemon, the side task, and what they start from now on, run where the rank `main_pid` runs.

        Returns:
            False if the side task cannot follow: it must be started anew.
        """

    def meters(self) -> Meters | None:
        """The meters of the device that the main job uses; None: it has none, or they are not known."""

    def bars_side_task(self) -> str:
        """Why no side task can use the device beside the main job; empty: one can."""

    def least_margin_ns(self) -> int:
        """How long before a bubble's end a side task must have ended here, by a kept measurement; 0: none says so."""

    def least_bubble_ns(self) -> int:
        """The shortest bubble that is worth opening here, by a kept measurement; 0: none says so."""

    def prepare(self, main_pid: int) -> None:
        """Find out how a side task that starts now can share the device with the rank `main_pid`.

        Raises:
            CannotShareError: it cannot.
        """

    def arguments(self) -> list[str]:
        """Options that say where a side task's program runs."""

    def environment(self, threads: int) -> dict[str, str]:
        """Environment variables for a side task that uses `threads` host threads."""

    def stop(self, side: SideProcess) -> None:
        """Halt the side task wherever it is, if this device can."""

    def resume(self, side: SideProcess) -> None:
        """Undo `stop`."""

    def end(self, side: SideProcess, timeout_s: float, *, beside_main: bool) -> None:
        """Ask the side task to end, insist after `timeout_s`, and return when it has ended.

        Args:
            side: the process.
            timeout_s: 0: kill it at once.
            beside_main: a main job lives, so the process may use no more than idle time until it ends.
        """

    @property
    def recovers(self) -> bool:
        """Whether a side task that dies leaves the device unusable for the next one for a while."""

    def main_ended(self) -> None:
        """The main job's process is gone, maybe in the middle of a bubble: shut the gate in its place."""


def weighed_by_session(pid: int, other_pid: int | None = None) -> bool:
    """Whether the kernel shares a core between `pid` and another process by their sessions (autogroup).

    Then classes and niceness count within each session only: one of the idle class has half of a core that the main job
    needs. A session has a niceness of its own, which must not be that of the user's terminal.

    Args:
        pid: of one process.
        other_pid: of the other one; None: this one.
    """
    return _autogroup(pid) != _autogroup(os.getpid() if other_pid is None else other_pid)


def place_of(pid: int) -> tuple[set[int], str] | None:
    """The cores of process `pid`, and the session by which the kernel weighs it; None: it has ended."""
    try:
        return os.sched_getaffinity(pid), _autogroup(pid)
    except ProcessLookupError:
        return None


def _autogroup(pid: int) -> str:
    with suppress(OSError):  # the kernel knows none, or the process has ended
        return Path(f"/proc/{pid}/autogroup").read_text(encoding="ascii").partition(" ")[0]
    return ""


def run_where(pid: int, side: SideProcess | None) -> bool:
    """Give this process, and the side task with its children, the affinity of `pid`, if that still runs.

    Returns:
        False if that cannot be: the cpusets of this process and `pid` have no core in common.
    """
    threads = [0]
    if side is not None:
        with suppress(psutil.Error):  # it has ended: the loop sees that by its pidfd
            process = psutil.Process(side.pid)
            threads += [each.id for one in (process, *process.children(recursive=True)) for each in one.threads()]
    try:
        cores = os.sched_getaffinity(pid)
        for thread in threads:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cores)
    except ProcessLookupError:
        pass
    except OSError:
        return False
    return True


def run_when_idle(pid: int) -> None:
    """Let all threads of a process, and those that they start, run only when nothing else wants the core."""
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def run_nicely(pid: int) -> None:
    """Give all threads of a process, and those that they start, the least share of a core that others want."""
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            if os.sched_getscheduler(int(thread)) != os.SCHED_IDLE:
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(thread), MOST_NICE)


PRIORITIES = {"idle": run_when_idle, "nice": run_nicely}
"""What `[side] priority` means."""


def is_stopped(side: SideProcess) -> bool:
    """Whether the side task, which this process has started, is stopped by a signal."""
    flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        return os.waitid(os.P_PIDFD, side.pidfd, flags) is not None
    return False


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Whether the process of `pidfd` ends within some seconds."""
    return bool(select.select([pidfd], [], [], within_s)[0])


def send(side: SideProcess, number: int) -> bool:
    """Send a signal to the side task. Returns whether it is there."""
    try:
        signal.pidfd_send_signal(side.pidfd, number)
    except ProcessLookupError:
        return False  # the loop sees that by its pidfd
    return True


def send_to_group(side: SideProcess, number: signal.Signals) -> None:
    """Send a signal to the side task and its own processes. Until it is reaped here, its number is its own.

    First to its group: so a child that is being forked gets it, too; see `ds_hooks.side_process`.
    """
    if send(side, 0):
        with suppress(OSError):
            os.killpg(side.pid, number)
        send(side, number)
