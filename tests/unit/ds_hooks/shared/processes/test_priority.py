"""How our processes leave the core to the main job."""

import os
import subprocess
import sys
import threading

import pytest

from ds_hooks.shared.processes.priority import HOLDER_NICE, never_rise, starting_patient_threads, yield_the_core
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


def started(scheduling_class: int, *, is_raising: bool = False) -> list[int]:
    """The classes of a thread that this one starts within, of this one afterwards, and of one that it then starts."""
    os.sched_setscheduler(0, scheduling_class, os.sched_param(0))
    found = list[int]()

    def start() -> None:
        thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()

    try:
        with starting_patient_threads():
            start()
            if is_raising:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    found.append(os.sched_getscheduler(0))
    start()
    return found


@needs_second_user
@pytest.mark.parametrize("is_raising", [False, True])
def test_only_threads_that_are_started_within_are_patient(is_raising: bool) -> None:
    usual = os.SCHED_OTHER
    assert as_user(STRANGER, lambda: started(usual, is_raising=is_raising)) == [os.SCHED_BATCH, usual, usual]


@needs_second_user
@pytest.mark.parametrize("scheduling_class", [os.SCHED_IDLE, os.SCHED_BATCH])
def test_a_job_of_another_class_is_left_in_it(scheduling_class: int) -> None:
    assert as_user(STRANGER, lambda: started(scheduling_class)) == [scheduling_class] * 3


def test_where_classes_are_forbidden_threads_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*given: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with starting_patient_threads():
        pass


RISES = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
tries = {
    "fifo": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "usual": lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    "niceness": lambda: os.nice(-1),
}
os.fork() and os.wait()
for name, rise in tries.items():
    try:
        rise()
        print(name, flush=True)
    except PermissionError:
        pass
"""


def test_what_has_given_way_never_takes_it_back() -> None:
    """Nor do its children. Only where this process is privileged would any of it succeed."""
    done = subprocess.run([sys.executable, "-c", RISES], preexec_fn=never_rise, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
