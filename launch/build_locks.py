"""Locks of torch's extension builder whose builder has died: the next one to build would wait for ever.

Such a lock is a file that names no owner, in a folder that other machines and containers may share. So it counts as
ours to remove only if a process of this job was seen to hold it, and has ended since.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from ds_hooks.shared.processes.identity import start_time

LOOK_EVERY_S = 1.0
"""Building takes a minute; a look lists one folder, and while a lock is there also the job's open files."""

_Lock = tuple[Path, int, int, int]
"""Path, device, inode and time of creation: another lock of the same path differs."""


def unheld_build_locks(environment: Mapping[str, str]) -> list[Path]:
    """Find the locks that no process here has open: their builders are dead, or on another machine."""
    locks = _build_locks(environment)
    held = {path for _, path in _open_locks(locks, psutil.process_iter())} if locks else set()
    return [lock[0] for lock in locks if lock[0] not in held]


class BuildLockWatch:
    """Notes who builds while a job runs. A context manager; at its end it removes the locks of dead builders.

    Args:
        environment: names the folder in which extensions are built.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._builders: dict[_Lock, set[tuple[int, int]]] = {}
        """Lock to the (process, its start time) that held it."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="build locks", daemon=True)

    def __enter__(self) -> "BuildLockWatch":
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what this job's builders have left."""
        self._over.set()
        self._thread.join()
        with suppress(OSError, psutil.Error):
            self.remove_orphans()

    def look(self) -> None:
        """Note which of this process's descendants hold which lock now."""
        locks = _build_locks(self._environment)
        if not locks:
            return
        by_path = {lock[0]: lock for lock in locks}
        for pid, path in _open_locks(locks, psutil.Process().children(recursive=True)):
            self._builders.setdefault(by_path[path], set()).add((pid, start_time(pid)))

    def remove_orphans(self) -> list[Path]:
        """Remove the locks whose builders were all this job's and have ended; returns them."""
        unheld = unheld_build_locks(self._environment)
        orphans = [
            lock[0]
            for lock in _build_locks(self._environment)
            if lock[0] in unheld
            and lock in self._builders
            and all(start_time(pid) != start for pid, start in self._builders[lock])
        ]
        for path in orphans:
            with suppress(OSError):  # removed by another job, say
                path.unlink()
        return orphans

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            with suppress(OSError, psutil.Error):  # no more files, say
                self.look()


def _build_locks(environment: Mapping[str, str]) -> list[_Lock]:
    found = []
    for path in _lock_files(environment):
        try:
            status = path.stat()
        except OSError:
            continue  # released meanwhile
        found.append((path.resolve(), status.st_dev, status.st_ino, status.st_mtime_ns))
    return found


def _lock_files(environment: Mapping[str, str]) -> list[Path]:
    """All in the folder in which torch builds; none where that cannot be read."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    root = Path(named) if named else Path(cache) / "torch_extensions"
    with suppress(OSError):  # the home of another user, say
        return list(root.glob("*/lock" if named else "*/*/lock"))
    return []


def _open_locks(locks: Iterable[_Lock], processes: Iterable[psutil.Process]) -> list[tuple[int, Path]]:
    """Pairs of a process and a lock that it has open."""
    paths = {str(lock[0]): lock[0] for lock in locks}
    found = []
    for process in processes:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue  # another user's, or it has ended
        found += [(process.pid, paths[link]) for link in links if link in paths]
    return found
