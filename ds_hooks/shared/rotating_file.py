"""A file of records that keeps the latest: when it is full, the older half goes.

Daemons keep one for bubbles, side tasks one for units.
"""

import os
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path

from ds_hooks.shared.private_file import open_private


def older(path: Path) -> Path:
    """The path of the older half of `path`, such as ``rank0.units.old.bin``."""
    return path.with_name(f"{path.stem}.old{path.suffix}")


def read_parts(path: Path) -> tuple[bytes, bytes]:
    """Read both halves of a `RotatingFile`, the older first. The file may rotate meanwhile."""
    newer = _content(path)  # first: if it becomes the older half meanwhile, it is found there
    before = _content(older(path))
    return (before, b"") if newer and before.startswith(newer) else (before, newer)


class RotatingFile:
    """Appends to a file. When that is full it replaces the `older` one, and a new one begins.

    A full disk costs the records of that time and is reported once. The caller never fails.

    Args:
        path: the file; what it holds is kept.
        most_bytes: the size at which it is full. None: it never is.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: FileIO | None = self._open()
        self._has_failed = False

    def write(self, data: bytes | bytearray) -> bool:
        """Append all of `data`, or nothing. Returns whether it was appended."""
        try:
            if self._file is None:
                self._file = self._open()
            self._append(self._file, data)
            if self._most_bytes is not None and self._file.tell() >= self._most_bytes:
                self._file.close()
                self._file = None
                older(self._path).unlink(missing_ok=True)  # renaming over it would wait for the disk
                self._path.rename(older(self._path))
            return True
        except OSError as error:
            has_failed, self._has_failed = self._has_failed, True
            if not has_failed:
                with suppress(OSError):  # it may go to the same disk
                    # in one piece: others write there, too
                    sys.stderr.write(f"[squeezer] records are lost: {self._path}: {error.strerror}\n")
                    sys.stderr.flush()
            return False

    def close(self) -> None:
        """Close the file. A later `write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        return open(self._path, "ab", buffering=0, opener=open_private)

    @staticmethod
    def _append(file: FileIO, data: bytes | bytearray) -> None:
        before = file.tell()
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), before)
                file.seek(before)
            raise


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
