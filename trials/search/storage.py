"""Where Optuna keeps a study: the storage that a configuration names."""

import fcntl
import os

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

SQLITE_PATIENCE_S = 60
"""SQLite gives up after five seconds; a search worker in the middle of a write may get no time for longer than that."""

LONGEST_LINE = 1 << 20
"""Of a journal, in bytes, by far."""


class _FileLock:
    """Optuna's locks of a journal are files, which outlive a killed process, and are then waited for half a minute.

    Who gets it removes half a line that a full disk or a crash has left: behind it, the next would be unreadable too.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
        end = os.lseek(fd, 0, os.SEEK_END)
        tail = os.pread(fd, LONGEST_LINE, max(0, end - LONGEST_LINE))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(fd, end - len(tail) + tail.rfind(b"\n") + 1)
        self._fd = fd
        return True

    def release(self) -> None:
        os.close(self._fd)


def open_storage(named: str) -> BaseStorage:
    """Optuna's storage.

    Args:
        named: a database's URL, or the path of a journal, which is made if there is none. A journal costs a search
        worker
            less by far: what others wrote is read from the end of a file.
    """
    if "://" not in named:
        return JournalStorage(JournalFileBackend(named, _FileLock(named)))
    is_sqlite = named.startswith("sqlite:")
    return RDBStorage(named, engine_kwargs={"connect_args": {"timeout": SQLITE_PATIENCE_S}} if is_sqlite else None)
