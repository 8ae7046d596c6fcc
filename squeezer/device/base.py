"""What the daemon needs from a kind of device; the rest of it never learns which kind that is."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class SideProcess:
    """A running side task: its process id for messages, its pidfd for signals that can never hit another process."""

    pid: int
    pidfd: int


class Device(Protocol):
    """One device that a main job's rank and a side task share."""

    name: str

    def join(self, main_pid: int) -> None:
        """Let this daemon, and what it starts from now on, run where the rank `main_pid` runs."""

    def environment(self, threads: int) -> dict[str, str]:
        """Environment variables for a side task that uses `threads` host threads."""

    def stop(self, side: SideProcess) -> None:
        """Halt the side task wherever it is."""

    def resume(self, side: SideProcess) -> None:
        """Undo `stop`."""

    def end(self, side: SideProcess, *, force: bool) -> None:
        """Ask the side task to end, or end it."""
