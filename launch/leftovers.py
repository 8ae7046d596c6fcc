"""Cleans up what runs leave behind: old records, daemons that are still ending, pages, buffers, child processes."""

import errno
import fcntl
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from ds_hooks.shared.page.file import (
    DIRECTORY_VARIABLE,
    SOCKET_PATH_MAX_BYTES,
    PageError,
    make_private_dir,
    socket_path,
)
from ds_hooks.shared.private_file import make_dir
from ds_hooks.shared.processes.identity import is_stopped
from squeezer.daemon.deepspeed_buffers import remove_buffers
from squeezer.daemon.run_directory import LAUNCHER_LOCK, leave_directory, remove_dead_directory, running_daemons
from squeezer.daemon.side_processes.control_group import remove_dead_groups
from squeezer.daemon.side_processes.temporary_folder import remove_folders
from squeezer.records.in_use import ranks_in_use
from squeezer.records.layout import files_of, temporary_folder_records

_AFTER_SIGNAL_S = 5.0
RANK_ENDS_WITHIN_S = 30.0
"""DeepSpeed's launcher asks one rank after another to end, waits for each this long, and then kills it."""
_BESIDES_RANKS_S = 10.0

log = logging.getLogger(__name__)


class RunInUseError(Exception):
    """Another run uses this directory; the text says which."""


_FULL = (errno.ENOSPC, errno.EDQUOT)


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
            RunInUseError: another launcher uses it, or a daemon that outlived its launcher; or it cannot be written to.
            OSError: its disk is full.
        """
        try:
            make_dir(self._run)
            self._fd = os.open(self._run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise RunInUseError(f"cannot write to run.directory {self._run}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise RunInUseError(f"another ds_squeeze uses run.directory {self._run}; name another one") from None
        except OSError:
            pass  # a file system without locks, as Lustre without its option `flock`
        earlier = os.fsdecode(os.pread(self._fd, 4096, 0))
        running = running_daemons(Path(earlier)) if earlier else []
        if running:
            _continue(lambda: running_daemons(Path(earlier)))  # their launcher would have, but it was killed
            self._close()
            raise RunInUseError(f"daemons of an earlier run still use run.directory {self._run}: processes {running}")
        os.ftruncate(self._fd, 0)
        try:
            os.pwrite(self._fd, os.fsencode(self._directory), 0)
        except OSError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the directory."""
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


_RUN_PREFIX = "run-"
_LONGEST_PARENT = SOCKET_PATH_MAX_BYTES - len(str(socket_path(Path(f"/{_RUN_PREFIX}abcdefgh"), 999)))


def fresh_directory(parent: Path) -> Path:
    """Make a private directory in `parent` for one run's pages and sockets. Dead ones there are removed first.

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


def remove_dead_directories(parent: Path) -> list[Path]:
    """Remove the directories of killed launchers of which nothing lives; returns them."""
    locks = sorted(parent.glob(f"{_RUN_PREFIX}*/{LAUNCHER_LOCK}"))
    return [lock.parent for lock in locks if remove_dead_directory(lock.parent)]


def move_records_aside(run: Path, rank: int | None = None) -> int:
    """Move an earlier run's records to `previous/`, replacing those there. Other files stay.

    Args:
        run: the directory.
        rank: only this one's; None: all but of ranks whose daemons write now. Another node's launcher was faster.

    Returns:
        How many files were moved.
    """
    in_use = tuple(f"rank{each}." for each in ranks_in_use(run))
    named = "" if rank is None else f"rank{rank}."

    def earlier(folder: Path) -> list[Path]:
        return [path for path in files_of(folder) if path.name.startswith(named) and not path.name.startswith(in_use)]

    previous, found = run / "previous", earlier(run)
    if not found:
        return 0
    make_dir(previous)
    for older in earlier(previous):
        older.unlink(missing_ok=True)
    for path in found:
        with suppress(FileNotFoundError):  # another node's launcher was faster
            path.rename(previous / path.name)
    return len(found)


def remove_temporary_folders(run: Path) -> None:
    """Remove those of side tasks whose daemons were killed. Daemons that still write are other nodes'."""
    in_use = ranks_in_use(run)
    remove_folders(path for rank, path in temporary_folder_records(run).items() if rank not in in_use)


def await_records(run: Path, timeout_s: float) -> None:
    """Wait until nobody writes records in `run`, on any node, but no longer than `timeout_s`."""
    _wait(lambda: sorted(ranks_in_use(run)), timeout_s)


def end_daemons(running: Callable[[], list[int]], timeout_s: float) -> None:
    """Wait until no daemon runs. After `timeout_s`, log it and terminate them; then kill them.

    Those that somebody stops meanwhile are continued: they end once their job has ended.
    """
    _await_end(running, timeout_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = running()
        if not left:
            return
        log.warning("daemons %s do not end: sending %s", left, number.name)
        for pid in left:
            _signal(pid, number, running)
        _await_end(running, _AFTER_SIGNAL_S)


def _await_end(running: Callable[[], list[int]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _continue(running) and time.monotonic() < deadline:
        time.sleep(0.1)


def _continue(running: Callable[[], list[int]]) -> list[int]:
    """Let those run on that somebody has stopped; returns all that run."""
    left = running()
    for pid in filter(is_stopped, left):
        _signal(pid, signal.SIGCONT, running)
    return left


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


def children() -> set[int]:
    """This process's children: a program keeps those of the one that it replaces."""
    return {child.pid for child in psutil.Process().children()}


def stop_children(patience_s: float | None, spare: Collection[int] = ()) -> None:
    """End DeepSpeed's launcher if it still runs; it ends the ranks. If it does not, they are killed with it.

    Args:
        patience_s: how long it may take to end by itself; None: it was asked already, so as long as its ranks may take.
            To ask it again would ask them again, too, perhaps while they save.
        spare: children that are not its processes. The first process of a container has the daemons as children, too.
    """
    started = [child for child in psutil.Process().children() if child.pid not in spare]
    _, alive = psutil.wait_procs(started, timeout=_teardown_s(started) if patience_s is None else patience_s)
    for child in alive:
        child.terminate()
    _, alive = psutil.wait_procs(alive, timeout=_teardown_s(alive))
    for process in [each for child in alive for each in (child, *_ranks(child, with_theirs=True))]:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.kill()


def _teardown_s(launchers: Collection[psutil.Process]) -> float:
    """How long they may take to end their ranks."""
    return _BESIDES_RANKS_S + RANK_ENDS_WITHIN_S * sum(len(_ranks(each)) for each in launchers)


def _ranks(launcher: psutil.Process, *, with_theirs: bool = False) -> list[psutil.Process]:
    """What a launcher has started, with what that has started if asked for."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found = launcher.children(recursive=with_theirs)
    return found


def close_directory(directory: Path, port: int | None = None) -> None:
    """End this run's remaining daemons now, and remove what it has in shared memory.

    Args:
        directory: the run's; this process has let go of it.
        port: see `claim_directory`.
    """
    end_daemons(lambda: running_daemons(directory), 0.0)
    remove_dead_groups()
    if port is not None:
        remove_buffers_soon(port)
    leave_directory(directory)


def remove_buffers_soon(port: int) -> None:
    """Remove DeepSpeed's buffers of this job. Ranks that were just killed may hold them for another moment."""
    deadline = time.monotonic() + _AFTER_SIGNAL_S
    while not remove_buffers(port) and time.monotonic() < deadline:
        time.sleep(0.1)
