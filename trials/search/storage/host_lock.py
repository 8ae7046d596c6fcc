"""Keeps claims that are in a file to the workers of one host: its kernel's locks and clock are what they rely on."""

import errno
import fcntl
import socket
import time
from io import FileIO
from pathlib import Path

from ds_hooks.shared.private_file import make_dir, open_private
from ds_hooks.shared.processes.identity import own_namespaces
from trials.search.storage.database import StorageError, is_shared

NAME = "host.lock"

_PATIENCE_S, _AGAIN_S = 10.0, 0.05
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of file systems that have no locks: there, nothing is known of other hosts."""


def hold(storage: str, directory: Path | None) -> FileIO | None:
    """Lock a study's directory for this host's workers, until the file is closed; None: hosts may share the storage.

    Each worker shares the lock. Only one that is alone writes whose it is, so a host that has ended is succeeded.

    Raises:
        StorageError: another host's workers have it.
        OSError: it cannot be written.
    """
    if directory is None or is_shared(storage):
        return None
    make_dir(directory.parent)
    make_dir(directory)
    boot_id = own_namespaces()[:2]
    mine = f"{boot_id[0]:x}-{boot_id[1]:x} {socket.gethostname()}"
    file = _opened(directory / NAME)
    theirs, until_s = "", time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        if _got(file, fcntl.LOCK_EX):
            file.truncate(0)
            file.write(mine.encode())
        # not in one step: another host's may have been alone in between
        if _got(file, fcntl.LOCK_SH):
            file.seek(0)
            theirs = file.read().decode(errors="replace")
            if theirs.partition(" ")[0] == mine.partition(" ")[0]:
                return file
            if theirs:
                break
            _got(file, fcntl.LOCK_UN)  # its writer died: else nobody would ever be alone who also waits
        time.sleep(_AGAIN_S)
    file.close()
    raise StorageError(
        f"workers of another host, {theirs.partition(' ')[2]}, have the study in {directory}, whose claims are in a "
        "file for one host at a time; allowed: a storage in PostgreSQL, or another study_directory"
    )


def _opened(path: Path) -> FileIO:
    return open(path, "a+b", buffering=0, opener=open_private)


def _got(file: FileIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
