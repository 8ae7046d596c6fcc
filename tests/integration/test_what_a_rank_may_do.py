"""What a rank may do to itself: it trains on, and its side task has no time but that of its bubbles."""

import os
import signal
import struct
import time
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import page_path
from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import Sandbox, cpu_ticks, wait_for

pytestmark = pytest.mark.integration

BECOMES_ANOTHER = """
import os, sys, threading, time
def restart():
    time.sleep(0.5)
    os.execv(sys.executable, [sys.executable, "-c", {program!r}])
threading.Thread(target=restart).start()
"""
LATER_ANOTHER_JOB = "import os; os.read(0, 100); from tests.support.metronome import main; main()"


def stands_still(pid: int) -> bool:
    """Whether a process uses no CPU time for half a second."""
    before = cpu_ticks(pid)
    time.sleep(0.5)
    return cpu_ticks(pid) == before


def test_a_rank_that_becomes_another_program_in_a_bubble_leaves_no_gate_open(sandbox: Sandbox) -> None:
    """As where a watchdog thread starts a training anew that waits for ever."""
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"), PATIENCE_S="0.3")
    sandbox.works()
    side = sandbox.word(Field.SIDE_PROCESS)
    job.change(run=BECOMES_ANOTHER.format(program=LATER_ANOTHER_JOB), bubble_ms=60_000)
    wait_for(lambda: LATER_ANOTHER_JOB.encode() in Path(f"/proc/{job.pid}/cmdline").read_bytes(), "the other program")
    wait_for(lambda: stands_still(side), "a side task that sleeps", patience_s=20)
    assert sandbox.events("fault")[0]["what"] == "the hooks left, and their goodbye was lost"
    job.change()
    sandbox.works()
    assert sandbox.word(Field.SIDE_PROCESS) == side, "the next hooks have what was there"
    assert job.finish() == 0
    assert keeper.ended() == 0


def test_a_rank_that_may_open_no_more_files_outlives_its_daemon(sandbox: Sandbox) -> None:
    job = sandbox.job("--bubble-ms", "10")
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"))
    sandbox.works()
    job.change(run="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))")
    daemon = sandbox.word(Field.DAEMON_PID)
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: sandbox.word(Field.DAEMON_PID) not in (0, daemon), "the next daemon")
    job.beats(60)
    assert job.finish() == 0
    assert keeper.ended() == 0


def test_a_rank_that_goes_to_other_cores_takes_daemon_and_side_task_along(sandbox: Sandbox) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("a rank with one core has nowhere to go, so this is NOT shown")
    job = sandbox.job("--core", str(cores[0]))
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"))
    sandbox.works()
    side = sandbox.word(Field.SIDE_PROCESS)
    job.change(run=f"import os; os.sched_setaffinity(0, {{{cores[1]}}})")
    for pid in (sandbox.word(Field.DAEMON_PID), side):
        wait_for(lambda pid=pid: os.sched_getaffinity(pid) == {cores[1]}, "all on the other core", patience_s=20)
    sandbox.works()
    assert sandbox.word(Field.SIDE_PROCESS) == side
    assert job.finish() == 0
    assert keeper.ended() == 0


def test_a_rank_that_writes_another_process_over_its_name_is_not_lost(sandbox: Sandbox) -> None:
    """By a wild pointer: all processes of a job may write to the page."""
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"))
    sandbox.works()
    daemon = sandbox.word(Field.DAEMON_PID)
    for pid in (2**40, job.pid):
        with page_path(sandbox.directory, 0).open("r+b") as page:
            os.pwrite(page.fileno(), struct.pack("<q", pid), 8 * Field.MAIN_PID)
        time.sleep(1.5)
    sandbox.works()
    assert sandbox.word(Field.DAEMON_PID) == daemon and not sandbox.events("fault")
    assert job.finish() == 0
    assert keeper.ended() == 0


LEAVES_ITS_SESSION = "import os; os.setpgid(0, os.getpgid(os.getppid())); os.setsid()"
"""Who leads a group cannot."""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel weighs no sessions")
@pytest.mark.slow
def test_beside_a_rank_that_goes_to_a_session_of_its_own_a_side_task_has_one_that_gives_way(sandbox: Sandbox) -> None:
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"))
    sandbox.works()
    side = sandbox.word(Field.SIDE_PROCESS)
    assert os.getsid(side) == os.getsid(job.pid)
    job.change(run=LEAVES_ITS_SESSION)
    wait_for(lambda: sandbox.word(Field.SIDE_PROCESS) not in (0, side), "another side task", patience_s=20)
    side = sandbox.word(Field.SIDE_PROCESS)
    assert os.getsid(side) == side
    nice = lambda: Path(f"/proc/{side}/autogroup").read_text().split()[-1]  # noqa: E731
    wait_for(lambda: nice() == "19", "the least share of a core for its session")
    assert job.finish() == 0
    assert keeper.ended() == 0
