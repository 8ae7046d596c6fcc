"""Which process holds the lock of a file, so that whoever waits for it in vain can say so."""

import os
from contextlib import suppress
from pathlib import Path

from ds_hooks.shared.processes.identity import is_stopped


def name_holder(file: Path) -> str:
    """Name the process of this machine that has locked a file for writing, in words; empty: none is seen from here.

    Source: proc_locks(5). The files that a process has open tell inodes of several file systems apart.
    """
    with suppress(OSError):
        inode = file.stat().st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            _, *waits, _, _, how, pid, where, _, _ = line.split()
            if not waits and how == "WRITE" and where.endswith(f":{inode}") and _has_open(int(pid), file):
                return f"process {pid}" + (", which is stopped" if is_stopped(int(pid)) else "")
    return ""


def _has_open(pid: int, file: Path) -> bool:
    with suppress(OSError):
        return any(os.path.samefile(each, file) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists())
    return False
