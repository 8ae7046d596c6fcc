"""Cleans up what runs leave behind: old records, daemons that are still ending, pages, child processes."""

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from ds_hooks.shared.page_file import (
    DIRECTORY_VARIABLE,
    SOCKET_PATH_MAX_BYTES,
    PageError,
    make_private_dir,
    socket_path,
)
from ds_hooks.shared.private_file import make_dir
from squeezer.records.layout import files_of

_AFTER_SIGNAL_S = 5.0
_DEEPSPEED_TEARDOWN_S = 40.0

log = logging.getLogger(__name__)


class RunInUseError(Exception):
    """Another run uses this directory; the text says which."""


class RunLock:
    """Allows one launcher per run directory. A context manager; the kernel releases it if the process dies.

    The lock's file says where the daemons are, for the launcher that follows a crash.
    """

    def __init__(self, run: Path, directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._fd = -1

    def __enter__(self) -> "RunLock":
        """Take the directory, and make it if needed.

        Raises:
            RunInUseError: another launcher uses it, or a daemon that outlived its launcher.
        """
        try:
            make_dir(self._run)
            self._fd = os.open(self._run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunInUseError(f"cannot write to run.directory {self._run}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._close()
            raise RunInUseError(f"another ds_squeeze uses run.directory {self._run}; name another one") from None
        earlier = os.pread(self._fd, 4096, 0).decode(errors="replace")
        running = running_daemons(Path(earlier)) if earlier else []
        if running:
            self._close()
            raise RunInUseError(f"daemons of an earlier run still use run.directory {self._run}: processes {running}")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(self._directory).encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the directory."""
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


_LAUNCHER_LOCK = "launcher.lock"
_RUN_PREFIX = "run-"
_LONGEST_PARENT = SOCKET_PATH_MAX_BYTES - len(str(socket_path(Path(f"/{_RUN_PREFIX}abcdefgh"), 999)))


def fresh_directory(parent: Path) -> Path:
    """Make a private place in `parent` for one run's pages and sockets. Dead ones there are removed first.

    Raises:
        PageError: `parent` is not private, or its path is too long for sockets.
        OSError: it cannot be made, or is full.
    """
    parent = parent.absolute()
    if len(str(parent)) > _LONGEST_PARENT:
        raise PageError(
            f"{parent} is too long a path for sockets; allowed: {_LONGEST_PARENT} characters; "
            f"name another directory with ${DIRECTORY_VARIABLE}"
        )
    while True:
        make_private_dir(parent)
        remove_dead_directories(parent)
        try:
            return Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir=parent))
        except FileNotFoundError:
            continue  # another run, the last one here, has just removed it


def claim_directory(directory: Path) -> int:
    """Mark `directory` as in use while this process lives; returns the descriptor that holds the lock.

    The lock is taken before its file gets its name, so no other process finds it free.
    """
    made = directory / f"{_LAUNCHER_LOCK}.new"
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(directory / _LAUNCHER_LOCK)
    return descriptor


def remove_dead_directories(parent: Path) -> list[Path]:
    """Remove the directories of killed launchers whose daemons are gone too; returns them."""
    dead = []
    for lock in sorted(parent.glob(f"{_RUN_PREFIX}*/{_LAUNCHER_LOCK}")):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another launcher was faster
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its launcher lives
        finally:
            os.close(descriptor)
        if not running_daemons(lock.parent):
            shutil.rmtree(lock.parent, ignore_errors=True)
            dead.append(lock.parent)
    return dead


def move_records_aside(run: Path) -> int:
    """Move an earlier run's records to `previous/`, replacing those there; returns how many. Other files stay."""
    previous = run / "previous"
    found = files_of(run)
    if not found:
        return 0
    make_dir(previous)
    for older in files_of(previous):
        older.unlink()
    for path in found:
        path.rename(previous / path.name)
    return len(found)


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


def end_daemons(running: Callable[[], list[int]], timeout_s: float) -> None:
    """Wait until no daemon runs. After `timeout_s`, log it and terminate them; then kill them."""
    _wait(running, timeout_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = running()
        if not left:
            return
        log.warning("daemons %s do not end: sending %s", left, number.name)
        for pid in left:
            _signal(pid, number, running)
        _wait(running, _AFTER_SIGNAL_S)


def _signal(pid: int, number: signal.Signals, running: Callable[[], list[int]]) -> None:
    """Through a pidfd, and only if `pid` still is what `running` says, so that no other process is ever hit."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it has ended meanwhile
    try:
        if pid in running():
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _wait(running: Callable[[], list[int]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)


def stop_children(patience_s: float) -> None:
    """End DeepSpeed's launcher if it still runs; it ends the ranks.

    Args:
        patience_s: how long it may take to end by itself: Ctrl-C reached it too.
    """
    children = psutil.Process().children()
    _, alive = psutil.wait_procs(children, timeout=patience_s)
    for child in alive:
        child.terminate()
    _, alive = psutil.wait_procs(alive, timeout=_DEEPSPEED_TEARDOWN_S)
    for child in alive:
        child.kill()


def remove_deepspeed_buffers(port: int, memory: Path = Path("/dev/shm")) -> None:
    """Remove the shared memory (66 MiB per rank) that DeepSpeed's CPU reduction leaves under the job's master port.

    Jobs on DeepSpeed's default port reuse it. Jobs on ports of their own would leave more after every run.
    """
    for path in memory.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink(missing_ok=True)


def close_directory(directory: Path) -> None:
    """End this run's remaining daemons now, and remove its pages and sockets; and the place of all runs, if empty."""
    end_daemons(lambda: running_daemons(directory), 0.0)
    if not running_daemons(directory):
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # other runs are there, or it is another's to remove
            directory.parent.rmdir()
