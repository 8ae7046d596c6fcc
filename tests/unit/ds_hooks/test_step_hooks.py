"""The hooks of a step: when a bubble is open, what the daemon hears, and which permit it gets."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_hooks import Handle, attach
from ds_hooks.shared.page.layout import Field, Preemption, SideActivity
from ds_hooks.shared.page.plan import plan_slot, plan_steps
from ds_hooks.shared.wire import BubbleEnd, BubbleStart, Bye, Hello, Instructions, StepEnd, StepStart, WaitKind
from tests.support.hooked_engine import Daemon, Engine, ForwardPass, OptimizerStep, RecvGrad, Schedule, connect
from tests.support.sandbox import stat, wait_for


def test_the_page_is_open_in_waits_alone(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    assert engine.train_batch() == 0.5
    assert engine.seen == [("ForwardPass", False), ("RecvGrad", True), ("OptimizerStep", False), ("loss", True)]
    assert not daemon.page.is_open()
    assert daemon.page.words[Field.STEP] == 1
    assert daemon.page.words[Field.BUBBLE] >> 1 == 2


class Group:
    """A process group of that many ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


class Backend:
    """As much of DeepSpeed's communication object as hooks touch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_reduce(self, tensor: str, op: str, group: Group | None = None, async_op: bool = False) -> str:
        self._engine._run(tensor)
        return f"sum of {tensor}"


def test_a_collective_that_waits_inside_the_optimizers_step_is_a_bubble(
    daemon: Daemon, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(engine)
    monkeypatch.setitem(sys.modules, "deepspeed.comm.comm", SimpleNamespace(cdb=backend))

    def optimizer(self: Engine) -> None:
        assert backend.all_reduce("norm", "+", Group(2)) == "sum of norm"
        backend.all_reduce("replicas' norm", "+", Group(1))
        backend.all_reduce("later", "+", Group(2), async_op=True)
        backend.all_reduce("flags", "+")
        self._run("OptimizerStep")

    def forward(self: Engine) -> None:
        backend.all_reduce("tensor-parallel", "+", Group(2))

    instructions = {**Engine._INSTRUCTION_MAP, OptimizerStep: optimizer, ForwardPass: forward}
    monkeypatch.setattr(Engine, "_INSTRUCTION_MAP", instructions)
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    connect(engine, daemon)
    engine.seen.clear()
    engine.train_batch()
    assert [name for name, is_open in engine.seen if is_open] == ["RecvGrad", "norm", "flags", "loss"]
    assert [name for name, is_open in engine.seen if not is_open] == [
        *("tensor-parallel", "replicas' norm", "later", "OptimizerStep")
    ]
    handle.detach()
    starts = [message for message in daemon.hear_all() if isinstance(message, BubbleStart)][-4:]
    assert [(start.slot, WaitKind(start.wait).name) for start in starts] == [
        *((1, "RECV_GRAD"), (4, "OPTIMIZER_STEP"), (5, "OPTIMIZER_STEP"), (3, "LOSS"))
    ]
    assert set(vars(backend)) == {"_engine"}, "the backend is as it was"


@pytest.mark.parametrize(
    ("preemption", "in_optimizer_step", "in_loss", "stopped"),
    [
        (Preemption.STOP, "T", "T", [1, 0]),
        (Preemption.NONE, "R", "T", [0, 1]),
        (Preemption.IDLE_CLASS, "R", "R", [0, 0]),
        (17, "T", "T", [1, 0]),  # of a damaged page
    ],
)
def test_a_unit_that_does_not_end_is_stopped_at_the_bubbles_end_or_after_the_next_instruction_or_runs_on(
    handle: Handle,
    engine: Engine,
    daemon: Daemon,
    preemption: int,
    in_optimizer_step: str,
    in_loss: str,
    stopped: list[int],
) -> None:
    words = daemon.page.words
    words[Field.PREEMPTIVE] = Preemption.STOP
    connect(engine, daemon)
    words[Field.PREEMPTIVE] = preemption
    plan_steps(words, 0, words[Field.STEP] + 2)
    expected = {"ForwardPass": "R", "RecvGrad": "R", "OptimizerStep": in_optimizer_step, "loss": in_loss}
    states: dict[str, str] = {}
    run = engine._run

    def look(name: str) -> None:
        run(name)
        deadline_s = time.monotonic() + 30
        while states.get(name) != expected[name] and time.monotonic() < deadline_s:
            time.sleep(0.05)  # a signal takes its time
            states[name] = Path(f"/proc/{side.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as side:
        words[Field.SIDE_PROCESS] = words[Field.SIDE_PID] = side.pid
        words[Field.SIDE_ACTIVITY] = SideActivity.UNIT
        engine._run = look  # type: ignore[method-assign]
        engine.train_batch()
        del engine._run
        side.kill()
    handle.detach()
    ends = [message for message in daemon.hear_all() if isinstance(message, BubbleEnd)]
    assert states == expected
    assert [end.stopped for end in ends[-2:]] == stopped


def test_the_daemon_hears_what_the_main_job_itself_used_in_a_bubble(
    handle: Handle, engine: Engine, daemon: Daemon
) -> None:
    connect(engine, daemon)
    run = engine._run

    def copy(name: str) -> None:
        run(name)
        end_ns = time.process_time_ns() + (20_000_000 if name == "RecvGrad" else 0)
        while time.process_time_ns() < end_ns:
            pass

    engine._run = copy  # type: ignore[method-assign]
    engine.train_batch()
    del engine._run
    handle.detach()
    receive, loss = [message for message in daemon.hear_all() if isinstance(message, BubbleEnd)][-2:]
    assert receive.main_cpu_ns >= 20_000_000 > loss.main_cpu_ns > 0


def test_what_the_daemon_hears_of_a_step(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    connect(engine, daemon)
    engine.train_batch()
    handle.detach()
    heard = daemon.hear_all()
    hello = heard[0]
    assert isinstance(hello, Hello)
    assert (hello.pid, hello.rank, hello.world_size, hello.stages) == (os.getpid(), 0, 2, 2)
    begin = max(index for index, message in enumerate(heard) if isinstance(message, StepStart))
    step = heard[begin:]
    number = step[0].step
    assert [type(message) for message in step[1:]] == [
        *(BubbleStart, BubbleEnd, BubbleStart, BubbleEnd, Instructions, StepEnd, Bye)
    ]
    starts = [message for message in step if isinstance(message, BubbleStart)]
    assert [(start.step, start.slot, start.wait) for start in starts] == [
        (number, 1, WaitKind.RECV_GRAD),
        (number, 3, WaitKind.LOSS),
    ]
    instructions = step[5]
    assert [slot for _, slot, _, _ in instructions.items] == [0, 1, 2, 3]
    assert all(0 <= begin_ns <= end_ns for _, _, begin_ns, end_ns in instructions.items)


def test_a_steps_end_tells_the_work_of_that_moment_however_late_it_is_heard(
    handle: Handle, engine: Engine, daemon: Daemon
) -> None:
    connect(engine, daemon)
    done = []
    for work in (100, 250):
        daemon.page.words[Field.WORK] = work
        engine.train_batch()
        done.append(work)
    daemon.page.words[Field.WORK] = 900
    handle.detach()
    ends = [message for message in daemon.hear_all() if isinstance(message, StepEnd)]
    assert [end.work for end in ends[-2:]] == done


def test_an_evaluation_is_left_alone(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    engine.eval_batch()
    assert [is_open for _, is_open in engine.seen] == [False, False, False]


def test_an_unannounced_instruction_switches_the_hooks_off(
    handle: Handle, engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.train_batch()

    def other(self: Schedule) -> Iterator[list[object]]:
        yield [RecvGrad(), ForwardPass(), OptimizerStep()]

    monkeypatch.setattr(Schedule, "steps", other)
    assert engine.train_batch() == 0.5
    assert "the schedule announced ForwardPass" in str(handle.fault)


@pytest.mark.parametrize(("slot", "last"), [(1, BubbleStart), (3, BubbleStart)])
def test_the_daemon_is_woken_once_a_step_in_the_bubble_that_it_chose(
    handle: Handle, engine: Engine, daemon: Daemon, slot: int, last: type
) -> None:
    connect(engine, daemon)
    daemon.page.words[Field.FLUSH_SLOT] = slot
    for _ in range(4):
        engine.train_batch()
    handle.detach()
    batches = daemon.hear_batches()[-4:-1]
    assert [type(batch[-1]) for batch in batches] == [last] * 3
    assert [batch[-1].slot for batch in batches] == [slot] * 3
    steps = [batch[-1].step for batch in batches]
    assert steps == list(range(steps[0], steps[0] + 3))


def test_a_daemon_that_chose_a_bubble_which_never_comes_is_told_every_other_step(
    handle: Handle, engine: Engine, daemon: Daemon
) -> None:
    connect(engine, daemon)
    daemon.page.words[Field.FLUSH_SLOT] = 77
    for _ in range(6):
        engine.train_batch()
    handle.detach()
    steps = [batch[-1].step for batch in daemon.hear_batches()[-4:-1]]
    assert [after - before for before, after in pairwise(steps)] == [2, 2]


def test_the_plan_gives_a_bubble_its_permit(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    page = daemon.page
    plan_slot(page.words, 3, 5_000_000)
    plan_steps(page.words, 2, 3)
    permits_ns = []
    for _ in range(3):
        engine.train_batch()
        permit_ns = page.words[Field.PERMIT_UNTIL_NS]
        permits_ns.append(permit_ns and permit_ns - page.words[Field.BUBBLE_START_NS])
    assert permits_ns == [0, 5_000_000, 0]


def test_a_changed_schedule_has_slots_of_its_own(
    daemon: Daemon, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `set_train_batch_size`: what was learnt of one schedule's bubbles must not open those of another."""
    backend = Backend(engine)
    monkeypatch.setitem(sys.modules, "deepspeed.comm.comm", SimpleNamespace(cdb=backend))
    collectives = 1

    def optimizer(self: Engine) -> None:
        for _ in range(collectives):
            backend.all_reduce("norm", "+", Group(2))
        self._run("OptimizerStep")

    monkeypatch.setattr(Engine, "_INSTRUCTION_MAP", {**Engine._INSTRUCTION_MAP, OptimizerStep: optimizer})
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    connect(engine, daemon)
    steps = []
    for micro_batches, collectives in ((1, 1), (2, 1), (2, 2), (1, 2), (2, 1)):  # noqa: B007 - the optimizer's
        monkeypatch.setattr(Schedule, "micro_batches", micro_batches)
        engine.train_batch()
        steps.append(daemon.page.words[Field.STEP])
    handle.detach()
    starts = [message for message in daemon.hear_all() if isinstance(message, BubbleStart)]
    slots = [[start.slot for start in starts if start.step == step] for step in steps]
    assert slots[0] == [1, 4, 3], "the wait, the optimizer's collective, the loss"
    assert slots[1] == [6, 9, 8]
    assert slots[2] == [6, 9, 10, 8], "the step has one more"
    assert slots[3] == [1, 4, 11, 3], "so does this, after the other's"
    assert slots[4] == slots[1]


