"""The file behind a shared page: its path, its owner, the roles of its writers, and its life.

Every process that uses a page holds a shared lock on its file, which the kernel drops with the process. The last one
to leave removes the file. A page that nobody holds is stale, and the next process replaces it.

A role is no lock: a forked child would inherit that, and keep the role of a parent that was killed. It belongs to the
living process that the page names by id and start time.
"""

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import tempfile
import time
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path

from ds_hooks.shared.page.layout import PAGE_BYTES, PAGE_MAGIC, PAGE_VERSION, Field, Role
from ds_hooks.shared.private_file import OthersError, check_ours, make_parents
from ds_hooks.shared.processes.identity import Namespaces, own_namespaces, start_time, why_apart, why_no_proc

DIRECTORY_VARIABLE = "SQUEEZER_DIR"
"""The environment variable that names the directory of pages and sockets."""
SOCKET_PATH_MAX_BYTES = 107
"""The kernel's limit on a socket's path."""


CLAIM_TIMEOUT_S = 1.0
"""How long other processes may keep this one from opening a page, or from claiming a role; it takes microseconds."""

_OPEN_PAGES: "weakref.WeakSet[Page]" = weakref.WeakSet()


class PageError(Exception):
    """A page or its directory must not be used; the message says why and what is allowed."""


def runtime_dir() -> Path:
    """The directory of this user's pages and sockets where no run names another: memory-backed, private, a short path.

    It is `$SQUEEZER_DIR` if set, else a folder of the user's in /dev/shm, or else in the temporary directory.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named).absolute()  # a script may change its directory
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(base) / f"squeezer-{os.getuid()}"


def make_private_dir(path: Path) -> Path:
    """Create `path` with mode 0700, or accept it if it has that mode and this user owns it.

    Raises:
        PageError: it is not a directory, cannot be made, belongs to another user, or is open to others; or a directory
            above it was made by another user where all may write.
    """
    try:
        check_ours(path.parent)
        make_parents(path)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OthersError as error:
        raise PageError(f"{error.strerror}; name another directory with ${DIRECTORY_VARIABLE}") from None
    except OSError as error:
        raise PageError(
            f"cannot make the directory {path}: {error.strerror}; name another one with ${DIRECTORY_VARIABLE}"
        ) from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PageError(f"{path} is not a directory; pages and sockets need one of their own")
    if found.st_uid != os.getuid():
        raise PageError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}; name another directory")
    if found.st_mode & 0o077:
        raise PageError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}; allowed: 0700 (chmod 700 {path})")
    return path


def page_path(directory: Path, local_rank: int | str) -> Path:
    """The page of the device of local rank `local_rank`; of all devices, as a pattern, with "*"."""
    return directory / f"device{local_rank}.page"


def socket_path(directory: Path, local_rank: int) -> Path:
    """The socket on which that device's daemon receives the main job's messages."""
    return socket_of(page_path(directory, local_rank))


def socket_of(page: Path) -> Path:
    """The same, by the page's path."""
    return page.with_suffix(".sock")


def endpoint_of(socket: Path) -> bytes:
    """What ZeroMQ calls the socket at that path, whatever bytes it has."""
    return b"ipc://" + os.fsencode(socket)


def why_too_long(socket: Path) -> str | None:
    """Say why there can be no socket at that path; None: there can."""
    length_bytes = len(os.fsencode(socket))
    if length_bytes <= SOCKET_PATH_MAX_BYTES:
        return None
    return (
        f"the socket path {socket} has {length_bytes} bytes; allowed: {SOCKET_PATH_MAX_BYTES}; set "
        f"${DIRECTORY_VARIABLE} to a shorter directory"
    )


