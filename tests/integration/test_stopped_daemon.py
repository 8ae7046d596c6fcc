"""Somebody has stopped a daemon or its keeper (SIGSTOP): they end all the same."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import Field
from launch.leftovers import RunInUseError, RunLock, end_daemons
from tests.support.sandbox import Child, Job, Sandbox, is_alive, stat, wait_for

pytestmark = pytest.mark.integration
PATIENCE_S = 60.0


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: stat(pid)[:1] == ["T"], "a stopped process")


def job_and_keeper(sandbox: Sandbox) -> tuple[Job, Child]:
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"))
    sandbox.works()
    return job, keeper


@pytest.mark.parametrize("who", ["daemon", "keeper"])
def test_with_their_job(sandbox: Sandbox, who: str) -> None:
    job, keeper = job_and_keeper(sandbox)
    stop(keeper.pid if who == "keeper" else sandbox.word(Field.DAEMON_PID))
    job.beats(10)
    assert job.finish() == 0
    assert keeper.ended(PATIENCE_S) == 0
    assert sandbox.events("end"), "the daemon has ended in its usual way"


def test_what_a_daemon_leaves_that_is_killed_when_its_job_has_ended_goes_with_its_keeper(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("endless.py"), TMPDIR=str(temporary))
    wait_for(lambda: list(temporary.glob("squeezer-side-*")), "the side task's folder")
    daemon = sandbox.word(Field.DAEMON_PID)
    stop(keeper.pid)
    stop(daemon)  # or it ends by itself, in its usual way
    assert job.finish() == 0
    os.kill(daemon, signal.SIGKILL)
    keeper.process.send_signal(signal.SIGCONT)
    assert keeper.ended(PATIENCE_S) == 128 + signal.SIGKILL
    assert not list(sandbox.directory.glob("*"))
    assert not list(temporary.glob("squeezer-side-*"))


def test_when_they_are_asked_to(sandbox: Sandbox) -> None:
    job, keeper = job_and_keeper(sandbox)
    stop(sandbox.word(Field.DAEMON_PID))
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.ended(PATIENCE_S) == 0
    assert sandbox.events("end")
    job.beats(10)
    assert job.finish() == 0


def test_a_daemon_that_is_stopped_beside_its_job_is_left_alone(sandbox: Sandbox) -> None:
    job, keeper = job_and_keeper(sandbox)
    daemon = sandbox.word(Field.DAEMON_PID)
    stop(daemon)
    job.beats(20)
    assert stat(daemon)[:1] == ["T"]
    os.kill(daemon, signal.SIGCONT)
    sandbox.works()
    assert job.finish() == 0
    assert keeper.ended(PATIENCE_S) == 0


def test_after_the_next_launcher_has_come_if_theirs_was_killed(sandbox: Sandbox) -> None:
    job, pid_file = sandbox.job(), sandbox.directory / "daemon0.pid"
    options = ("--config", str(sandbox.config()), "--job-pid", str(job.pid), "--pid-file", str(pid_file))
    keeper: Child = sandbox.start(Child, "-m", "squeezer", "daemon", *options)
    pid_file.write_text(str(keeper.pid))
    daemon = wait_for(lambda: sandbox.word(Field.DAEMON_PID), "the daemon")
    stop(keeper.pid)
    stop(daemon)
    assert job.finish() == 0
    (sandbox.run / ".lock").write_text(str(sandbox.directory))
    with pytest.raises(RunInUseError, match=f"processes .{keeper.pid}"), RunLock(sandbox.run, sandbox.directory):
        pass
    assert keeper.ended(PATIENCE_S) == 0
    assert sandbox.events("end")
    pid_file.unlink(missing_ok=True)


@pytest.mark.parametrize("stopped_at_look", [0, 3])
def test_a_launcher_continues_whatever_it_waits_for_also_what_is_stopped_meanwhile(stopped_at_look: int) -> None:
    ends_by_itself = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    looks = 0

    def running() -> list[int]:
        nonlocal looks
        if looks == stopped_at_look:
            stop(ends_by_itself.pid)
            assert ends_by_itself.stdin is not None
            ends_by_itself.stdin.close()
        looks += 1
        return [ends_by_itself.pid] if is_alive(ends_by_itself.pid) else []

    end_daemons(running, PATIENCE_S)
    assert ends_by_itself.wait() == 0
