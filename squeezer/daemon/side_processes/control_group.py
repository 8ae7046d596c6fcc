"""A side task's control group (cgroup v2): from it no process escapes, whatever its parent, group or session.

    OURS                     this process's own group, or one delegated with it: see `parent_of_groups`
    └─ squeezer-side-XXXX    of one side task, removed with it; its owner holds a lock on the directory
       ├─ side               the side task and all that it starts
       └─ search             its search worker, which is not for the gate and counts apart

The group is killed as a whole, lists its processes, counts their CPU time and, where the memory controller is
delegated, limits the sum of their memory. It is never frozen: that write waits for a mutex of the whole machine.
"""

import fcntl
import logging
import os
import select
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from squeezer.daemon.side_processes.orphans import CLEARING_S, clears_up, ends_by_itself, may_clear_up
from squeezer.daemon.side_processes.parent_group import NoGroupError, parent_of_groups, reason

_PREFIX = "squeezer-side-"
_NOT_HERE = 0
"""The kernel's number of a process in a group that this PID namespace does not show."""
_MAKE_TRIES = 3
_END_TIMEOUT_S = 15.0
"""A killed process ends at once, unless it waits for a device, or for a core on which it has idle time only."""
_DEAD_TIMEOUT_S = 5.0
"""The same of a side task whose owner was killed. Whoever waits starts something else."""

log = logging.getLogger(__name__)


class SideGroup:
    """The control group of one side task.

    Args:
        parent: the group in which it is made.
        most_bytes: what all its processes together may hold, if the memory controller is there.

    Attributes:
        path: its directory.
        limits_memory: whether it does.

    Raises:
        NoGroupError: there can be none; the text says why.
    """

    def __init__(self, parent: Path, most_bytes: int | None = None) -> None:
        self.path, self._lock_fd = _make(parent)
        self._side, self._search = self.path / "side", self.path / "search"
        self._procs_fd = self._stat_fd = -1
        try:
            self.limits_memory = most_bytes is not None and _has_memory(parent) and enable(self.path, "memory")
            for leaf in (self._side, self._search):
                leaf.mkdir()
            if (self.path / "cpu.weight").exists():  # else only the classes of its processes count
                (self.path / "cpu.idle").write_text("1", encoding="ascii")
            if self.limits_memory:
                (self._side / "memory.max").write_text(str(most_bytes), encoding="ascii")
            if not (self.path / "cgroup.kill").exists():
                raise NoGroupError("this kernel cannot kill a group as a whole; that needs Linux 5.14")
            self._procs_fd = os.open(self._side / "cgroup.procs", os.O_RDWR | os.O_CLOEXEC)
            self._stat_fd = os.open(self._side / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, NoGroupError) as error:
            self.close()
            raise NoGroupError(reason(error)) from error

    @property
    def for_search(self) -> Path:
        """The file into which the search worker writes itself."""
        return self._search / "cgroup.procs"

    def enter(self) -> None:
        """Called by the side task's process before its program starts: be in the group, and so are all descendants."""
        with suppress(OSError):  # `has` tells
            os.write(self._procs_fd, b"0")

    def has(self, pid: int) -> bool:
        """Whether process `pid` is in it."""
        return pid in (self.processes() or ())

    def processes(self) -> set[int] | None:
        """Of the side task, those that have not been reaped; None: the group is gone."""
        data = b""
        try:
            while more := os.pread(self._procs_fd, 1 << 16, len(data)):
                data += more
        except OSError:
            return None
        return set(map(int, data.split())) - {_NOT_HERE}

    def cpu_ns(self) -> int | None:
        """The CPU time of all processes of the side task, also of those that have ended; None: the group is gone."""
        try:
            lines = os.pread(self._stat_fd, 1 << 12, 0).splitlines()
        except OSError:
            return None
        return next((1000 * int(line.split()[1]) for line in lines if line.startswith(b"usage_usec ")), None)

    def let_clear_up(self) -> None:
        """See `orphans.let_clear_up`. It may kill all else in the group."""
        _let_clear_up(self.path)

    def close(self) -> None:
        """Kill all that is in it, and remove it."""
        for fd in (self._procs_fd, self._stat_fd):
            if fd >= 0:
                os.close(fd)
        self._procs_fd = self._stat_fd = -1
        _end(self.path, _END_TIMEOUT_S)
        if self.path.exists():
            log.warning("processes in %s do not end; the next side task that starts here removes it", self.path)
        os.close(self._lock_fd)


