"""Injects a run's faults when their time has come, and takes those back that do not last."""

import os
import resource
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import FORMS, Fault, Plan
from benchmarks.soak.job import Terminal
from benchmarks.soak.processes import Process, send

_NO_PROCESS = ("", *FORMS)
_CHUNK = 1 << 16
_LIMIT_BYTES = 4096
"""Every file of ours is longer soon."""


class Injector:
    """The faults of one run.

    Args:
        plan: which.
        terminal: the job's, if it has one.
        disk: the folder whose disk may be filled.
    """

    def __init__(self, plan: Plan, terminal: Terminal | None, disk: Path) -> None:
        self._terminal = terminal
        self._ballast = disk / "ballast"
        self._due = [_Due(fault) for fault in plan.faults]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The faults, and for each that was injected when, in which step, and into which process."""
        return [{**due.fault.as_record(), **due.happened} for due in self._due]

    @property
    def is_over(self) -> bool:
        """Whether all were injected and taken back."""
        return all(due.happened and due.until_s is None for due in self._due)

    def look(self, roles: Mapping[tuple[str, int], Process], step: int, began_s: float) -> None:
        """Do what is due.

        Args:
            roles: see `benchmarks.soak.processes.by_role`.
            step: how many steps the main job has done.
            began_s: when the run began, by time.monotonic().
        """
        now_s = time.monotonic()
        for due in self._due:
            if due.happened:
                if due.until_s is not None and now_s >= due.until_s:
                    self._take_back(due)
                continue
            fault = due.fault
            victim = roles.get((fault.victim, fault.rank))
            if step < fault.after_step or (victim is None and fault.victim not in _NO_PROCESS):
                continue
            if due.from_s is None:
                due.from_s = now_s + fault.delay_s
            if now_s >= due.from_s and self._inject(due, victim):
                due.happened |= {"at_step": step, "at_s": round(now_s - began_s, 2)}
                due.until_s = None if fault.lasts_s is None else now_s + fault.lasts_s

    def end(self) -> None:
        """Take back what still lasts, but for processes that stay stopped for ever."""
        for due in self._due:
            if due.until_s is not None:
                self._take_back(due)

    def _inject(self, due: "_Due", victim: Process | None) -> bool:
        what = due.fault.what
        if what == "full disk":
            self._fill()
            due.happened = {"pid": 0}
        elif what in ("hang-up", "Ctrl-C"):
            assert self._terminal is not None
            self._terminal.hang_up() if what == "hang-up" else self._terminal.type("\x03")
            due.happened = {"pid": 0}
        elif victim is None:
            return False
        elif what == "file limit":
            with suppress(ProcessLookupError):
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (_LIMIT_BYTES, _LIMIT_BYTES))
            due.happened = {"pid": victim.pid}
        elif send(victim, signal.Signals[what]):
            due.victim = victim
            due.happened = {"pid": victim.pid, "was": victim.state}
        return bool(due.happened)

    def _take_back(self, due: "_Due") -> None:
        due.until_s = None
        if due.fault.what == "full disk":
            self._ballast.unlink(missing_ok=True)
        elif due.victim is not None:
            send(due.victim, signal.SIGCONT)

    def _fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                os.write(ballast.fileno(), bytes(_CHUNK))
        with self._ballast.open("ab", buffering=0) as ballast, suppress(OSError):
            while True:
                os.write(ballast.fileno(), b"\0")


class _Due:
    """One fault, and what has become of it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.from_s: float | None = None
        self.until_s: float | None = None
        self.victim: Process | None = None
        self.happened: dict[str, Any] = {}