def test_a_plan_of_the_engine_before_opens_no_bubble(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    """Until the daemon has heard of the one that takes over: their steps may have the same numbers."""
    second = Engine(daemon.page.path)
    later = attach(second, directory=daemon.page.path.parent, local_rank=0)
    plan_slot(daemon.page.words, 3, 5_000_000)
    plan_steps(daemon.page.words, 1, 100)
    permits = []
    for _ in range(3):
        second.train_batch()
        permits.append(bool(daemon.page.words[Field.PERMIT_UNTIL_NS]))
    assert later.enabled and permits == [False, False, True], "the first one of them has no hooks yet"
    later.detach()


def test_a_plan_may_count_from_the_end_of_the_bubble_before(handle: Handle, engine: Engine, daemon: Daemon) -> None:
    page, words = daemon.page, daemon.page.words
    long_ns, over_ns = 10**12, 1000
    plan_steps(page.words, 1, 100)
    found = []
    for permit_ns, opens_before_ns in ((long_ns, long_ns), (over_ns, long_ns), (long_ns, over_ns)):
        plan_slot(page.words, 3, permit_ns, (), opens_before_ns)
        engine.train_batch()
        base_ns, start_ns, until_ns = (
            words[field] for field in (Field.PLAN_BASE_NS, Field.BUBBLE_START_NS, Field.PERMIT_UNTIL_NS)
        )
        found.append((start_ns - base_ns > over_ns, until_ns and until_ns - base_ns, until_ns and until_ns - start_ns))
    first, second, third = found
    assert first[:2] == (True, long_ns), "after the end of the slot before"
    assert (second[0], second[2]) == (True, 1), "the permit is over, but there may be renewals"
    assert third == (True, 0, 0), "it began too late"


def test_a_side_task_that_others_continue_stands_still_again_after_the_next_bubble(
    handle: Handle, engine: Engine, daemon: Daemon
) -> None:
    """As by a scheduler that suspends and resumes all processes of a job; no bubble has a permit."""
    words = daemon.page.words
    words[Field.PREEMPTIVE] = True
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as side:
        words[Field.SIDE_PROCESS] = words[Field.SIDE_PID] = side.pid
        words[Field.SIDE_ACTIVITY] = SideActivity.HOST
        engine.train_batch()
        wait_for(lambda: stat(side.pid)[0] == "T", "its stop")
        side.send_signal(signal.SIGCONT)
        wait_for(lambda: stat(side.pid)[0] == "R", "its going on")
        time.sleep(0.1)
        engine.train_batch()
        wait_for(lambda: stat(side.pid)[0] == "T", "another stop", patience_s=20)
        side.kill()
