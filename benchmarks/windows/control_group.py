"""A control group of the least weight, for naive co-location: what the kernel offers against a neighbour by itself."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from squeezer.daemon.side_processes.parent_group import limiting_groups

LEAST = {"cpu.weight": "1", "cpu.shares": "2"}
"""File of cgroup v2 or v1 -> its least value."""
EMPTY_WITHIN_S = 30.0


class NoLeastWeightError(Exception):
    """There can be no such group; the text says why."""


@contextmanager
def least_weight_group() -> Iterator[Path]:
    """Make the group, and yield the file into which a process writes 0 to enter it. Its processes must end before.

    It lies in this process's own group, or in the next one above whose groups have a weight.

    Raises:
        NoLeastWeightError: there can be none.
    """
    group = _made(limiting_groups("cpu"))
    try:
        yield group / "cgroup.procs"
    finally:
        deadline_s = time.monotonic() + EMPTY_WITHIN_S
        while group.exists() and time.monotonic() < deadline_s:  # its last process may not have been reaped
            with suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


def _made(parents: list[Path]) -> Path:
    problems = []
    for parent in parents:
        group = parent / f"bsq-least-weight-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
            continue
        for name, value in LEAST.items():
            if (group / name).exists():
                (group / name).write_text(value, encoding="ascii")
                return group
        group.rmdir()
        problems.append(f"{parent}: its groups have no weight")
    raise NoLeastWeightError("; ".join(problems) or "the kernel shows no group with the cpu controller")
