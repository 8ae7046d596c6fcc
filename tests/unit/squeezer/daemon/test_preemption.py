"""When the end of a bubble is left to the kernel's idle class."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared.page.layout import PAGE_BYTES, Field, Preemption
from squeezer.config import Config, SideTable, SqueezeTable
from squeezer.daemon import preemption
from squeezer.daemon.preemption import preemption_of, uses_idle_time
from squeezer.device import SideProcess
from squeezer.device import run_when_idle as run_process_when_idle
from tests.support.sandbox import wait_for
from trials.gate.process import run_when_idle

of_usual_priority = pytest.mark.skipif(
    os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="beside a job of low priority, as this process, it is stopped"
)


def config(preemptive: Any) -> Config:
    side = SideTable.model_construct(study=Path("study.py"), priority="idle")
    return Config.model_construct(squeeze=SqueezeTable(preemptive=preemptive), side=side)


@contextmanager
def process(preexec_fn: Callable[[], object] | None = None, **options: Any) -> Iterator[SideProcess]:
    with subprocess.Popen(["sleep", "600"], preexec_fn=preexec_fn, **options) as started:
        try:
            yield SideProcess(pid=started.pid, pidfd=-1)
        finally:
            started.kill()


def as_batch() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(autouse=True)
def on_one_core() -> Iterator[int]:
    """As the launcher binds a rank where it has one core per rank, and the daemon its side task."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield min(cores)
    os.sched_setaffinity(0, cores)


@pytest.fixture
def side() -> Iterator[SideProcess]:
    with process(run_when_idle) as found:
        yield found


@of_usual_priority
def test_it_is_where_it_is_asked_for_and_holds(side: SideProcess) -> None:
    assert preemption_of(config("idle"), os.getpid(), side) == Preemption.IDLE_CLASS
    assert preemption_of(config("stop"), os.getpid(), side) == Preemption.STOP
    assert preemption_of(config(False), os.getpid(), side) == Preemption.NONE
    assert preemption_of(config("idle"), 0, side) == Preemption.STOP, "there is no job"
    assert preemption_of(config("idle"), os.getpid(), None) == Preemption.STOP, "no side task asks the gate"


@of_usual_priority
@pytest.mark.parametrize("of_side", [None, as_batch, partial(os.nice, 19)])
def test_one_that_is_not_of_the_idle_class_is_stopped(of_side: Callable[[], object] | None) -> None:
    """Because of `[side] priority`, before it gives way, or because its study has left the class."""
    with process(of_side) as other:
        assert preemption_of(config("idle"), os.getpid(), other) == Preemption.STOP


@of_usual_priority
@pytest.mark.parametrize(
    ("of_main", "expected"),
    [
        (run_when_idle, Preemption.STOP),
        (partial(os.nice, 1), Preemption.STOP),
        (partial(os.nice, 19), Preemption.STOP),
        (as_batch, Preemption.IDLE_CLASS),
    ],
)
def test_beside_a_job_of_low_priority_it_is_stopped(
    side: SideProcess, of_main: Callable[[], object], expected: int
) -> None:
    with process(of_main) as main:
        assert preemption_of(config("idle"), main.pid, side) == expected
    assert preemption_of(config("idle"), main.pid, side) == Preemption.STOP, "it has ended"


@contextmanager
def thread() -> Iterator[int]:
    """One more of this process; its number for the kernel."""
    numbers: queue.Queue[int] = queue.Queue()
    end = threading.Event()

    def run() -> None:
        numbers.put(threading.get_native_id())
        end.wait()

    started = threading.Thread(target=run)
    started.start()
    try:
        yield (number := numbers.get())
    finally:
        end.set()
        started.join()
    wait_for(lambda: not Path(f"/proc/self/task/{number}").exists(), "its end")


@of_usual_priority
@pytest.mark.parametrize(
    "lower",
    [
        lambda thread: os.setpriority(os.PRIO_PROCESS, thread, 1),
        lambda thread: os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0)),
    ],
)
def test_beside_a_job_of_which_one_thread_has_a_low_priority_it_is_stopped(
    side: SideProcess, lower: Callable[[int], object]
) -> None:
    with thread() as number:
        assert preemption_of(config("idle"), os.getpid(), side) == Preemption.IDLE_CLASS
        lower(number)
        assert preemption_of(config("idle"), os.getpid(), side) == Preemption.STOP
    assert preemption_of(config("idle"), os.getpid(), side) == Preemption.IDLE_CLASS


@of_usual_priority
def test_one_of_which_a_thread_is_not_of_the_idle_class_is_stopped() -> None:
    code = "import threading; threading.Thread(target=input).start(); print(flush=True); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline()
        found = SideProcess(pid=started.pid, pidfd=-1)
        os.sched_setscheduler(started.pid, os.SCHED_IDLE, os.sched_param(0))
        of_leader = preemption_of(config("idle"), os.getpid(), found)
        run_process_when_idle(started.pid)
        of_all = preemption_of(config("idle"), os.getpid(), found)
        started.kill()
    assert (of_leader, of_all) == (Preemption.STOP, Preemption.IDLE_CLASS)


@of_usual_priority
def test_on_other_cores_than_the_ranks_only_one_it_is_stopped(side: SideProcess, on_one_core: int) -> None:
    """Where the rank has several, the side task would compute on one of them while the rank uses another."""
    every = range(os.cpu_count() or 1)
    with process() as main:
        assert preemption_of(config("idle"), main.pid, side) == Preemption.IDLE_CLASS
        os.sched_setaffinity(main.pid, every)
        if len(os.sched_getaffinity(main.pid)) == 1:
            pytest.skip("there is one core")
        assert preemption_of(config("idle"), main.pid, side) == Preemption.STOP, "the rank has several"
        os.sched_setaffinity(side.pid, every)
        assert preemption_of(config("idle"), main.pid, side) == Preemption.STOP, "both have several"
        os.sched_setaffinity(main.pid, {on_one_core})
        assert preemption_of(config("idle"), main.pid, side) == Preemption.STOP, "the side task has not followed yet"
        os.sched_setaffinity(side.pid, {on_one_core})
        assert preemption_of(config("idle"), main.pid, side) == Preemption.IDLE_CLASS


@of_usual_priority
@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel knows no weights of sessions")
def test_in_another_session_it_is_stopped(side: SideProcess) -> None:
    with process(start_new_session=True) as main:
        assert preemption_of(config("idle"), main.pid, side) == Preemption.STOP


@of_usual_priority
def test_in_another_control_group_it_is_stopped(side: SideProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {os.getpid(): "/a", side.pid: "/a"}
    monkeypatch.setattr(preemption, "cpu_group", groups.get)
    assert preemption_of(config("idle"), os.getpid(), side) == Preemption.IDLE_CLASS
    groups[side.pid] = "/b"
    assert preemption_of(config("idle"), os.getpid(), side) == Preemption.STOP


def test_what_it_uses_after_a_bubble_is_idle_time_where_all_of_it_is_of_that_class() -> None:
    words = memoryview(bytearray(PAGE_BYTES)).cast("q")
    for preemption_word in (Preemption.NONE, Preemption.STOP):
        words[Field.PREEMPTIVE] = preemption_word
        assert not uses_idle_time(words)
    words[Field.PREEMPTIVE] = Preemption.IDLE_CLASS
    words[Field.SIDE_CHILDREN] = 1
    assert uses_idle_time(words), "it may have forked them since that bubble"
    words[Field.STRAYS] = 1
    assert not uses_idle_time(words), "in a session of their own, they would get a share of the core"
