"""Whose records are being written now: a daemon holds a lock on its file of events.

Where nodes share a run's directory, their launchers see each other's daemons by nothing else. If the file system passes
no locks from host to host, only daemons of the same host are seen.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ds_hooks.shared.private_file import open_private
from squeezer.records.layout import events_path, recorded_ranks


def hold(run: Path, rank: int) -> int:
    """Show that the records of `rank` are being written; returns the descriptor that does, until it is closed.

    Raises:
        OSError: the file of events cannot be opened or made.
    """
    path = events_path(run, rank)
    while True:
        descriptor = open_private(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # shared: of two daemons, each counts
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # a launcher has moved it aside meanwhile


def ranks_in_use(run: Path) -> set[int]:
    """The ranks whose daemons are writing records in `run`, also on other nodes."""
    return {rank for rank in recorded_ranks(run) if _is_held(events_path(run, rank))}


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
