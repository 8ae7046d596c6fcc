"""Finds the processes of one run, and says what each of them is. Signals go through pidfds, so they hit no other."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_hooks.shared.processes.identity import ENDED_STATES, start_time
from ds_hooks.shared.statuses import SIDE_TASK

MARK = "SQUEEZER_SOAK"
"""The environment variable by which all processes of a run are known, whatever becomes of their parents."""
_SETTLED_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process.

    Attributes:
        start: when it started, in the kernel's ticks; with `pid` it names the process for ever.
        state: the kernel's letter, such as "T" for stopped.
        words: its command line.
        rank: the local rank that it belongs to.
    """

    pid: int
    parent: int
    group: int
    session: int
    start: int
    state: str
    words: tuple[str, ...]
    rank: int

    def describe(self) -> str:
        """One line for people."""
        return f"{self.pid} {self.state} parent {self.parent}: {' '.join(self.words)[:200]}"


class Processes:
    """The living processes of one run.

    Args:
        mark: the value of `MARK` in their environment.
    """

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._others: set[tuple[int, int]] = set()
        self.seen: set[int] = set()
        """The ids of all that were ever found."""

    def now(self) -> list[Process]:
        """Those that live now."""
        found: dict[int, Process] = {}
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            process = self._read(pid)
            if process is not None:
                found[pid] = process
        self.seen.update(found)
        return list(found.values())

    def _read(self, pid: int) -> Process | None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            start = int(fields[19])
            if fields[0] in ENDED_STATES or (pid, start) in self._others:
                return None
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if self._mark not in environment:
                # one that has just been forked may yet become one of the run's
                if time.clock_gettime(time.CLOCK_BOOTTIME) - start / _TICKS_PER_S > _SETTLED_S:
                    self._others.add((pid, start))
                return None
            words = tuple(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1])
        except OSError:
            return None  # another user's, or it has ended
        return Process(
            pid=pid,
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            start=start,
            state=fields[0],
            words=words,
            rank=_rank(environment),
        )


def _rank(environment: list[bytes]) -> int:
    named = [entry.partition(b"=")[2] for entry in environment if entry.startswith(b"LOCAL_RANK=")]
    return int(named[0]) if named and named[0].isdigit() else 0


def by_role(processes: list[Process]) -> dict[tuple[str, int], Process]:
    """(role, rank) to the process that has it. Of several loaders the oldest counts."""
    others = {process.pid: process for process in processes}
    found: dict[tuple[str, int], Process] = {}
    for process in sorted(processes, key=lambda each: each.start):
        for role in _roles(process, others):
            rank = _option(process, "--rank") if role in ("side task", "search worker", "loader") else process.rank
            found.setdefault((role, rank), process)
    return found


def _roles(process: Process, others: Mapping[int, Process]) -> Iterator[str]:
    words = process.words
    parent = others.get(process.parent)
    is_forked = parent is not None and parent.words == words
    if "launch.ds_squeeze" in words and not is_forked:
        yield "launcher"
    elif "deepspeed.launcher.launch" in words and not is_forked:
        yield "deepspeed"
    elif "ds_hooks" in words or any(word.endswith("/launch/rank.py") for word in words):
        if "deepspeed.launcher.launch" not in words and not is_forked:
            yield "rank"
    elif "squeezer" in words and "daemon" in words:
        yield "daemon" if is_forked else "keeper"
    elif SIDE_TASK in words and "--measure" not in words:
        # forked ones have its command line; the search worker leads a group of processes, as the side task does
        leads = process.pid == process.group
        if is_forked:
            yield "search worker" if leads else "loader"
        elif leads:
            yield "side task"


def _option(process: Process, name: str) -> int:
    """The number after an option; a side task's environment does not say its rank."""
    after = process.words.index(name) + 1 if name in process.words else len(process.words)
    return int(process.words[after]) if after < len(process.words) else 0


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to just this process; returns whether it was still there."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if start_time(process.pid) != process.start:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True
