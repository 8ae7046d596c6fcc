"""Requests of a side task's processes to the kernel."""

import ctypes
import os
import resource
import signal
import threading
from contextlib import suppress
from pathlib import Path

from ds_hooks.shared.page.layout import PROCESS_WORDS, Field
from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.processes.priority import MOST_NICE
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


def enter_group(processes: Path | None) -> None:
    """Move this process to another control group, whose `cgroup.procs` is `processes`, if there is one."""
    if processes is not None:
        with suppress(OSError):  # the group is gone, or the kernel refuses: then it stays where it is
            processes.write_text("0", encoding="ascii")


def run_when_idle() -> None:
    """Run this thread only when nothing else wants the core (SCHED_IDLE), for work that nothing waits for.

    Only a privileged process can take that back.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run_all_when_idle() -> None:
    """The same for all threads that this process has, and those that they start.

    Such a process never takes the core from the main job: not when it is woken, although the main job still has to send
    or to ask for what it will wait for, and not when the main job wakes. One of niceness 19 does both, for up to a tick
    of the kernel (4 ms): measured by `benchmarks.wake_up`.
    """
    for thread in _own_threads():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def run_all_nicely() -> None:
    """Give all threads that this process has, and those that they start, the least share of a busy core.

    In a job of the idle class they stay there: see `yield_the_core`.
    """
    for thread in _own_threads():
        if os.sched_getscheduler(thread) != os.SCHED_IDLE:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, MOST_NICE)


PRIORITIES = {"idle": run_all_when_idle, "nice": run_all_nicely}
"""What `[side] priority` means."""


def _own_threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def nap(seconds: float) -> int | None:
    """Sleep in the kernel for `seconds`, or until one of the gate's signals comes. Returns the signal, or None."""
    received = signal.sigtimedwait(GATE_SIGNALS, seconds)
    return None if received is None else received.si_signo


def has_children() -> bool:
    """Whether a process in this one's group, which the main job stops as a whole, is a child of this one."""
    try:
        os.waitid(os.P_PGID, os.getpgrp(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def runs_on_asleep() -> bool:
    """Whether something of this process's may run while the thread that asks the gate sleeps: a thread or a child."""
    return threading.active_count() > 1 or has_children()


def keep_forks(words: "memoryview[int]") -> None:
    """Have each process that this one forks from now on, such as a data-loading worker, run only in idle time.

    It ends with this process, and is named on the page, by which the main job stops it and counts its time. The daemon
    does as much for a process that was not forked but started anew.

    Args:
        words: the page's.
    """
    own_pid = os.getpid()
    is_main_thread = False

    def before() -> None:
        nonlocal is_main_thread
        is_main_thread = threading.current_thread() is threading.main_thread()
        with suppress(ValueError):  # the page is closed
            words[Field.SIDE_CHILDREN] = 1
            words[Field.SIDE_FORKS] += 1

    def in_child() -> None:
        run_when_idle()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GATE_SIGNALS)
        if os.getppid() != own_pid:
            return  # a child's child
        with suppress(ValueError):
            words[Field.FORKED_PROCESSES + words[Field.SIDE_FORKS] % PROCESS_WORDS] = os.getpid()
        if is_main_thread:  # the kernel means the thread, and would kill it with that
            die_with_parent(own_pid)

    os.register_at_fork(before=before, after_in_child=in_child)