def make_side_group(most_bytes: int | None = None) -> SideGroup:
    """Make the control group of a side task, and remove those of owners that were killed.

    Args:
        most_bytes: see `SideGroup`.

    Raises:
        NoGroupError: there can be none; the text says why.
    """
    parent = parent_of_groups()
    _remove_dead(parent)
    return SideGroup(parent, most_bytes)


def remove_dead_groups() -> None:
    """Kill and remove the side tasks' groups of owners that were killed, where this process would make its own."""
    with suppress(NoGroupError):
        _remove_dead(parent_of_groups())


def enable(group: Path, controller: str) -> bool:
    """Have a controller for the groups in `group`; returns whether it is there.

    The kernel refuses where `group` holds processes itself, unless it is the root.
    """
    with suppress(OSError):
        if controller not in (group / "cgroup.subtree_control").read_text(encoding="ascii").split():
            (group / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
        return True
    return False


def _has_memory(parent: Path) -> bool:
    """Whether groups in `parent` may have a limit. Only a group that holds no process is changed for that."""
    with suppress(OSError):
        if not (parent / "cgroup.procs").read_bytes() or "memory" in (parent / "cgroup.subtree_control").read_text():
            return enable(parent, "memory")
    return False


def _make(parent: Path) -> tuple[Path, int]:
    """Make the directory and lock it. Until then another process may take it for one of a dead owner."""
    problem = "others remove it"
    for _ in range(_MAKE_TRIES):
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise NoGroupError(f"none can be made in {parent}: {error.strerror}") from error
        lock_fd = -1
        try:
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, lock_fd
        except OSError as error:
            problem = reason(error)
        if lock_fd >= 0:
            os.close(lock_fd)
        with suppress(OSError):
            path.rmdir()
    raise NoGroupError(f"none can be kept in {parent}: {problem}")


def _remove_dead(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        lock_fd = -1
        with suppress(OSError):  # another process was faster, or its owner lives
            if path.lstat().st_uid == os.geteuid():
                lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _ends_by_itself(path):
                    _end(path, _DEAD_TIMEOUT_S)
        if lock_fd >= 0:
            os.close(lock_fd)


def _ends_by_itself(path: Path) -> bool:
    """Whether a side task is in it that nobody may kill, or may be; a later start removes the group."""
    with suppress(OSError):  # its owner was killed while it made it
        processes = map(int, (path / "side" / "cgroup.procs").read_text(encoding="ascii").split())
        return any(pid == _NOT_HERE or ends_by_itself(pid) for pid in processes)
    return False


def _end(path: Path, timeout_s: float) -> None:
    """Kill all processes in the group `path`, wait for their ends, and remove it with those in it.

    Who is being moved into it, or comes back from another one, is killed too.
    """
    _let_clear_up(path)
    deadline_s = time.monotonic() + timeout_s
    with suppress(OSError):
        while _is_populated(path) and time.monotonic() < deadline_s:
            (path / "cgroup.kill").write_text("1", encoding="ascii")
            _await_empty(path, 0.1)
    for directory, _, _ in os.walk(path, topdown=False):  # the side task may have made further ones
        with suppress(OSError):
            os.rmdir(directory)


def _let_clear_up(path: Path) -> None:
    """See `orphans.let_clear_up`."""
    end_s = time.monotonic() + CLEARING_S
    with suppress(OSError):  # the group is gone
        while may_clear_up(pids := _processes(path)) and time.monotonic() < end_s:
            for pid in pids:
                with suppress(ProcessLookupError):
                    _signal_in(path, pid, signal.SIGCONT if clears_up(pid) else signal.SIGKILL)
            _await_empty(path, 0.1)


def _signal_in(path: Path, pid: int, number: signal.Signals) -> None:
    """Signal process `pid`, unless its number is by now that of another one, which is not in the group `path`."""
    pidfd = os.pidfd_open(pid)
    try:
        if pid in _processes(path):
            signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


def _processes(path: Path) -> set[int]:
    """All in the group `path`, and in those in it, that this PID namespace shows."""
    found = [file.read_text(encoding="ascii").split() for file in path.rglob("cgroup.procs")]
    return {int(pid) for pids in found for pid in pids} - {_NOT_HERE}


def _is_populated(path: Path) -> bool:
    return "populated 1" in (path / "cgroup.events").read_text(encoding="ascii")


def _await_empty(path: Path, timeout_s: float) -> None:
    """Wait until the group's state changes."""
    with (path / "cgroup.events").open("rb") as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        if b"populated 1" in events.read():
            poll.poll(1000 * timeout_s)
