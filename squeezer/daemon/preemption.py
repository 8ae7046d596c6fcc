"""What happens to a side task that is awake when a bubble ends."""

import os
from contextlib import suppress

from ds_hooks.shared.page.layout import Field, Preemption, SideActivity
from squeezer.config import Config
from squeezer.daemon.side_processes.parent_group import cpu_group
from squeezer.device.base import SideProcess, is_stopped, weighed_by_session

_USUAL = (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_FIFO, os.SCHED_RR)


def preemption_of(config: Config, main_pid: int, side: SideProcess | None) -> int:
    """A `Preemption`, for a side task and the rank `main_pid` as they run now.

    It is left to the kernel's idle class only where that holds against the rank: in its session and control group, on
    its one core, and if the rank itself is of neither that class nor a low priority. Where a rank has several cores, it
    would compute on one that the rank does not use, beside the others.

    Args:
        config: the squeezer file.
        main_pid: 0: there is no rank.
        side: a side task that asks its gate; None: there is none.
    """
    preemptive = config.squeeze.preemptive
    if not preemptive:
        return Preemption.NONE
    is_left = preemptive == "idle" and main_pid and side is not None and _is_below(side.pid, main_pid)
    return Preemption.IDLE_CLASS if is_left else Preemption.STOP


def uses_idle_time(words: "memoryview[int]") -> bool:
    """Whether what the side task uses after a bubble is time that nobody wanted, also that of its own processes.

    Those of its group have its class and session, but it may have begun them only after the bubble. Others may not.
    """
    return words[Field.PREEMPTIVE] == Preemption.IDLE_CLASS and not words[Field.STRAYS]


def is_held_up(side: SideProcess, words: "memoryview[int]") -> bool:
    """Whether the side task is away from its gate between two bubbles: stopped, or left to idle time."""
    is_left = words[Field.PREEMPTIVE] == Preemption.IDLE_CLASS and not words[Field.BUBBLE] & 1
    return is_stopped(side) or (is_left and words[Field.SIDE_ACTIVITY] != SideActivity.ASLEEP)


def _is_below(side_pid: int, main_pid: int) -> bool:
    """Whether the side task gets less than a hundredth of a core that the rank wants, too, and has no other core.

    Beside a rank of niceness 10 it would get a fortieth, beside one of 19 a sixth. Class and niceness are a thread's.
    """
    with suppress(OSError):  # one of them has ended
        return (
            all(os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in _threads(side_pid))
            and all(_is_usual(thread) for thread in _threads(main_pid))
            and len(os.sched_getaffinity(main_pid)) == 1
            and os.sched_getaffinity(side_pid) == os.sched_getaffinity(main_pid)
            and not weighed_by_session(main_pid, side_pid)
            and cpu_group(side_pid) == cpu_group(main_pid)
        )
    return False


def _is_usual(thread: int) -> bool:
    """Whether a thread of the rank is of no lower class and priority than most."""
    try:
        return os.sched_getscheduler(thread) in _USUAL and os.getpriority(os.PRIO_PROCESS, thread) <= 0
    except ProcessLookupError:  # it has ended
        return True


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
