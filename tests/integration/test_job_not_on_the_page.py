"""A daemon whose rank lives, but not on its page: a side task that starts there would ask nobody."""

import os
import signal
from collections.abc import Callable

import pytest

from ds_hooks.shared.page.file import page_path
from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import Child, Job, Sandbox, is_alive, wait_for

pytestmark = pytest.mark.integration


def remove_its_page(sandbox: Sandbox, job: Job) -> None:
    page_path(sandbox.directory, 0).unlink()


def detach(sandbox: Sandbox, job: Job) -> None:
    job.change(detach=1)
    wait_for(lambda: not sandbox.word(Field.MAIN_PID), "the hooks' end")


@pytest.mark.parametrize("leave", [remove_its_page, detach])
def test_a_crashed_daemons_successor_starts_nothing_beside_a_job_that_is_not_on_its_page(
    sandbox: Sandbox, leave: Callable[[Sandbox, Job], None]
) -> None:
    job = sandbox.job("--bubble-ms", "10")
    keeper = sandbox.daemon_of(job, sandbox.config("starts_slowly.py"))
    wait_for(lambda: sandbox.side("started"), "a side task")
    daemon = sandbox.word(Field.DAEMON_PID)
    leave(sandbox, job)
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: sandbox.word(Field.DAEMON_PID) not in (0, daemon), "another daemon")
    wait_for(lambda: len(sandbox.events("run")) == 2, "its start")
    job.beats(60)
    assert not sandbox.word(Field.SIDE_PROCESS)
    assert len(sandbox.side("started")) == 1
    assert job.finish() == 0
    assert keeper.ended() == 0


ATTACHES_LATE = """
import sys
from tests.support.metronome import main
sys.stdin.readline()
main()
"""


def test_a_side_task_that_starts_beside_hooks_on_another_page_is_ended(sandbox: Sandbox) -> None:
    """The page was removed before they came."""
    job: Job = sandbox.start(Job, "-c", ATTACHES_LATE)
    keeper = sandbox.daemon_of(job, sandbox.config("starts_slowly.py"))
    side = wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "the side task")
    remove_its_page(sandbox, job)
    job.change()
    wait_for(lambda: not is_alive(side), "its end", patience_s=20)
    job.beats(30)
    assert len(sandbox.side("started")) == 1
    assert job.finish() == 0
    assert keeper.ended() == 0


SPAWNS = """
import os, subprocess, sys
nothing, _ = os.pipe()
for line in sys.stdin:
    rank = [sys.executable, "-m", "tests.support.metronome", "--bubble-ms", "15", "--steps", line.strip()]
    assert subprocess.run(rank, stdin=nothing).returncode == 0
    print("a rank has ended", flush=True)
"""


def test_the_end_of_a_rank_that_the_job_has_spawned_is_not_the_jobs(sandbox: Sandbox) -> None:
    """It may evaluate then, or spawn the next one: nothing is measured beside it, and its daemon stays."""
    job: Job = sandbox.start(Job, "-c", SPAWNS)
    keeper: Child = sandbox.daemon_of(job, sandbox.config("endless.py", calibrate_s=60.0))
    assert job.process.stdin is not None
    for ranks in (1, 2):
        job.process.stdin.write(b"60\n")
        job.process.stdin.flush()
        wait_for(lambda ranks=ranks: job.said().count("a rank has ended") == ranks, "its end")
        wait_for(lambda: not sandbox.word(Field.MAIN_PID), "the daemon's notice")
        assert is_alive(keeper.pid), keeper.said()
    assert not sandbox.events("end")
    assert [each["job"] for each in sandbox.events("job")] == [0, 1], "both were squeezed"
    assert keeper.kill(signal.SIGTERM) == 0
    assert [each["dedicated"] for each in sandbox.events("end")] == [None], "the job lives"
    job.kill(signal.SIGKILL)
