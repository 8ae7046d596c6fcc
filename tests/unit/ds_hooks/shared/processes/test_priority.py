"""How our processes leave the core to the main job."""

import os

from ds_hooks.shared.processes.priority import HOLDER_NICE, yield_the_core
from tests.support.stranger import STRANGER, as_user, needs_second_user


def yielded(scheduling_class: int) -> list[int]:
    """The class and how much nicer it is, of a thread that has yielded twice."""
    os.sched_setscheduler(0, scheduling_class, os.sched_param(0))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield_the_core()
    yield_the_core()
    return [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0) - before]


@needs_second_user
def test_a_usual_one_gets_a_small_share() -> None:
    assert as_user(STRANGER, lambda: yielded(os.SCHED_OTHER)) == [os.SCHED_BATCH, HOLDER_NICE]


@needs_second_user
def test_in_a_job_of_the_idle_class_it_stays_there() -> None:
    """The kernel lets no ordinary user leave it."""
    assert as_user(STRANGER, lambda: yielded(os.SCHED_IDLE)) == [os.SCHED_IDLE, 0]
