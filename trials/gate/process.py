"""Requests of a side task's processes to the kernel."""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from trials.gate.base import GATE_SIGNALS

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def wake_promptly() -> None:
    """Have the kernel end the sleeps of this thread, and of all that it starts later, within a microsecond."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))


def die_first_when_memory_is_short() -> None:
    """Have the kernel end this process and its children before the main job, where the machine's memory runs out."""
    with suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def limit_memory(most_bytes: int) -> None:
    """Limit what this process and each of its children may allocate.

    RLIMIT_DATA counts private writable memory, so an allocation fails beyond it. RLIMIT_AS would also count the address
    space that CUDA reserves.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def run_when_idle() -> None:
    """Run this thread only when nothing else wants the core (SCHED_IDLE), for work that nothing waits for.

    Only a privileged process can take that back.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def nap(seconds: float) -> int | None:
    """Sleep in the kernel for `seconds`, or until one of the gate's signals comes. Returns the signal, or None."""
    received = signal.sigtimedwait(GATE_SIGNALS, seconds)
    return None if received is None else received.si_signo
