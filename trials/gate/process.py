"""Requests of a side task's processes to the kernel."""

import ctypes
import os
import signal

from trials.gate.base import GATE_SIGNALS

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def wake_promptly() -> None:
    """Have the kernel end the sleeps of this thread, and of all that it starts later, within a microsecond."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))


def run_when_idle() -> None:
    """Run this thread only when nothing else wants the core (SCHED_IDLE), for work that nothing waits for.

    Only a privileged process can take that back.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def nap(seconds: float) -> int | None:
    """Sleep in the kernel for `seconds`, or until one of the gate's signals comes. Returns the signal, or None."""
    received = signal.sigtimedwait(GATE_SIGNALS, seconds)
    return None if received is None else received.si_signo
