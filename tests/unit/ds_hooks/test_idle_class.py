"""Where a bubble's end leaves the side task to the kernel's idle class: what stops it then."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks import Handle, attach
from ds_hooks.shared.page.layout import Field, Preemption, SideActivity
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from tests.support.hooked_engine import Daemon, Engine, connect
from tests.support.sandbox import cpu_ticks, stat, wait_for


@pytest.mark.parametrize("activity", [SideActivity.UNIT, SideActivity.HOST])
def test_it_stands_still_in_steps_left_alone(handle: Handle, engine: Engine, daemon: Daemon, activity: int) -> None:
    words = daemon.page.words
    words[Field.PREEMPTIVE] = Preemption.STOP
    connect(engine, daemon)
    words[Field.PREEMPTIVE] = Preemption.IDLE_CLASS
    last = words[Field.STEP]
    plan_steps(words, last + 1, last + 3)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as side:
        words[Field.SIDE_PROCESS] = words[Field.SIDE_PID] = side.pid
        words[Field.SIDE_ACTIVITY] = activity
        states = []
        for _ in range(2):
            engine.train_batch()
            states.append(stat(side.pid)[0])
        engine.train_batch()
        wait_for(lambda: stat(side.pid)[0] == "T", "its stop")
        plan_slot(words, 1, 10_000_000)
        plan_steps(words, last + 4, last + 6)
        engine.train_batch()
        wait_for(lambda: stat(side.pid)[0] == "R", "its going on")
        words[Field.SIDE_CHILDREN] = 1
        engine.train_batch()
        wait_for(lambda: stat(side.pid)[0] == "T", "the stop of one with processes of its own")
        side.kill()
    assert states == ["R", "R"]


def goes_on(process: "subprocess.Popen[bytes]") -> None:
    before = cpu_ticks(process.pid)
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: cpu_ticks(process.pid) > before, "its going on")


@pytest.fixture
def running(handle: Handle, engine: Engine, daemon: Daemon) -> Iterator["subprocess.Popen[bytes]"]:
    """A side task in a unit that does not end, in a step whose bubbles' ends leave it to the idle class."""
    words = daemon.page.words
    words[Field.PREEMPTIVE] = Preemption.STOP
    connect(engine, daemon)
    words[Field.PREEMPTIVE] = Preemption.IDLE_CLASS
    plan_steps(words, words[Field.STEP], words[Field.STEP] + 2)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as side:
        words[Field.SIDE_PROCESS] = words[Field.SIDE_PID] = side.pid
        words[Field.SIDE_ACTIVITY] = SideActivity.UNIT
        engine.train_batch()
        assert stat(side.pid)[0] != "T"
        yield side
        side.kill()


@pytest.mark.parametrize("by_then", [Preemption.IDLE_CLASS, Preemption.STOP])
def test_it_stands_still_in_evaluations(
    running: "subprocess.Popen[bytes]", engine: Engine, daemon: Daemon, by_then: int
) -> None:
    """Also where the idle class no longer holds, but no bubble has ended since."""
    daemon.page.words[Field.PREEMPTIVE] = by_then
    engine.eval_batch()
    wait_for(lambda: stat(running.pid)[0] == "T", "its stop", patience_s=20)


def test_it_is_stopped_as_a_step_left_alone_begins_where_the_idle_class_no_longer_holds(
    running: "subprocess.Popen[bytes]", engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_steps(daemon.page.words, 0, 0)
    daemon.page.words[Field.PREEMPTIVE] = Preemption.STOP
    run = engine._run

    def looked_at(name: str) -> None:
        if name == "ForwardPass":
            wait_for(lambda: stat(running.pid)[0] == "T", "its stop", patience_s=20)
        run(name)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", looked_at)
        engine.train_batch()


def test_it_is_stopped_by_the_end_of_a_bubble_once_the_step_is_no_longer_planned(
    running: "subprocess.Popen[bytes]", engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = daemon.page.words
    plan_steps(words, words[Field.STEP], words[Field.STEP] + 2)
    run = engine._run

    def guarded(name: str) -> None:
        run(name)
        if name == "RecvGrad":
            plan_steps(words, 0, 0)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", guarded)
        engine.train_batch()
    wait_for(lambda: stat(running.pid)[0] == "T", "its stop")


def test_one_that_others_continue_in_a_step_left_alone_is_stopped_by_the_end_of_a_bubble(
    running: "subprocess.Popen[bytes]", engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_steps(daemon.page.words, 0, 0)
    run = engine._run

    def continued(name: str) -> None:
        if name == "ForwardPass":
            wait_for(lambda: stat(running.pid)[0] == "T", "its stop as the step begins")
            goes_on(running)
        run(name)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", continued)
        engine.train_batch()
    wait_for(lambda: stat(running.pid)[0] == "T", "its second stop")


def test_it_is_stopped_where_another_engine_takes_over(
    running: "subprocess.Popen[bytes]", handle: Handle, daemon: Daemon, tmp_path: Path
) -> None:
    words = daemon.page.words
    other = Engine(daemon.page.path)
    second = attach(other, directory=tmp_path / "run", local_rank=0)
    other.train_batch()
    assert second.enabled and not handle.enabled
    wait_for(lambda: stat(running.pid)[0] == "T", "its stop")
    goes_on(running)
    plan_steps(words, 0, 9)  # it may still be of the engine before
    other.train_batch()
    wait_for(lambda: stat(running.pid)[0] == "T", "its stop in the first step")
    second.detach()
