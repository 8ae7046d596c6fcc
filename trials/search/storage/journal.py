"""Optuna's journal, with a lock that ends with its process, and fewer waits for the disk."""

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from trials.search.storage.database import StorageError

BLOCK_BYTES = 1 << 16
"""Half a line is looked through in pieces: that of a long history may have any length."""


class Journal(JournalFileBackend):  # type: ignore[misc]  # of an untyped package
    """Optuna's journal in a file.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file_lock = path, _FileLock(path)
        super().__init__(path, self._file_lock)
        self._own = _Own()
        self._durable_bytes = 0  # as far as this process knows

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=_Own())

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See `BaseJournalBackend`. They are on the disk when it returns, or at the end of `together`.

        Raises:
            StorageError: see `read_logs`.
        """
        self._check_length()
        lines = b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)
        self._file_lock.acquire()
        try:
            self._own.is_behind = True
            with open(self._path, "ab") as file:
                file.write(lines)
        finally:
            self._file_lock.release()
        if not self._own.depth:
            self._catch_up()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """See `BaseJournalBackend`.

        Raises:
            StorageError: lines that were read before are gone. Those after them would be passed over until there are as
                many again.
        """
        self._check_length()
        lines: Iterator[dict[str, Any]] = super().read_logs(log_number_from)
        return lines

    def _check_length(self) -> None:
        length = os.stat(self._path).st_size if os.path.exists(self._path) else 0
        if length < next(reversed(self._log_number_offset.values())):
            raise StorageError(
                f"the study's journal {self._path} has lost lines: someone has removed or replaced it while its trials "
                "train; allowed: to put it back, and begin again"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Bring what this thread appends or relies on within it to the disk at its end, all at once.

        Each wait for the disk has threads of the kernel run on the main job's cores, and they are not idle.

        Raises:
            OSError: the disk did not take it. The next wait of this thread's is for that, too.
        """
        self._own.depth += 1
        try:
            yield
        finally:
            self._own.depth -= 1
            self._catch_up()

    def rely(self) -> None:
        """Bring to the disk what may have been read here, now or at the end of `together`.

        Others' lines can be read before they are there, and whoever wrote them may have been killed before it waited.
        """
        self._own.is_behind |= os.stat(self._path).st_size > self._durable_bytes
        if not self._own.depth:
            self._catch_up()

    def _catch_up(self) -> None:
        """Wait until the disk has all that this thread has appended or relies on."""
        own = self._own
        if not own.is_behind:
            return
        with open(self._path, "r+b") as file:
            if own.has_failed:
                self._write_again(file)
            own.has_failed = True
            length = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        own.has_failed = own.is_behind = False
        self._durable_bytes = max(length, self._durable_bytes)

    def _write_again(self, file: BinaryIO) -> None:
        """Write what the disk may lack: the kernel drops what it could not write, and no later wait fails for it."""
        self._file_lock.acquire()
        try:
            file.seek(self._durable_bytes)
            while block := file.read(BLOCK_BYTES):
                file.seek(-len(block), os.SEEK_CUR)
                file.write(block)
            file.flush()
        finally:
            self._file_lock.release()


class _Own(threading.local):
    """What one thread has of a journal.

    Attributes:
        depth: in how many `Journal.together` it is.
        is_behind: whether the disk lacks something.
        has_failed: whether the last wait for it has.
    """

    depth = 0
    is_behind = False
    has_failed = False


@contextmanager
def together(storage: BaseStorage) -> Iterator[None]:
    """See `Journal.together`. On any other storage it does nothing."""
    journal = _journal_of(storage)
    with nullcontext() if journal is None else journal.together():
        yield


def rely_on(storage: BaseStorage) -> None:
    """Have what was read from a storage outlast a crash of the machine, as what is made of it will: see `Journal.rely`.

    A database shows nothing else.
    """
    journal = _journal_of(storage)
    if journal is not None:
        journal.rely()


def _journal_of(storage: BaseStorage) -> Journal | None:
    backend = storage._backend if isinstance(storage, JournalStorage) else None
    return backend if isinstance(backend, Journal) else None


class _FileLock:
    """A journal's lock that ends with its process.

    Optuna's own lock is a file. It outlives a killed process, and then others wait for it for half a minute.

    Getting this lock also removes half a line that a full disk or a crash has left. The next line would be unreadable
    behind it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> bool:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        end = whole = os.lseek(fd, 0, os.SEEK_END)
        while whole and os.pread(fd, 1, whole - 1) != b"\n":
            begin = max(0, whole - BLOCK_BYTES)
            whole = begin + os.pread(fd, whole - begin, begin).rfind(b"\n") + 1
        if whole < end:
            os.ftruncate(fd, whole)
        self._fd = fd
        return True

    def release(self) -> None:
        fd, self._fd = self._fd, -1  # another thread that gets the lock now has one of its own
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that the study has forked meanwhile has the file open, too
        os.close(fd)
