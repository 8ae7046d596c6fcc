"""The private directory of one run's pages and sockets: whose it is, and its removal once it is nobody's.

`ds_squeeze` removes it at its end. If it was killed, the run's last daemon does, or else the next `ds_squeeze`.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from ds_hooks.shared.page.file import Page, PageError, page_path, socket_of
from ds_hooks.shared.page.layout import Role
from ds_hooks.shared.processes.identity import own_namespaces
from squeezer.daemon.deepspeed_buffers import remove_buffers

LAUNCHER_LOCK = "launcher.lock"


def claim_directory(directory: Path, port: int | None = None) -> int:
    """Mark `directory` as in use while this process lives; returns the descriptor that holds the lock.

    The lock is taken before its file gets its name, so no other process finds it free.

    Args:
        directory: the run's.
        port: the master port that was chosen for this run. DeepSpeed's buffers of that port go with the directory.
    """
    made = directory / f"{LAUNCHER_LOCK}.new"
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(descriptor, f"{own_namespaces().pid_namespace} {port or ''}".encode("ascii"))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(directory / LAUNCHER_LOCK)
    return descriptor


def remove_dead_directory(directory: Path) -> bool:
    """Remove a run's directory, and DeepSpeed's buffers of its port, if launcher, daemons and ranks have all ended.

    Returns:
        Whether it was removed.
    """
    try:
        descriptor = os.open(directory / LAUNCHER_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # somebody else was faster, or it has no launcher on this machine
    try:
        # shared: two daemons that end at once must not take each other for the launcher
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        namespace, _, port = os.pread(descriptor, 64, 0).decode("ascii").partition(" ")
    except OSError:
        return False  # its launcher lives
    finally:
        os.close(descriptor)
    if namespace and int(namespace) != own_namespaces().pid_namespace:
        return False  # who of that run lives cannot be seen from here
    if running_daemons(directory) or (port and not remove_buffers(int(port))):
        return False
    shutil.rmtree(directory, ignore_errors=True)
    return True


def leave_directory(directory: Path) -> None:
    """Remove a run's directory if it is dead or empty, and the directory of all runs if this was the last one there."""
    remove_dead_directory(directory)
    with suppress(OSError):  # it is gone, or others use it
        directory.rmdir()
    with suppress(OSError):  # other runs are there, or it is another's to remove
        directory.parent.rmdir()


def remove_left(directory: Path, local_rank: int) -> bool:
    """Remove the page and the socket that a killed daemon has left, as far as nobody uses them.

    Args:
        directory: of pages and sockets.
        local_rank: the device's number.

    Returns:
        False if the device has another daemon, whose all that is.
    """
    try:
        page = Page.open(page_path(directory, local_rank), create=False)
    except PageError:
        return True
    try:
        page.claim(Role.DAEMON)
        socket_of(page.path).unlink(missing_ok=True)
    except PageError:
        return False
    finally:
        page.close()
    return True


def running_daemons(directory: Path) -> list[int]:
    """Find the daemons that `rank.py` started for the run in `directory` and that still run; returns their ids."""
    running = []
    for path in sorted(directory.glob("daemon*.pid")):
        try:
            process = psutil.Process(int(path.read_text(encoding="ascii")))
            # another process with the same number does not name this file
            alive = process.status() != psutil.STATUS_ZOMBIE and str(path) in process.cmdline()
        except (psutil.Error, ValueError, OSError):
            continue
        if alive:
            running.append(process.pid)
    return running
