"""Files and directories that only their user reads. What exists already keeps its mode."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


class OthersError(OSError):
    """Another user decides what a path leads to; `strerror` says how, and what is allowed."""


def check_ours(path: Path) -> None:
    """Refuse a path that another user may have laid.

    Where all may make names, as in /tmp, what bears them must belong to this user or to root, symbolic links too.
    What does not exist yet is no matter.

    Raises:
        OthersError: it is another user's.
    """
    anyone_names = False
    for part in reversed((path.absolute(), *path.absolute().parents)):
        try:
            found = part.lstat()
            if anyone_names and found.st_uid not in (0, os.getuid()):
                raise OthersError(
                    errno.EACCES, f"{part} belongs to user {found.st_uid}, in a directory where all users may write"
                )
            if stat.S_ISLNK(found.st_mode):
                with suppress(FileNotFoundError):
                    part.stat()  # a loop of links is an error
                check_ours(part.parent / part.readlink())
                found = part.stat()
        except FileNotFoundError:
            return
        anyone_names = stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_IWOTH)


def make_dir(path: Path) -> None:
    """Make a directory with mode 0700, and those above it as usual, but with 0755 at most. New ones are durable.

    Raises:
        OthersError: it is another user's, or all users may write there.
        OSError: it cannot be made.
    """
    check_ours(path)
    make_parents(path)
    _make(path, 0o700)
    if path.stat().st_mode & stat.S_IWOTH:
        raise OthersError(errno.EACCES, f"all users may write there: chmod o-w {path}, or name a directory in it")


def make_parents(path: Path) -> None:
    """Make the directories above `path` that are missing; whatever the umask, no other user may write there."""
    if not path.parent.exists():
        make_parents(path.parent)
        with suppress(FileExistsError):
            _make(path.parent, 0o755)


def _make(path: Path, mode: int) -> None:
    """Make a directory, unless it is there; a crash of the machine does not lose it."""
    if path.is_dir():
        return
    path.mkdir(mode, exist_ok=True)
    sync_name(path)


def open_private(path: str, flags: int) -> int:
    """An opener for `open`: a new file gets mode 0600."""
    return os.open(path, flags, 0o600)


def write_text(path: Path, text: str) -> None:
    """Write a whole file in UTF-8."""
    with open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)


def sync(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable. Some file systems need no such call for entries."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)


def sync_name(path: Path) -> None:
    """Make the entry of a new file or directory durable."""
    with suppress(PermissionError):  # one may add to a directory that one may not read
        sync(path.absolute().parent)
