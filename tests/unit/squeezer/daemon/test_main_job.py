"""What the policy learns of a device when its main job says hello."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hooks.shared import wire
from ds_hooks.shared.page.layout import ClockKind, Field
from squeezer.config import Config, RunTable, SqueezeTable
from squeezer.daemon.correlator import Correlator
from squeezer.daemon.main_job import POLLED_LATE_NS, MainJob
from squeezer.daemon.mapped_page import MappedPage
from squeezer.daemon.memory_limit import MemoryLimit
from squeezer.policy.events import Event, JobAttached, JobLeft, JobLost
from squeezer.policy.state import GateMachine, State
from squeezer.records.facts import Job
from squeezer.records.writer import Recorder

MS = 1_000_000
HELLO = wire.Hello(pid=os.getpid(), rank=0, world_size=2, stage=0, stages=2, micro_batches=4, master_port=29500)


def made(
    words: "memoryview[int]",
    directory: Path,
    *,
    margin_ms: float = 0.5,
    refused: list[str] | None = None,
    faults: list[str] | None = None,
    owner_pid: int | None = None,
) -> tuple[MainJob, Recorder, list[Event]]:
    """The main job of a CUDA device that was measured, what records it, and what the policy learns."""
    config = Config(run=RunTable(directory=directory), squeeze=SqueezeTable(margin_ms=margin_ms))
    machine = GateMachine(config.squeeze.policy(config.guard))
    measured: Any = SimpleNamespace(
        name="cuda",
        stops=False,
        least_margin_ns=lambda: 1500_000,
        least_bubble_ns=lambda: 8 * MS,
        main_ended=lambda: None,
    )
    receiver: Any = SimpleNamespace(new_job=lambda: None, refuse=None if refused is None else refused.append)
    watched: dict[int, Callable[[], None]] = {}
    recorder = Recorder(directory, 0)
    events: list[Event] = []
    job = MainJob(
        config=config,
        words=words,
        mapped_page=MappedPage(directory),
        memory_limit=MemoryLimit(words, 0),
        device=measured,
        join=lambda pid: None,
        receiver=receiver,
        correlator=Correlator(machine.forecast.of, host_measures=False),
        machine=machine,
        watched=watched,
        recorder=recorder,
        feed=events.append,
        fault=pytest.fail if faults is None else faults.append,
        first_attached=lambda: None,
        step_started=lambda step: None,
        owner_ended=lambda: None,
        owner_pid=owner_pid,
    )
    return job, recorder, events


@pytest.mark.parametrize(
    ("margin_ms", "kind", "late_ns"),
    [
        (0.5, ClockKind.CUDA, 1 * MS),
        (1.5, ClockKind.CUDA, 0),
        (4.0, ClockKind.CUDA, 0),
        (0.5, ClockKind.CUDA_POLLED, 1 * MS + POLLED_LATE_NS),
        (4.0, ClockKind.CUDA_POLLED, POLLED_LATE_NS),
    ],
)
def test_a_measured_margin_and_shortest_bubble_reach_the_policy(
    margin_ms: float, kind: int, late_ns: int, tmp_path: Path
) -> None:
    words = memoryview(bytearray(512)).cast("q")
    words[Field.MAIN_PID], words[Field.CLOCK_KIND] = os.getpid(), kind
    job, recorder, events = made(words, tmp_path, margin_ms=margin_ms)
    job._take(5, HELLO)
    job.unwatch()
    (fact,) = (each for each in recorder._waiting if isinstance(each, Job))
    recorder.close()
    assert events == [JobAttached(late_ns, 29500, 8 * MS)]
    assert fact.least_bubble_ns == 8 * MS


@pytest.mark.parametrize("pid", [0, -1])
def test_what_is_no_process_is_refused_also_where_the_page_names_it(pid: int, tmp_path: Path) -> None:
    words = memoryview(bytearray(512)).cast("q")
    words[Field.MAIN_PID] = pid
    refused: list[str] = []
    job, recorder, events = made(words, tmp_path, refused=refused)
    job._take(5, HELLO._replace(pid=pid))
    recorder.close()
    assert refused == [f"hello from process {pid}, which is not the page's main job"] and events == []


@pytest.mark.parametrize("owns", [True, False])
def test_hooks_on_another_page_are_not_served_and_have_left_if_the_daemon_is_theirs(owns: bool, tmp_path: Path) -> None:
    """A side task of that daemon would ask nobody."""
    words = memoryview(bytearray(512)).cast("q")
    words[Field.MAIN_PID] = os.getppid()
    refused: list[str] = []
    job, recorder, events = made(words, tmp_path, refused=refused, owner_pid=os.getpid() if owns else None)
    job._take(5, HELLO)
    recorder.close()
    assert refused == [f"hello from process {os.getpid()}, which is not the page's main job"]
    assert events == [JobLeft()] * owns


@pytest.mark.parametrize("fault", [0, 1])
@pytest.mark.parametrize("lives", [True, False])
def test_hooks_leave_a_living_job_by_choice_or_by_a_fault(fault: int, lives: bool, tmp_path: Path) -> None:
    """A side task that starts must not be let run then, as it may be where the job has ended."""
    words = memoryview(bytearray(512)).cast("q")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    words[Field.MAIN_PID], words[Field.CLOCK_KIND] = child.pid, ClockKind.CUDA
    faults: list[str] = []
    job, recorder, events = made(words, tmp_path, faults=faults)
    job._take(5, HELLO._replace(pid=child.pid))
    job._machine.state = State.SHUT  # as it is once it has heard of the hello
    if not lives:
        child.communicate()
    job._take(6, wire.Bye(rank=0, fault=fault))
    job.unwatch()
    recorder.close()
    child.communicate()
    assert events[1:] == [JobLeft() if lives else JobLost()]
    assert [("switched themselves off" in each) for each in faults] == [True] * fault


def test_hooks_that_are_gone_without_a_word_have_left(tmp_path: Path) -> None:
    """As where their process has become another program."""
    words = memoryview(bytearray(512)).cast("q")
    words[Field.MAIN_PID], words[Field.CLOCK_KIND] = os.getpid(), ClockKind.CUDA
    faults: list[str] = []
    job, recorder, events = made(words, tmp_path, faults=faults)
    job._take(5, HELLO)
    job._machine.state = State.SHUT  # as it is once it has heard of the hello
    words[Field.MAIN_PID] = 0
    job.look()
    job.unwatch()
    recorder.close()
    assert events[1:] == [JobLeft()]
    assert faults == ["the hooks left, and their goodbye was lost"]
