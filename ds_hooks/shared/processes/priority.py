"""How a process of ours that may not be idle leaves the core to the main job."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MOST_NICE = 19
"""The least share of a core that others want."""
HOLDER_NICE = 10
"""A busy main job still keeps nine tenths of its core."""
_PR_CAPBSET_DROP = 24
_CAP_SYS_NICE = 23
_libc = ctypes.CDLL(None)


def leave_real_time() -> None:
    """Be scheduled as usual: what a job of the real-time classes starts would keep its core from it."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def yield_the_core() -> None:
    """Let this thread, and what it starts, have a small share of a busy core, and not take it at once when it is woken.

    Unlike the idle class, this can be joined before what must not be idle is forked. Called again, it changes nothing,
    nor in a job that has the idle class itself, which only a privileged process can leave.
    """
    if os.sched_getscheduler(0) not in (os.SCHED_BATCH, os.SCHED_IDLE):
        os.nice(HOLDER_NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def never_rise() -> None:
    """Let no program that this process becomes, nor what that starts, take a better class or niceness than it has.

    Otherwise a privileged side task could leave the idle class, or join a real-time one, which no main job takes the
    core from. It keeps all other rights. To be called before `exec`.
    """
    _libc.prctl(_PR_CAPBSET_DROP, _CAP_SYS_NICE, 0, 0, 0)  # refused where it has not got it
    for limit in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
        resource.setrlimit(limit, (0, 0))


@contextmanager
def starting_patient_threads() -> Iterator[None]:
    """A thread that this one starts within it takes the core from nobody when it is woken (SCHED_BATCH).

    A thread of ZeroMQ's would: a main job that sends on its only core would wait for it, and for the daemon that it
    wakes in turn, before it can go on to ask for data. In any other class than the usual one, it changes nothing.
    """
    is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
    with suppress(OSError):  # a sandbox forbids it
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            if is_usual:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
