"""A main job, a daemon and a side task on a device with streams, played by threads: who is killed, and who goes on."""

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import optuna
import pytest

from ds_hooks.shared.page.layout import ClockKind, DeviceGate, Field
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Job, Sandbox, children, is_alive, wait_for
from trials.search.storage.optuna_storage import open_storage

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MS = 1_000_000


def start_job(sandbox: Sandbox) -> Job:
    job: Job = sandbox.start(Job, "-m", "tests.support.cuda_metronome", "--bubble-ms", "30", "--compute-ms", "20")
    wait_for(lambda: job.step or not is_alive(job.pid), "the first step")
    assert job.step, job.said()
    return job


def start_daemon(sandbox: Sandbox, hold: Path, study: str = "tiny") -> Child:
    lines = [
        "[squeeze]",
        "alone_share = 0.0",
        "margin_ms = 3",
        "[guard]",
        "enabled = false",
    ]
    lines += ["[side]", f'study = "{STUDIES / study}.py"', "max_restarts = 1", '[device]\nkind = "cuda"']
    config = sandbox.files / "stream.toml"
    config.write_text("\n".join([*lines, "[run]", f'directory = "{sandbox.run}"']))
    kernels = str(sandbox.files / "kernels.json")
    command = ("-m", "tests.support.cuda_daemon", "daemon", "--config", str(config))
    daemon: Child = sandbox.start(Child, *command, TINY_HOLD=str(hold), STREAM_KERNELS=kernels, UNKIND_DRIVER="1")
    wait_for(lambda: "serves device" in daemon.said() or not is_alive(daemon.pid), "the daemon")
    assert is_alive(daemon.pid), daemon.said()
    return daemon


def side_trains(sandbox: Sandbox, after: int = 0) -> int:
    """Wait until the side task's process number `after` trains; its process id."""
    pid = wait_for(lambda: sandbox.side("started")[after:], "the side task")[0]["pid"]
    wait_for(lambda: sandbox.word(Field.SIDE_PID) == pid, "its claim")
    sandbox.works()
    return int(pid)


def gate_is_shut(sandbox: Sandbox) -> bool:
    return sandbox.word(Field.DEVICE_GATE) == DeviceGate.CLOSED and not sandbox.word(Field.BUBBLE) & 1


def stays_open(sandbox: Sandbox) -> bool:
    word = sandbox.word(Field.BUBBLE)
    time.sleep(0.3)
    return bool(word & 1) and sandbox.word(Field.BUBBLE) == word


