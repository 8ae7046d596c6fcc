"""Which process a number means: process ids are used again, and differ between PID namespaces.

A process is named by its id and its start time, in one PID namespace of one boot of one machine. Only there do signals
reach the process that a page names, and only in one time namespace do all of them read the same clock.
"""

import os
import signal
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ENDED_STATES = ("Z", "X")
"""The kernel's letters for processes that run no more: zombies and dead ones."""


class Namespaces(NamedTuple):
    """Where process ids and times mean the same; every part fits into a word. 0: the kernel does not say."""

    boot_id_high: int
    boot_id_low: int
    pid_namespace: int
    time_namespace: int


def why_no_proc() -> str | None:
    """Say why /proc does not tell whom a process id means here; None: it does."""
    try:
        number = os.readlink("/proc/self")
    except OSError:
        return "/proc is not mounted, by which processes find each other"
    if number == str(os.getpid()):
        return None
    return "/proc belongs to another PID namespace, where process ids mean others; mount it anew (unshare --mount-proc)"


def why_no_pidfd() -> str | None:
    """Say why this process can hold and signal no process by a descriptor; None: it can."""
    try:
        pidfd = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(pidfd, 0)
        finally:
            os.close(pidfd)
    except (AttributeError, OSError) as error:  # no name: a Python that was built without
        return (
            f"signals to process descriptors are not allowed here ({error}), so a side task could not be stopped "
            f"safely; needs Linux 5.3 and a sandbox that allows pidfd_open and pidfd_send_signal"
        )
    return None


def own_namespaces() -> Namespaces:
    """Those of this process."""
    try:
        boot_id = UUID(_BOOT_ID.read_text(encoding="ascii").strip()).int
    except (OSError, ValueError):
        boot_id = 0
    low = 2**63 - 1  # words are signed; a bit less of an id does no harm
    return Namespaces(boot_id >> 64 & low, boot_id & low, _namespace("pid"), _namespace("time"))


def why_apart(found: Namespaces) -> str | None:
    """Say why processes in the namespaces `found` and this one cannot work together; None: they can."""
    here = own_namespaces()
    if found[:2] != here[:2]:
        return "was made on another machine, or before this one restarted; remove it or name another directory"
    if found.pid_namespace != here.pid_namespace:
        return (
            f"belongs to PID namespace {found.pid_namespace} and this process to {here.pid_namespace}, so neither "
            f"could signal the other; run both in one container, or in containers that share process ids (docker run "
            f"--pid, Kubernetes' shareProcessNamespace)"
        )
    if found.time_namespace != here.time_namespace:
        return (
            f"belongs to time namespace {found.time_namespace} and this process to {here.time_namespace}, so "
            f"their CLOCK_MONOTONIC may differ; run both in one time namespace"
        )
    return None


def start_time(pid: int) -> int:
    """When process `pid` started, in the kernel's ticks since boot; 0: there is none, or it has ended."""
    fields = _stat(pid)
    return 0 if fields[0] in ENDED_STATES else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a signal, such as Ctrl-Z's, has stopped process `pid`."""
    return _stat(pid)[0] == "T"


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; of one that is gone, that it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return [ENDED_STATES[0]]


def _namespace(kind: str) -> int:
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return 0
