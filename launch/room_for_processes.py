"""How many more processes and threads may start here: the main job needs its own first.

The user's limit counts (`ulimit -u`), and that of each control group (`pids.max`), which containers, systemd and
Kubernetes set.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from squeezer.daemon.side_processes.parent_group import limiting_groups

LEAST_PER_RANK = 64
"""A rank of a small job starts some 20, ours are about ten, and a data loader's workers come on top."""


class Room(NamedTuple):
    """How many more, and which limit says so."""

    left: int
    limit: str


def room_for_processes() -> Room | None:
    """By the tightest limit; None: there is none."""
    return min((*_of_user(), *_of_groups()), default=None)


def _of_user() -> Iterator[Room]:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != 0:  # it does not count for root
        used = sum(_own_threads(entry) for entry in os.listdir("/proc") if entry.isdecimal())
        yield Room(most - used, "ulimit -u")


def _own_threads(pid: str) -> int:
    """Of a process, if it is this user's."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
    except OSError:
        return 0  # it has ended


def _of_groups() -> Iterator[Room]:
    for group in limiting_groups("pids"):
        most = group / "pids.max"
        with suppress(OSError, ValueError):  # the controller is not there, or sets no limit: "max"
            yield Room(int(most.read_text(encoding="ascii")) - int(_read(group / "pids.current")), str(most))


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii")