class Page:
    """One mapped page. Use `Page.open`.

    Attributes:
        path: its file.
        words: `words[Field.X]` reads and writes a word. Hot paths may keep it.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._roles: list[Role] = []
        self._map = _map(path, fd)
        self.words: memoryview[int] = memoryview(self._map).cast("q")
        _OPEN_PAGES.add(self)

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> "Page":
        """Map the page at `path`.

        Args:
            path: see `page_path`.
            create: make the page if there is none or a stale one.

        Raises:
            PageError: there is none (without `create`) or no room for one, or it belongs to another user, is open to
                others, or is in use with another version, or from a place where process ids or times mean others.
        """
        _prepare(path, create)
        deadline = time.monotonic() + CLAIM_TIMEOUT_S
        while True:
            if time.monotonic() > deadline:
                raise PageError(
                    f"another process locks {path}, or makes and removes it all the time; end that process, or name "
                    f"another directory with ${DIRECTORY_VARIABLE}"
                )
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                if not create:
                    raise PageError(f"no page at {path}: no main job or daemon is running") from None
                made = cls._make(path)
                if made is None:
                    continue
                return made
            except OSError as error:
                raise PageError(f"cannot open the page {path}: {error.strerror}") from error
            try:
                _check_owner(path, fd)
                stale = create and _is_stale(path, fd)
                if stale or not _lock_shared(path, fd):
                    os.close(fd)
                    time.sleep(0.001)
                    continue
                _check_version(path, fd)
                _check_namespaces(path, fd)
                return cls(path, fd)
            except PageError:
                os.close(fd)
                raise

    @classmethod
    def _make(cls, path: Path) -> "Page | None":
        """A new page; None: another process was faster."""
        fd = _publish_new(path)
        if fd is None:
            return None
        try:
            return cls(path, fd)
        except PageError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    def claim(self, role: Role) -> None:
        """Become the only writer of `role`'s words, until `close` or the end of this process.

        Raises:
            PageError: another process that still runs has that role on this device.
        """
        words, own_pid = self.words, os.getpid()
        with self._claiming():
            holder = self.holder(role)
            is_own_from_before_exec = holder == own_pid and not any(
                role in page._roles and _same_file(page._fd, self._fd) for page in _OPEN_PAGES
            )
            if holder and not is_own_from_before_exec:
                raise PageError(
                    f"process {holder} is already the {role.name.lower()} of {self.path}; a device has only one: "
                    f"end that process, or name another directory with ${DIRECTORY_VARIABLE}"
                )
            words[role.start] = start_time(own_pid)
            words[role] = own_pid
            self._roles.append(role)

    def holder(self, role: Role) -> int:
        """The process that has `role` and still runs; 0: none."""
        pid = self.words[role]
        return pid if pid and start_time(pid) == self.words[role.start] else 0

    @contextlib.contextmanager
    def _claiming(self) -> Iterator[None]:
        """Let one process at a time check that a role is free and take it: microseconds."""
        deadline = time.monotonic() + CLAIM_TIMEOUT_S
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range_lock(fcntl.F_WRLCK))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise PageError(f"another process claims {self.path} for over {CLAIM_TIMEOUT_S:.0f} s") from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _range_lock(fcntl.F_UNLCK))

    def is_open(self) -> bool:
        """Whether the bubble word is open now."""
        return bool(self.words[Field.BUBBLE] & 1)

    def close(self) -> None:
        """Give back its roles, unmap the page, and remove the file if nobody else holds it.

        A second call does nothing, nor does one in a forked child: page and roles are its parent's.
        """
        if self._fd < 0:
            return
        for role in self._roles:
            self.words[role] = 0
        self._roles.clear()
        self.words.release()
        with contextlib.suppress(BufferError):  # a device may still write to it: it stays mapped
            self._map.close()
        if _sole_holder(self._fd) and _is_linked(self.path, self._fd):
            with contextlib.suppress(OSError):  # it is read-only by now, say
                self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _prepare(path: Path, create: bool) -> None:
    """Make sure that process ids can be understood here, and that there is a directory for the page."""
    if (why := why_no_proc()) is not None:
        raise PageError(why)
    if create:
        make_private_dir(path.parent)


def _map(path: Path, fd: int) -> mmap.mmap:
    """Map the page that is open as `fd`.

    Raises:
        PageError: the file system cannot share memory, or this process may have no more of it, or of files.
    """
    try:
        # a map keeps a copy of its descriptor, with the lock of that: so it gets one that has none
        unlocked_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(unlocked_fd, PAGE_BYTES)
        finally:
            os.close(unlocked_fd)
    except OSError as error:
        raise PageError(f"cannot map the page {path}: {error.strerror}") from error


def _publish_new(path: Path) -> int | None:
    """Link a complete page that this process holds into place. So nobody opens half of one or takes it for stale.

    Returns:
        Its file descriptor, or None if another process was faster.

    Raises:
        PageError: there is no room for it.
    """
    no_room = f"cannot make the page {path}: {{}}; name another directory with ${DIRECTORY_VARIABLE}"
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=".page")
    except OSError as error:
        raise PageError(no_room.format(error.strerror)) from None
    content = bytearray(PAGE_BYTES)
    words = memoryview(content).cast("q")
    words[Field.MAGIC] = PAGE_MAGIC
    words[Field.VERSION] = PAGE_VERSION
    # one word each, side by side
    words[Field.BOOT_ID : Field.BOOT_ID + len(Namespaces._fields)] = array("q", own_namespaces())
    rest = memoryview(content)
    try:
        os.fchmod(fd, 0o600)  # a umask may take the owner's own rights
        while rest:  # what is nearly full takes a part
            rest = rest[os.write(fd, rest) :]
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.link(name, path)
    except OSError as error:
        os.close(fd)
        if isinstance(error, FileExistsError):
            return None
        raise PageError(no_room.format(error.strerror)) from None
    finally:
        os.unlink(name)
    return fd


def _check_owner(path: Path, fd: int) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.getuid():
        raise PageError(f"the page {path} belongs to user {found.st_uid}, not to {os.getuid()}")
    if not stat.S_ISREG(found.st_mode):
        raise PageError(f"the page {path} is not a file; remove it or name another directory")
    if found.st_mode & 0o077:
        raise PageError(f"the page {path} has mode {stat.S_IMODE(found.st_mode):04o}; allowed: a file with 0600")


def _check_version(path: Path, fd: int) -> None:
    header = os.pread(fd, 16, 0)
    magic, version = memoryview(header).cast("q") if len(header) == 16 else (0, 0)
    if magic != PAGE_MAGIC or os.fstat(fd).st_size != PAGE_BYTES:
        raise PageError(f"{path} is not a page of this project; remove it or name another directory")
    if version != PAGE_VERSION:
        raise PageError(
            f"the page {path} has version {version} and is in use; this side speaks version {PAGE_VERSION}: "
            f"run the same release on both sides"
        )


def _check_namespaces(path: Path, fd: int) -> None:
    words = memoryview(os.pread(fd, 8 * len(Namespaces._fields), 8 * Field.BOOT_ID)).cast("q")
    why = why_apart(Namespaces(*words))
    if why is not None:
        raise PageError(f"the page {path} {why}")


def _range_lock(kind: int) -> bytes:
    """Of the creator's words, which nobody locks for anything else."""
    return struct.pack("hhqqi", kind, os.SEEK_SET, 0, 8, 0)


def _same_file(fd: int, other_fd: int) -> bool:
    return os.path.sameopenfile(fd, other_fd)


def _let_go_in_child() -> None:
    """A forked child, such as a data-loading worker, must not hold its parent's pages: it may outlive it."""
    for page in _OPEN_PAGES:
        if page._fd >= 0:
            os.close(page._fd)
            page._fd = -1
            page._roles.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _is_linked(path: Path, fd: int) -> bool:
    try:
        at_path, held = path.lstat(), os.fstat(fd)
    except OSError:  # it is gone, or out of reach
        return False
    return (at_path.st_dev, at_path.st_ino) == (held.st_dev, held.st_ino)


def _sole_holder(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_stale(path: Path, fd: int) -> bool:
    """Remove the page if nobody holds it. Returns True if the caller must look again."""
    if not _sole_holder(fd):
        return False
    if _is_linked(path, fd):
        path.unlink(missing_ok=True)
    return True


def _lock_shared(path: Path, fd: int) -> bool:
    """Hold the page. Returns False if it was removed meanwhile, so that the caller must look again."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False  # another process is removing it
    return _is_linked(path, fd)
