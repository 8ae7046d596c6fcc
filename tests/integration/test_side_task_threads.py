"""A side task's own threads: behind its gate, as all of it is, and also after its last trial."""

import os
import time
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import Sandbox, cpu_ticks, is_alive, wait_for

pytestmark = pytest.mark.integration


def shut_s(sandbox: Sandbox) -> float:
    """For how long the gate is shut; 0: it is open."""
    is_open = sandbox.word(Field.BUBBLE) & 1
    return 0.0 if is_open else (time.monotonic_ns() - sandbox.word(Field.BUBBLE_END_NS)) / 1e9


def stands_still(sandbox: Sandbox, side: int) -> None:
    """In times without a bubble, in which the core is free."""
    for _ in range(2):
        wait_for(lambda: 0.2 < shut_s(sandbox) < 0.5, "a long time outside bubbles")
        used = cpu_ticks(side)
        time.sleep(0.3)
        assert shut_s(sandbox) > 0.4 and cpu_ticks(side) <= used + 1
        wait_for(lambda: shut_s(sandbox) < 0.1, "the next bubbles")


@pytest.mark.parametrize("unknown", ["", pytest.param("1", marks=pytest.mark.slow, id="unknown to Python")])
def test_a_thread_stands_still_while_the_gate_is_shut(sandbox: Sandbox, hold: Path, unknown: str) -> None:
    job = sandbox.job()
    config = sandbox.config("prefetches.py", preemptive=False)
    daemon = sandbox.daemon_of(job, config, TINY_HOLD=str(hold), PREFETCHES_UNKNOWN=unknown)
    sandbox.works()
    side = sandbox.word(Field.SIDE_PROCESS)
    job.change(stall_ms=1000)
    wait_for(lambda: sandbox.word(Field.SIDE_CHILDREN), "its thread to be noticed")  # by what it uses, if unknown
    stands_still(sandbox, side)
    job.change(stall_ms=0)
    sandbox.works()
    hold.unlink()
    wait_for(lambda: sandbox.side("exited"), "its end")
    assert job.finish() == 0
    assert daemon.ended() == 0
    assert sandbox.side("exited")[0]["status"] == 0


@pytest.mark.slow
def test_a_thread_that_outlives_the_study_runs_in_bubbles_alone(sandbox: Sandbox, tmp_path: Path) -> None:
    lasts = tmp_path / "lasts"
    lasts.touch()
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("prefetches.py"), PREFETCHES_WHILE=str(lasts))
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    side = sandbox.side("started")[0]["pid"]
    wait_for(lambda: not sandbox.word(Field.SIDE_PID), "it has left the page")
    job.change(stall_ms=1000)
    wait_for(lambda: shut_s(sandbox) > 0.5, "a stall")
    stands_still(sandbox, side)
    job.change(stall_ms=0)
    used = cpu_ticks(side)
    wait_for(lambda: cpu_ticks(side) > used + 5, "it runs in bubbles")
    assert is_alive(side) and os.sched_getscheduler(side) == os.SCHED_IDLE
    lasts.unlink()
    wait_for(lambda: sandbox.side("exited"), "its end")
    assert job.finish() == 0
    assert daemon.ended() == 0
    assert sandbox.side("exited")[0]["status"] == 0
