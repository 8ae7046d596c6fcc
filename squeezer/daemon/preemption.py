"""What happens to a side task that is awake when a bubble ends."""

import os
from contextlib import suppress

from ds_hooks.shared.page.layout import Preemption
from squeezer.config import Config
from squeezer.daemon.side_processes.parent_group import cpu_group
from squeezer.device.base import Device, SideProcess


def preemption_of(config: Config, device: Device, main_pid: int, side: SideProcess | None) -> int:
    """A `Preemption`, for a side task and the rank `main_pid` as they run now.

    It is left to the kernel's idle class only where that holds against the rank: in its session and control group.
    """
    preemptive = config.squeeze.preemptive
    if preemptive != "idle":
        return Preemption.STOP if preemptive else Preemption.NONE
    is_idle = config.side is not None and config.side.priority == "idle" and not device.own_session
    if is_idle and main_pid and side is not None and _is_above(main_pid, side.pid):
        return Preemption.IDLE_CLASS
    return Preemption.STOP


def _is_above(main_pid: int, side_pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.sched_getscheduler(main_pid) != os.SCHED_IDLE and cpu_group(side_pid) == cpu_group(main_pid)
    return False
