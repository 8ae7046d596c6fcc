"""Removes the shared memory (66 MiB per rank) in which DeepSpeed reduces on CPUs, and which it leaves for ever.

Its name says user, master address and port, and rank, so a job on a port of its own would leave more after every run.
"""

import os
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_LISTENS = "0A"


def remove_buffers(port: int, memory: Path = SHARED_MEMORY) -> bool:
    """Remove the buffers of this user's job on master port `port`, unless they are in use.

    A job whose ranks are about to open each other's buffers has its rank 0 listen on that port.

    Returns:
        Whether none are left.
    """
    found = _buffers(port, memory)
    if not found:
        return True
    # last, just before the removal: a job that begins to listen now needs longer to make its first buffer
    if _is_any_mapped(found) or _is_listened_to(port):
        return False
    for path in found:
        path.unlink(missing_ok=True)
    return True


def _buffers(port: int, memory: Path) -> list[Path]:
    """The address may have any form; what stands around it does not."""
    found = memory.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*")
    return [path for path in found if path.name.rpartition("_")[0].endswith(f"_{port}")]


def _is_any_mapped(paths: Iterable[Path]) -> bool:
    """Whether a process of this user maps one of the files. Nobody else may open them, but root."""
    wanted = set()
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        wanted.add((f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            maps = (entry / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # another user's, or it has ended
        if any(tuple(line.split(maxsplit=5)[3:5]) in wanted for line in maps.splitlines()):
            return True
    return False


def _is_listened_to(port: int) -> bool:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state = line.split()[:4]
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                return True
    return False
