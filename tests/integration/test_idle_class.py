"""A side task whose units run on at a bubble's end, because the kernel's idle class keeps it off a wanted core."""

import os
import signal
import time
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import Field, Preemption
from tests.support.sandbox import Sandbox, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="beside a job of low priority it is stopped"),
]

CORE = str(min(os.sched_getaffinity(0)))


def test_it_works_in_squeezed_steps_and_stands_still_in_those_left_alone(sandbox: Sandbox) -> None:
    config = sandbox.config("endless.py", preemptive="idle", guard=True)
    config.write_text(config.read_text().replace("alone_share = 0.0", "alone_share = 0.5"))
    daemon = sandbox.daemon(config)
    job = sandbox.job("--core", CORE)
    wait_for(lambda: sandbox.side("ready"), "the side task")
    assert sandbox.word(Field.PREEMPTIVE) == Preemption.IDLE_CLASS
    sandbox.works()
    began_ns = time.monotonic_ns()
    job.beats(60)
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    ready_ns = sandbox.side("ready")[0]["t_ns"]
    squeezed = {step["step"]: step["squeezed"] for step in sandbox.events("step") if step["start_ns"] > ready_ns}
    used_ns = {True: 0, False: 0}
    for bubble in sandbox.events("bubble"):
        if squeezed.get(bubble["step"]) is not None:
            used_ns[squeezed[bubble["step"]]] += bubble["side_ns"]
    assert used_ns[False] < used_ns[True] / 20, "it is stopped before the first bubble of such steps"
    guarded = [found for found in sandbox.events("guard") if found["t_ns"] > began_ns]  # while it starts, it is stopped
    assert not [found for found in guarded if found["cause"] == "overrun"], "idle time is no overrun"


def test_with_another_class_it_is_stopped(sandbox: Sandbox) -> None:
    daemon = sandbox.daemon(sandbox.config("tiny.py", preemptive="idle", priority="nice"))
    job = sandbox.job("--core", CORE)
    wait_for(lambda: sandbox.side("ready"), "the side task")
    assert sandbox.word(Field.PREEMPTIVE) == Preemption.STOP
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0


@pytest.mark.parametrize("change", ["os.nice(1)", "os.sched_setaffinity(0, range(os.cpu_count()))"])
def test_beside_a_job_that_lowers_its_priority_or_takes_more_cores_it_is_stopped(sandbox: Sandbox, change: str) -> None:
    if (os.cpu_count() or 1) == 1 and "affinity" in change:
        pytest.skip("there is one core")
    daemon = sandbox.daemon(sandbox.config("endless.py", preemptive="idle"))
    job = sandbox.job("--core", CORE)
    wait_for(lambda: sandbox.word(Field.PREEMPTIVE) == Preemption.IDLE_CLASS, "a side task that is ready")
    job.change(run=f"import os; {change}")
    wait_for(lambda: sandbox.word(Field.PREEMPTIVE) == Preemption.STOP, "its look at the job", patience_s=20)
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0


def test_a_privileged_study_cannot_leave_its_class(sandbox: Sandbox) -> None:
    daemon = sandbox.daemon(sandbox.config("rises.py", preemptive="idle"))
    job = sandbox.job("--core", CORE)
    wait_for(lambda: sandbox.side("ready"), "the side task")
    sandbox.works()
    side = sandbox.side("started")[0]["pid"]
    assert {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{side}/task")} == {os.SCHED_IDLE}
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0


def test_one_that_keeps_a_lock_for_which_the_job_waits_is_ended(sandbox: Sandbox, tmp_path: Path) -> None:
    """As where it is stopped: nothing else would end such a wait."""
    lock, held = tmp_path / "lock", tmp_path / "held"
    job = sandbox.job("--core", CORE)
    config = sandbox.config("locks.py", preemptive="idle")
    daemon = sandbox.daemon_of(job, config, LOCK=str(lock), LOCK_HELD_WHILE=str(held), PATIENCE_S="0.3")
    wait_for(lambda: sandbox.word(Field.PREEMPTIVE) == Preemption.IDLE_CLASS, "a side task that is ready")
    sandbox.works()
    held.touch()
    job.change(lock=str(lock))
    wait_for(lambda: sandbox.side("exited"), "its end", patience_s=60)
    assert "lock" in sandbox.side("exited")[0]["reason"]
    job.change(lock="")
    job.beats(3)
    held.unlink()
    assert job.finish() == 0
    assert daemon.ended() == 0


@pytest.mark.slow
def test_what_it_used_of_idle_time_before_it_forked_is_no_overrun(sandbox: Sandbox) -> None:
    job = sandbox.job("--core", str(min(os.sched_getaffinity(0))), "--bubble-ms", "20")
    job.change(stall_ms=40)
    daemon = sandbox.daemon_of(job, sandbox.config("forks.py", preemptive="idle", guard=True))
    wait_for(lambda: sandbox.word(Field.PREEMPTIVE) == Preemption.IDLE_CLASS, "a side task that is ready")
    job.beats(3)
    began_ns = time.monotonic_ns()
    job.beats(40)
    assert job.finish() == 0
    assert daemon.ended() == 0
    bubbles = [found for found in sandbox.events("bubble") if found["start_ns"] > began_ns]
    assert sum(found["overrun_ns"] or 0 for found in bubbles) > 10_000_000, "it did use such time"
    guarded = [found for found in sandbox.events("guard") if found["t_ns"] > began_ns]
    assert not [found for found in guarded if found["cause"] == "overrun"]
