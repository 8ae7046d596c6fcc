"""How many more processes and threads this user may start (`ulimit -u`): the main job needs its own first."""

import os
import resource

LEAST_PER_RANK = 64
"""A rank of a small job starts some 20, ours are about ten, and a data loader's workers come on top."""


def processes_left() -> int | None:
    """How many more; None: there is no limit, as for root."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.getuid() == 0:
        return None
    return most - sum(_own_threads(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def _own_threads(pid: str) -> int:
    """Of a process, if it is this user's."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
    except OSError:
        return 0  # it has ended