def test_a_side_task_runs_in_bubbles_that_only_the_device_knows_and_ends_although_its_stream_waits(
    sandbox: Sandbox, hold: Path
) -> None:
    job = start_job(sandbox)
    daemon = start_daemon(sandbox, hold)
    assert sandbox.word(Field.CLOCK_KIND) == ClockKind.CUDA
    side_trains(sandbox)
    wait_for(lambda: sandbox.word(Field.UNITS_RUN) > 300, "some hundred units")
    ended_ns = time.monotonic_ns()
    assert daemon.kill(signal.SIGTERM) == 0
    assert sandbox.side("exited")[0]["status"] == 0, daemon.said()
    assert sandbox.word(Field.DEVICE_GATE) != DeviceGate.FORCED
    job.beats(2)
    assert job.finish() == 0 and "[ds_hooks]" not in job.said(), job.said()

    bubbles = json.loads(job.said().splitlines()[-1])["bubbles"]
    kernels = json.loads((sandbox.files / "kernels.json").read_text())
    starts = [start for start, _ in kernels if start < ended_ns]
    assert len(starts) > 100
    gaps = [(end, begin) for (_, end), (begin, _) in pairwise(bubbles)]
    strays = [start for start in starts if any(end + (begin - end) // 2 <= start < begin for end, begin in gaps)]
    assert strays == [], "what began in no bubble, nor soon after one"
    assert sandbox.events("fault") == []
    (run,) = sandbox.events("run")
    assert run["config"]["squeeze"]["preemptive"] is False
    assert sandbox.events("action") == []


def test_a_trial_that_the_device_finds_lost_fails_in_the_same_epoch_as_where_the_host_looks(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    job = start_job(sandbox)
    daemon = start_daemon(sandbox, tmp_path / "none", "diverges")
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    beside = sandbox.trials("diverges")
    alone_in = tmp_path / "alone"
    status, said = sandbox.run_to_end("-m", "trials", "run", str(STUDIES / "diverges.py"), "--directory", str(alone_in))
    assert status == 0, said
    (journal,) = alone_in.rglob("*.journal")
    alone = optuna.load_study(study_name="diverges", storage=open_storage(str(journal))).get_trials()
    assert [each.state.name for each in beside] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert beside[1].user_attrs["squeezer_reason"] == "the loss is not finite in epoch 1"
    for one, other in zip(beside, alone, strict=True):
        assert one.state is other.state and one.values == pytest.approx(other.values)
        assert one.user_attrs.get("squeezer_reason") == other.user_attrs.get("squeezer_reason")


def test_whoever_is_killed_nothing_hangs_and_the_gate_is_shut(sandbox: Sandbox, hold: Path) -> None:
    job = start_job(sandbox)
    daemon = start_daemon(sandbox, hold)

    # the side task, while its stream waits in a long compute
    side = side_trains(sandbox)
    job.change(stall_ms=1500)
    wait_for(lambda: gate_is_shut(sandbox) and sandbox.word(Field.SIDE_ACTIVITY) == 0, "a long compute")
    os.kill(side, signal.SIGKILL)
    wait_for(lambda: sandbox.word(Field.SIDE_PROCESS) not in (0, side), "its successor")
    job.change(stall_ms=0)
    side = side_trains(sandbox, after=1)
    helpers = children(side)

    # the main job, while the word is open
    job.change(bubble_ms=60_000)
    wait_for(lambda: stays_open(sandbox), "a long bubble")
    assert job.kill(signal.SIGKILL) == -signal.SIGKILL
    wait_for(
        lambda: [fault for fault in sandbox.events("fault") if "without saying goodbye" in fault["what"]], "notice"
    )
    wait_for(lambda: gate_is_shut(sandbox), "the daemon to shut the gate in its place")

    # the daemon, while nobody else is left who could open the gate
    assert is_alive(side)
    assert daemon.kill(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not any(is_alive(pid) for pid in (side, *helpers)), "the end of the side task")
    assert gate_is_shut(sandbox)
    for left in sandbox.directory.iterdir():  # by processes that were all killed; their successors would take it over
        left.unlink()


def test_a_job_that_dies_in_a_bubble_leaves_its_side_task_to_the_next_job(sandbox: Sandbox, hold: Path) -> None:
    job = start_job(sandbox)
    daemon = start_daemon(sandbox, hold)
    sandbox.works()
    job.change(bubble_ms=60_000)
    wait_for(lambda: stays_open(sandbox), "a long bubble")
    assert job.kill(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not sandbox.word(Field.BUBBLE) & 1, "the daemon to shut the gate in its place")
    assert sandbox.word(Field.DEVICE_GATE) == DeviceGate.CLOSED
    before = sandbox.word(Field.UNITS_RUN)
    time.sleep(0.5)
    assert sandbox.word(Field.UNITS_RUN) <= before + 2, "what had begun"
    second = start_job(sandbox)
    sandbox.works()
    assert len(sandbox.side("started")) == 1, "the same one goes on"
    second.beats(3)
    assert daemon.kill(signal.SIGTERM) == 0
    assert second.finish() == 0 and "[ds_hooks]" not in second.said(), second.said()


def test_a_daemon_that_is_killed_in_a_bubble_is_followed_by_one_whose_side_task_trains(
    sandbox: Sandbox, hold: Path
) -> None:
    job = start_job(sandbox)
    daemon = start_daemon(sandbox, hold)
    sandbox.works()
    side = sandbox.word(Field.SIDE_PID)
    job.change(bubble_ms=3000)
    wait_for(lambda: stays_open(sandbox), "a long bubble")
    assert daemon.kill(signal.SIGKILL) == -signal.SIGKILL
    job.change(bubble_ms=30)
    second = start_daemon(sandbox, hold)
    wait_for(lambda: not is_alive(side), "the end of its side task")
    wait_for(lambda: sandbox.word(Field.SIDE_PID) not in (0, side), "another")
    sandbox.works()
    assert sandbox.word(Field.DEVICE_GATE) != DeviceGate.FORCED
    job.beats(3)
    assert second.kill(signal.SIGTERM) == 0
    assert job.finish() == 0 and "[ds_hooks]" not in job.said(), job.said()
