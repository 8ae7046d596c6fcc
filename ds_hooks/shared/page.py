"""The shared page of one device: the words by which the main job, a daemon and a side task agree.

A small file, mapped by all three. Every field is one aligned 64-bit word with one writer, so a reader never sees half a
value. The main job's *bubble word* is the truth: `epoch << 1 | open`. The daemon's *plan* says ahead of time how long
the side task may run in the bubbles of each slot, and for which steps; by it the main job writes each bubble's permit.

Whoever uses a page holds a shared lock on its file (the kernel drops it with the process); the last one to leave
removes it, and a page that nobody holds is stale and is replaced.
"""

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

PAGE_MAGIC = 0x315A515342  # "BSQZ1"
PAGE_VERSION = 3
PAGE_BYTES = 163840
ENVIRONMENT_DIR = "SQUEEZER_DIR"


class PageError(Exception):
    """A page or its directory that must not be used; the message says why and what is allowed."""


class Field:
    """Index of each 64-bit word. Writers have a cache line (8 words) of their own.

    Plain numbers: read before every unit and in every hook, members of an enum would cost more than the words.
    """

    MAGIC = 0
    VERSION = 1
    # the main job
    MAIN_PID = 8
    BUBBLE = 9
    BUBBLE_START_NS = 10
    BUBBLE_END_NS = 11
    STEP = 12
    SLOT = 13
    PERMIT_UNTIL_NS = 14
    PERMIT_LENGTH_NS = 15
    HOOK_FAULTS = 16
    DROPPED = 17
    CLOCK_KIND = 18
    DUE_EPOCH = 19
    DUE_PERMIT_NS = 20
    MAIN_PEAK_BYTES = 21
    FREE_BYTES = 22
    PROBE = 23
    # the daemon
    DAEMON_PID = 24
    PLAN_FROM_STEP = 25
    PLAN_UNTIL_STEP = 26
    TELL_SLOT = 27
    SIDE_PROCESS = 28
    PREEMPTIVE = 29
    SIDE_LIMIT_BYTES = 30
    # the main job again
    PLAN_BASE_NS = 32
    # the side task
    SIDE_PID = 40
    SIDE_DOING = 41
    UNITS_RUN = 42
    UNITS_DECLINED = 43
    BUSY_NS = 44
    WORK = 45
    SIDE_BYTES = 46
    # the main job's device; in an emergency the daemon
    DEVICE_GATE = 48
    DEVICE_UUID = 49  # two words, the high one first; the main job's host writes them
    # the daemon: from here on a word per slot
    PERMITS = 64
    # and behind them some words per slot
    RENEWALS = 4096


PLANNED_SLOTS = Field.RENEWALS - Field.PERMITS
"""Bubbles of later slots are never opened."""
RENEWALS_PER_SLOT = 4
_LONGEST_US = 2**31 - 1


class Doing:
    """What the side task says of itself in `SIDE_DOING`; plain numbers likewise."""

    ASLEEP = 0
    UNIT = 1
    """Device work that ends by itself and was forecast to fit."""
    HOST = 2
    """Host work of unknown length, which the device may stop anywhere."""


