"""The daemon's interface to a device. Nothing else in it depends on the kind of device."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class SideProcess:
    """A running side task: its process id for messages, its pidfd for signals that can never hit another process."""

    pid: int
    pidfd: int


class Device(Protocol):
    """One device that a main job's rank and a side task share.

    Attributes:
        name: of its kind.
        stops: whether it can halt the side task in the middle of its work; else a unit that has started runs to its
            end, and only the side task itself can measure its overrun.
    """

    name: str
    stops: bool

    def join(self, main_pid: int) -> None:
        """Let this daemon, and what it starts from now on, run where the rank `main_pid` runs."""

    def arguments(self) -> list[str]:
        """Options that say where a side task's program runs."""

    def environment(self, threads: int) -> dict[str, str]:
        """Environment variables for a side task that uses `threads` host threads."""

    def stop(self, side: SideProcess) -> None:
        """Halt the side task wherever it is, if this device can."""

    def resume(self, side: SideProcess) -> None:
        """Undo `stop`."""

    def end(self, side: SideProcess, timeout_s: float) -> None:
        """Ask the side task to end, insist after `timeout_s`, and return when it has ended."""

    def main_ended(self) -> None:
        """The main job's process is gone, maybe in the middle of a bubble: shut the gate in its place."""


def run_where(pid: int) -> None:
    """Take the affinity of process `pid`; one that is gone by now changes nothing."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(pid))
    except ProcessLookupError:
        return


def send(side: SideProcess, signals: Sequence[signal.Signals]) -> None:
    """Send `signals` to the side task; to one that has ended, nothing."""
    try:
        for number in signals:
            signal.pidfd_send_signal(side.pidfd, number)
    except ProcessLookupError:
        return  # the loop sees that by its pidfd
