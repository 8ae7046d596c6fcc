"""A daemon on a device that threads play, with a control daemon of MPS that a script plays, or with none."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import Field
from squeezer.cli import main
from squeezer.records.layout import log_path
from tests.support.fake_mps import FakeMps, fake_mps
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Job, Sandbox, is_alive, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def control(tmp_path: Path) -> Iterator[FakeMps]:
    with fake_mps(tmp_path / "mps") as made:
        yield made


def start_job(sandbox: Sandbox, pipes: Path) -> Job:
    command = ("-m", "tests.support.cuda_metronome", "--bubble-ms", "30", "--compute-ms", "20")
    job: Job = sandbox.start(Job, *command, CUDA_MPS_PIPE_DIRECTORY=str(pipes))
    wait_for(lambda: job.step or not is_alive(job.pid), "the first step")
    assert job.step, job.said()
    return job


def start_daemon(sandbox: Sandbox, job: Job, path: str, hold: Path, *ways: str, max_restarts: int = 0) -> Child:
    """The daemon of one job, as its rank starts it; `ways` are those of `cuda_daemon`."""
    lines = ["[squeeze]", "alone_share = 0.0", "margin_ms = 3", "[guard]", "enabled = false"]
    lines += ["[side]", f'study = "{STUDIES / "tiny.py"}"', f"max_restarts = {max_restarts}"]
    lines += ["[device]", 'kind = "cuda"', "[run]", f'directory = "{sandbox.run}"', "calibrate_s = 0"]
    config = sandbox.files / "mps.toml"
    config.write_text("\n".join(lines))
    command = ("-m", "tests.support.cuda_daemon", "--mps", *ways)
    command += ("daemon", "--config", str(config), "--job-pid", str(job.pid))
    kernels = str(sandbox.files / "kernels.json")
    daemon: Child = sandbox.start(Child, *command, PATH=path, TINY_HOLD=str(hold), STREAM_KERNELS=kernels)
    wait_for(lambda: sandbox.word(Field.DAEMON_PID) or not is_alive(daemon.pid), "the daemon")
    assert is_alive(daemon.pid), daemon.said()
    return daemon


def side_works(sandbox: Sandbox, after: int = 0) -> int:
    """Wait until a process of the side task trains, of which `after` were started before; its process id."""
    pid = wait_for(lambda: sandbox.side("started")[after:], "the side task")[0]["pid"]
    wait_for(lambda: sandbox.word(Field.SIDE_PID) == pid, "its claim")
    sandbox.works()
    return int(pid)


def test_without_a_server_bubbles_are_only_observed_and_everything_says_so(
    sandbox: Sandbox, control: FakeMps, hold: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start_job(sandbox, control.pipes)  # and not its client
    daemon = start_daemon(sandbox, job, control.path, hold)
    wait_for(lambda: sandbox.side("not_started"), "the reason")
    job.beats(12)
    assert job.finish() == 0
    assert daemon.ended() == 0, daemon.said()
    assert sandbox.side("started") == []
    (refused,) = sandbox.side("not_started")
    said = f"process {job.pid} is not a client of the MPS server at {control.pipes}"
    assert said in refused["reason"] and "squeezer doctor --fix-mps" in refused["reason"]
    assert said in log_path(sandbox.run, 0).read_text()
    bubbles = sandbox.events("bubble")
    assert len(bubbles) >= 12, "they are observed"
    assert all(bubble["permit_until_ns"] is None for bubble in bubbles), "none was opened"

    assert main(["report", str(sandbox.run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["side"]["not_started"] == report["ranks"]["0"]["side"]["not_started"] == [refused["reason"]]
    assert report["side"]["waterfall"]["ended"] == pytest.approx(1)
    assert main(["report", str(sandbox.run)]) == 0
    text = "".join(capsys.readouterr().out.split())  # lines are wrapped
    assert "".join(f"not started: {refused['reason']}".split()) in text
    assert main(["why", str(sandbox.run)]) == 0
    assert f"not started (reason {refused['reason']})" in capsys.readouterr().out


def test_a_device_that_was_not_measured_is_only_observed_though_there_is_a_server(
    sandbox: Sandbox, control: FakeMps, hold: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start_job(sandbox, control.pipes)
    control.serve(job.pid)
    daemon = start_daemon(sandbox, job, control.path, hold, "--unmeasured")
    (refused,) = wait_for(lambda: sandbox.side("not_started"), "the reason")
    job.beats(6)
    assert job.finish() == 0
    assert daemon.ended() == 0, daemon.said()
    assert sandbox.side("started") == []
    bubbles = sandbox.events("bubble")
    assert bubbles and all(bubble["permit_until_ns"] is None for bubble in bubbles), "none was opened"
    assert "not measured with MPS" in refused["reason"] and "squeezer doctor --measure" in refused["reason"]
    assert refused["reason"] in log_path(sandbox.run, 0).read_text()
    assert main(["why", str(sandbox.run)]) == 0
    assert f"not started (reason {refused['reason']})" in capsys.readouterr().out


def test_a_control_daemon_that_is_slow_to_answer_is_asked_again(sandbox: Sandbox, control: FakeMps, hold: Path) -> None:
    job = start_job(sandbox, control.pipes)
    control.serve(job.pid)
    control.be("hangs")
    daemon = start_daemon(sandbox, job, control.path, hold)
    wait_for(lambda: len(control.lines("asked")) >= 2, "the second question")
    control.be("")
    side_works(sandbox)
    assert sandbox.side("not_started") == []
    assert job.finish() == 0
    assert daemon.ended() == 0, daemon.said()


def test_a_side_task_uses_the_main_jobs_server_and_is_dropped_by_it_before_it_is_killed(
    sandbox: Sandbox, control: FakeMps, hold: Path
) -> None:
    job = start_job(sandbox, control.pipes)
    control.serve(job.pid)
    daemon = start_daemon(sandbox, job, control.path, hold)
    side = side_works(sandbox)
    environment = Path(f"/proc/{side}/environ").read_bytes().split(b"\0")
    assert f"CUDA_MPS_PIPE_DIRECTORY={control.pipes}".encode() in environment
    assert b"CUDA_MPS_CLIENT_PRIORITY=1" in environment
    control.serve(job.pid, side)
    asked = len(control.lines("asked"))
    job.beats(5)
    assert len(control.lines("asked")) == asked, "nobody asks while bubbles are squeezed"
    os.kill(side, signal.SIGSTOP)  # so it cannot end by itself
    assert job.finish() == 0
    assert daemon.ended() == 0, daemon.said()
    assert sandbox.side("exited")[0]["status"] == -signal.SIGKILL
    assert control.lines("terminated") == [str(side)], "and it lived then"


def test_a_start_that_fails_after_a_death_at_the_server_is_not_the_studys_fault(
    sandbox: Sandbox, control: FakeMps, hold: Path
) -> None:
    job = start_job(sandbox, control.pipes)
    control.serve(job.pid)
    daemon = start_daemon(sandbox, job, control.path, hold, max_restarts=1)
    last = side_works(sandbox)
    os.kill(last, signal.SIGKILL)  # the only death that counts
    for _ in range(2):
        last = wait_for(lambda last=last: (pid := sandbox.word(Field.SIDE_PROCESS)) not in (0, last) and pid, "another")
        os.kill(last, signal.SIGKILL)  # while it starts, as if its context was refused
    side_works(sandbox, after=3)
    first, *others = sandbox.side("exited")
    assert [each["restarted"] for each in (first, *others)] == [True] * 3
    assert "reason" not in first and all("not usable again" in each["reason"] for each in others)
    assert sandbox.side("given_up") == []
    assert job.finish() == 0
    assert daemon.ended() == 0, daemon.said()