class DeviceGate:
    """What `DEVICE_GATE` says: for how many µs the bubble that is open may be used. Units of a side task's stream wait
    on the device itself until it is enough for them."""

    CLOSED = 0
    FORCED = 2**31 - 1
    """Whoever waits must get through, since the process ends or is saved. A device compares with a sign."""

    @staticmethod
    def open_for(permit_ns: int) -> int:
        """The value for a bubble with this permit."""
        return max(1, min(permit_ns // 1000, DeviceGate.FORCED - 1))


class ClockKind:
    """How the main job knows a bubble's bounds: what `CLOCK_KIND` says."""

    CPU = 0
    """By the host's clock, which is true for a CPU."""
    CUDA = 1
    """The device itself writes the words, in its own order."""
    CUDA_POLLED = 2
    """A thread looks at events, and writes the words a little late."""


class Role(IntEnum):
    """Who writes which words; each role has one holder at a time."""

    MAIN = Field.MAIN_PID
    DAEMON = Field.DAEMON_PID
    SIDE = Field.SIDE_PID


def runtime_dir() -> Path:
    """Where this user's pages and sockets live when no run names a place: memory-backed, private, short.

    `$SQUEEZER_DIR` if set; else a folder of the user in /dev/shm, or in the temporary directory without one.
    """
    named = os.environ.get(ENVIRONMENT_DIR)
    if named:
        return Path(named)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return Path(base) / f"squeezer-{os.getuid()}"


def make_private_dir(path: Path) -> Path:
    """Create `path` with mode 0700, or accept it if it is exactly that and ours.

    Raises:
        PageError: it is not a directory, another user's, or open to others.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PageError(f"{path} is not a directory; pages and sockets need one of their own")
    if found.st_uid != os.getuid():
        raise PageError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}; name another directory")
    if found.st_mode & 0o077:
        raise PageError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}; allowed is 0700: chmod 700 {path}")
    return path


def page_path(directory: Path, local_rank: int) -> Path:
    """The page of the device that local rank `local_rank` uses."""
    return directory / f"device{local_rank}.page"


def socket_path(directory: Path, local_rank: int) -> Path:
    """The socket on which that device's daemon hears the main job."""
    return directory / f"device{local_rank}.sock"


class Page:
    """One mapped page. `words[Field.X]` reads and writes a word; hot paths may keep `words` in a local."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words: memoryview[int] = memoryview(self._map).cast("q")

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> "Page":
        """Map the page at `path`; with `create`, make it if there is none or a stale one.

        Raises:
            PageError: no page (without `create`), another user's, open to others, or of another version and in use.
        """
        if create:
            make_private_dir(path.parent)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                if not create:
                    raise PageError(f"no page at {path}: neither a main job nor a daemon is there") from None
                made = _publish_new(path)
                if made is None:
                    continue
                return cls(path, made)
            except OSError as error:
                raise PageError(f"cannot open the page {path}: {error.strerror}") from error
            try:
                _check_owner(path, fd)
                stale = create and _is_stale(path, fd)
                if stale or not _lock_shared(path, fd):
                    os.close(fd)
                    continue
                _check_version(path, fd)
                return cls(path, fd)
            except PageError:
                os.close(fd)
                raise

    def claim(self, role: Role) -> None:
        """Become the one writer of `role`'s words, until `close` or the end of this process.

        Raises:
            PageError: another process has that role on this device.
        """
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, role * 8, 8, 0))
        except OSError:
            holder = self.words[role]
            raise PageError(
                f"process {holder} is already the {role.name.lower()} of {self.path}; one device has one: "
                f"end that process, or name another directory with ${ENVIRONMENT_DIR}"
            ) from None
        self.words[role] = os.getpid()

    def is_open(self) -> bool:
        """Whether the main job says that it is in a bubble now."""
        return bool(self.words[Field.BUBBLE] & 1)

    def planned(self, step: int, slot: int) -> tuple[int, int]:
        """(permit, opens before) in ns, as `plan_slot` was told of the bubble of `slot` in `step`; (0, 0): shut."""
        words = self.words
        # in this order: a plan that changes meanwhile counts as the old one, the new one or none
        if words[Field.PLAN_UNTIL_STEP] > step >= words[Field.PLAN_FROM_STEP] and slot < PLANNED_SLOTS:
            word = words[Field.PERMITS + slot]
            return (word & 0xFFFFFFFF) * 1000, (word >> 32) * 1000
        return 0, 0

    def plan_steps(self, from_step: int, until_step: int) -> None:
        """Let the plan hold for these steps, and no others. For the daemon alone."""
        words = self.words
        words[Field.PLAN_UNTIL_STEP] = min(until_step, words[Field.PLAN_UNTIL_STEP])
        words[Field.PLAN_FROM_STEP] = from_step
        words[Field.PLAN_UNTIL_STEP] = until_step

    def plan_slot(
        self, slot: int, permit_ns: int, renewals: Sequence[tuple[int, int]] = (), opens_before_ns: int = 0
    ) -> None:
        """Let the side task run so long in the bubbles of `slot`. For the daemon alone.

        Args:
            slot: its number.
            permit_ns: from the bubble's start on; 0: not at all.
            renewals: (from, until) in ns after the bubble's start: when it may run again, if the bubble lasts so long.
            opens_before_ns: if not 0, all this counts from the end of the bubble before, and what begins so long after
                that end or later is not opened.
        """
        if slot >= PLANNED_SLOTS:
            return
        permit_us, opens_before_us = (min(-(-ns // 1000), _LONGEST_US) for ns in (permit_ns, opens_before_ns))
        # in one word each, so that nobody sees half of it
        self.words[Field.PERMITS + slot] = opens_before_us << 32 | permit_us
        first = Field.RENEWALS + RENEWALS_PER_SLOT * slot
        for at in range(RENEWALS_PER_SLOT):
            from_us, until_us = (min(ns // 1000, _LONGEST_US) for ns in renewals[at]) if at < len(renewals) else (0, 0)
            self.words[first + at] = from_us << 32 | until_us

    def forget_plan(self) -> None:
        """No bubble is opened any more. For the daemon alone."""
        self.plan_steps(0, 0)
        for slot in range(PLANNED_SLOTS):
            self.words[Field.PERMITS + slot] = 0

    def close(self) -> None:
        """Unmap; remove the file if nobody else holds it. A second call does nothing."""
        if self._fd < 0:
            return
        self.words.release()
        with contextlib.suppress(BufferError):  # a device may still write to it: it stays mapped
            self._map.close()
        if _sole_holder(self._fd) and _is_linked(self.path, self._fd):
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def find_renewal(words: "memoryview[int]", slot: int, elapsed_ns: int, needs_ns: float) -> tuple[int, int] | None:
    """The first renewal of a bubble's permit in which something that takes `needs_ns` fits from now on.

    Args:
        words: of the page.
        slot: of the bubble.
        elapsed_ns: how long ago that was from which its plan counts, which is its start if nothing else is said.
        needs_ns: how long what is to run takes.

    Returns:
        (from, until) in ns, counted likewise; `from` may be still to come. None: there is none.
    """
    if slot >= PLANNED_SLOTS:
        return None
    first = Field.RENEWALS + RENEWALS_PER_SLOT * slot
    for at in range(first, first + RENEWALS_PER_SLOT):
        word = words[at]
        from_ns, until_ns = (word >> 32) * 1000, (word & 0xFFFFFFFF) * 1000
        if max(elapsed_ns, from_ns) + needs_ns <= until_ns:
            return from_ns, until_ns
    return None


def _publish_new(path: Path) -> int | None:
    """Link a complete page, held by us, into place, so that nobody ever opens half of one or takes it for stale.

    Returns:
        Its file descriptor, or None if another process was faster.
    """
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".page")
    content = bytearray(PAGE_BYTES)
    words = memoryview(content).cast("q")
    words[Field.MAGIC] = PAGE_MAGIC
    words[Field.VERSION] = PAGE_VERSION
    try:
        os.write(fd, content)
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.link(name, path)
    except FileExistsError:
        os.close(fd)
        return None
    finally:
        os.unlink(name)
    return fd


def _check_owner(path: Path, fd: int) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.getuid():
        raise PageError(f"the page {path} belongs to user {found.st_uid}, not to {os.getuid()}")
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise PageError(f"the page {path} has mode {stat.S_IMODE(found.st_mode):04o}; allowed is a file with 0600")


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


def _is_linked(path: Path, fd: int) -> bool:
    try:
        at_path, held = path.lstat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (held.st_dev, held.st_ino)


def _sole_holder(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_stale(path: Path, fd: int) -> bool:
    """Remove the page if nobody holds it. True if the caller must look again."""
    if not _sole_holder(fd):
        return False
    if _is_linked(path, fd):
        path.unlink(missing_ok=True)
    return True


def _lock_shared(path: Path, fd: int) -> bool:
    """Hold the page. False if it was removed meanwhile and the caller must look again."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False  # somebody is removing it right now
    return _is_linked(path, fd)
