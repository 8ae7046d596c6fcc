"""The first promise: the main job computes the same bits whatever we do, and whatever is done to us."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.layout import Role
from squeezer.records.layout import events_path, units_path
from squeezer.records.reader import read_events
from tests.support.jobs import (
    NARROW,
    PATIENT,
    SQUEEZE_ALL,
    STEPS_ALONE,
    Ended,
    KillInBubble,
    SqueezedRun,
    deepspeed,
    denoise,
    ds_squeeze,
    pretrain,
    run,
    run_squeezed,
    short_directory,
    two_ranks,
)
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.alone]
STEPS = STEPS_ALONE


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


def squeezed(tmp_path: Path, directory: Path, text: str, *killers: KillInBubble) -> Ended:
    config, losses = tmp_path / "squeezer.toml", tmp_path / "losses"
    config.write_text(text)
    for killer in killers:
        killer.start()
    script = PATIENT, *pretrain(losses, STEPS, NARROW)
    ended = run_squeezed(config, tmp_path / "run", directory, losses, *script)
    assert ended.status == 0, ended.output
    for killer in killers:
        killer.join(30)
        assert killer.pid, f"killed in the middle of a bubble\n{ended.output}"
    return ended


@pytest.mark.slow
def test_another_kind_of_job_with_evaluations(tmp_path: Path, directory: Path) -> None:
    losses, config = tmp_path / "losses", tmp_path / "squeezer.toml"
    with short_directory() as made:
        without = run(deepspeed(*denoise(losses, 120)), made, losses)
    assert without.status == 0 and len(set(without.losses)) == 120, without.output
    config.write_text(SQUEEZE_ALL)
    ended = run(ds_squeeze(config, PATIENT, *denoise(losses, 120)), directory, losses)
    assert (ended.status, ended.losses) == (0, without.losses), ended.output
    for rank in (0, 1):
        assert units_path(tmp_path / "run", rank).stat().st_size, "its side task ran"


@pytest.mark.slow
def test_in_unusual_ways_of_training(tmp_path: Path, directory: Path) -> None:
    script, losses, config = (
        str(ROOT / "tests/support/unusual_train.py"),
        tmp_path / "losses",
        tmp_path / "squeezer.toml",
    )
    with short_directory() as made:
        without = run(deepspeed(script, "--losses", str(losses)), made, losses)
    assert (without.status, len(without.losses)) == (7, len(set(without.losses))), without.output
    losses.unlink()
    config.write_text(SQUEEZE_ALL)
    ended = run(ds_squeeze(config, PATIENT, script, "--losses", str(losses)), directory, losses)
    assert (ended.status, ended.losses) == (7, without.losses), ended.output
    assert "switched off" not in ended.output
    for rank in (0, 1):
        assert units_path(tmp_path / "run", rank).stat().st_size, "its side task ran"


@pytest.mark.slow
def test_with_hooks_and_without_a_daemon(alone: list[str], tmp_path: Path, directory: Path) -> None:
    losses = tmp_path / "losses"
    ended = run(deepspeed("--module", "ds_hooks", *pretrain(losses, STEPS, NARROW)), directory, losses)
    assert (ended.status, ended.losses) == (0, alone), ended.output
    assert "[ds_hooks]" not in ended.output, "nothing to complain about"


def test_with_a_hook_that_raises(alone: list[str], tmp_path: Path, directory: Path) -> None:
    losses = tmp_path / "losses"
    script = str(ROOT / "tests" / "support" / "raise_in_hook.py")
    ended = run(two_ranks(script, *pretrain(losses, 20, NARROW)), directory, losses)
    assert (ended.status, ended.losses) == (0, alone[:20]), ended.output
    assert ended.output.count("switched off; training continues without squeezing: injected") == 2, "once per rank"


def test_with_side_tasks(alone: list[str], squeezed_run: SqueezedRun) -> None:
    assert squeezed_run.ended.losses[:STEPS] == alone
    for rank in (0, 1):
        assert units_path(squeezed_run.record, rank).stat().st_size > 0, f"side tasks ran\n{squeezed_run.ended.output}"


@pytest.mark.parametrize("preemptive", ['"stop"', '"idle"'])
def test_with_the_side_task_and_then_the_daemon_killed_in_a_bubble(
    alone: list[str], tmp_path: Path, directory: Path, preemptive: str
) -> None:
    text = SQUEEZE_ALL.replace("[squeeze]", f"[squeeze]\npreemptive = {preemptive}")
    assert text != SQUEEZE_ALL
    # the second rank's daemon, so that the restart of the first one's side task is there to be read
    killers = KillInBubble(directory, Role.SIDE, step=10), KillInBubble(directory, Role.DAEMON, step=20, device=1)
    ended = squeezed(tmp_path, directory, text, *killers)
    assert ended.losses == alone
    first, second = (list(read_events(events_path(tmp_path / "run", rank))) for rank in (0, 1))
    exits = [(event["status"], event["restarted"]) for event in first if event.get("event") == "exited"]
    assert (-9, True) in exits, "another side task took over"
    assert "the daemon ended with SIGKILL; restarting" in ended.output
    assert [event["r"] for event in second].count("run") == 2, "another daemon took over"
