"""A main job and a side task on one device: who comes first, and who gives way when there is no room for both.

Real processes; threads play the device, and a file its meters.
"""

import json
import signal
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import page_path
from ds_hooks.shared.page.layout import Field
from squeezer.reports.report import build_report, render
from squeezer.reports.why import main_why
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Job, Sandbox, is_alive, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MB = 1 << 20


def config(sandbox: Sandbox) -> Path:
    """The side task's priority lets it work on a busy machine."""
    path = sandbox.files / "device.toml"
    lines = ["[squeeze]", "alone_share = 0.0", "margin_ms = 3", "[guard]", "enabled = false"]
    lines += ["[side]", f'study = "{STUDIES / "tiny.py"}"', "max_restarts = 0"]
    lines += ['priority = "nice"', '[device]\nkind = "cuda"']
    path.write_text("\n".join([*lines, "[run]", f'directory = "{sandbox.run}"']))
    return path


class Meters:
    """What the device says."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.path = sandbox.files / "meters.json"
        self.say()

    def say(self, **others: int) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(others))
        new.rename(self.path)


def start(sandbox: Sandbox, hold: Path, meters: Meters, *options: str) -> Child:
    command = ("-m", "tests.support.cuda_daemon", "daemon", "--config", str(config(sandbox)), *options)
    named = {"STREAM_KERNELS": str(sandbox.files / "kernels.json"), "METERS": str(meters.path)}
    daemon: Child = sandbox.start(Child, *command, TINY_HOLD=str(hold), **named)
    page = page_path(sandbox.directory, 0)
    wait_for(lambda: (page.exists() and sandbox.word(Field.DAEMON_PID)) or not is_alive(daemon.pid), "the daemon")
    assert is_alive(daemon.pid), daemon.said()
    return daemon


def start_job(sandbox: Sandbox) -> Job:
    options = ("--bubble-ms", "30", "--compute-ms", "20")
    job: Job = sandbox.start(Job, "-m", "tests.support.cuda_metronome", *options)
    wait_for(lambda: job.step or not is_alive(job.pid), "the first step")
    assert job.step, job.said()
    return job


def test_the_side_task_gives_way_to_the_main_jobs_memory_and_comes_back(
    sandbox: Sandbox, hold: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meters = Meters(sandbox)
    job = start_job(sandbox)
    daemon = start(sandbox, hold, meters)
    sandbox.works()
    meters.say(free=100 * MB)
    (ended,) = wait_for(lambda: sandbox.side("exited"), "the end of the side task")
    assert ended["reason"].startswith("100 MiB of the device are free for the main job")
    job.beats(20)
    assert len(sandbox.side("started")) == 1, "there is no room"
    meters.say(free=70_000 * MB)
    wait_for(lambda: len(sandbox.side("started")) == 2, "its successor")
    sandbox.works()
    job.beats(2)
    assert daemon.kill(signal.SIGTERM) == 0
    assert job.finish() == 0 and "[ds_hooks]" not in job.said(), job.said()
    assert "ending the side task: 100 MiB of the device are free" in daemon.said()
    assert {look["free_bytes"] for look in sandbox.events("device")} >= {100 * MB, 70_000 * MB}
    assert sandbox.events("fault") == []
    text = " ".join(render(build_report(sandbox.run)).split())
    assert "had no room on the device 1 time, the last time because 100 MiB" in text
    main_why(sandbox.run, None)
    assert "barred (reason 100 MiB of the device are free" in capsys.readouterr().out


def test_on_an_exclusive_device_the_main_job_has_it_alone_until_its_mode_changes(sandbox: Sandbox, hold: Path) -> None:
    meters = Meters(sandbox)
    meters.say(mode=3)
    job = start_job(sandbox)
    daemon = start(sandbox, hold, meters)
    (barred,) = wait_for(lambda: sandbox.side("barred") or job.beats(5), "the reason")
    assert "EXCLUSIVE_PROCESS" in barred["reason"] and sandbox.side("started") == []
    job.beats(10)
    meters.say(mode=0)
    sandbox.works()
    assert daemon.kill(signal.SIGTERM) == 0 and job.finish() == 0
    assert sum(sums["ended_ns"] for sums in sandbox.events("bubble_time")) > 0, "it was not about to start"


def test_a_side_task_makes_no_context_before_the_main_job_has_one(sandbox: Sandbox, hold: Path) -> None:
    """A job that never says hello may not have come to its device yet."""
    job: Job = sandbox.start(Job, "-c", "import sys; sys.stdin.read()")
    daemon = start(sandbox, hold, Meters(sandbox), "--job-pid", str(job.pid))
    assert job.finish() == 0
    assert daemon.ended() == 0
    assert sandbox.events("end") and sandbox.side("started") == []
