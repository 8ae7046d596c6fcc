"""A standing daemon that serves the studies in a queue."""

import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.study_queue import Submissions
from squeezer.reports.report import build_report, render
from tests.support.paths import STUDIES
from tests.support.sandbox import Sandbox, wait_for
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration


def squeezer(*arguments: str) -> str:
    command = [sys.executable, "-m", "squeezer", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def submit(queue: Path, study: str, name: str, *options: str) -> None:
    squeezer("submit", str(STUDIES / study), "--queue", str(queue), "--study-name", name, *options)


def ended(queue: Path, *names: str) -> list[str | None]:
    submissions = Submissions(queue)
    found = {each.name: submissions.ended(each) for each in submissions.submissions()}
    return [found[name] for name in names]


def trials(queue: Path, name: str) -> list[FrozenTrial]:
    return optuna.load_study(study_name=name, storage=open_storage(str(queue / "study.journal"))).get_trials()


def served(sandbox: Sandbox) -> list[str]:
    """The studies that have had a turn, in order."""
    return [event["name"] for event in sandbox.side("serving")]


@pytest.mark.slow
def test_studies_take_turns_until_all_have_ended(sandbox: Sandbox, tmp_path: Path, hold: Path) -> None:
    """Each turn costs a start, so none is left to chance: on a busy machine that takes longer than a test waits.

    The first turns end after an epoch. Then one is held until it is ahead, so the other must have the next.
    """
    queue = tmp_path / "queue"
    submit(queue, "tiny.py", "one")
    submit(queue, "tiny.py", "two", "--share", "2")
    submit(queue, "no_loss.py", "broken")
    daemon = sandbox.daemon(sandbox.config(queue=queue), TINY_HOLD=str(hold))
    job = sandbox.job()
    wait_for(lambda: all(ended(queue, "broken")), "the end of what is wrong")
    wait_for(lambda: served(sandbox)[-1] != "broken", "another turn of a study that is right")
    before_ns = sandbox.word(Field.BUSY_NS)
    assert before_ns > 0
    wait_for(lambda: sandbox.word(Field.BUSY_NS) > 4 * before_ns, "more than its share of the time")
    hold.unlink()
    wait_for(lambda: all(ended(queue, "one", "two")), "the end of both")
    submit(queue, "tiny.py", "late", "--priority", "3")
    wait_for(lambda: all(ended(queue, "late")), "a study that came when none was left")
    assert ended(queue, "one", "two", "late") == ["done", "done", "done"]
    (broken,) = ended(queue, "broken")
    assert broken is not None and broken.startswith("failed: ") and "loss" in broken
    for name in ("one", "two"):
        found = trials(queue, name)
        assert [trial.state for trial in found] == [TrialState.COMPLETE, TrialState.PRUNED] * 3
        unheld = found[4], trials(queue, "late")[4]
        assert unheld[0].value == pytest.approx(unheld[1].value, rel=1e-3), "turns change no result"
    turns = served(sandbox)
    assert turns.count("one") > 1 and turns.count("two") > 1, turns
    table = squeezer("queue", str(queue))
    assert [line.split()[0] for line in table.splitlines()] == ["study", "one", "two", "broken", "late"]
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    assert sandbox.events("fault") == []
    report = build_report(sandbox.run)
    assert report["side"]["restarts"] == 0
    assert set(report["trials"]["studies"]) == {"one", "two", "late"}
    assert report["trials"]["completed"] == 3 * 3
    assert "best of two: trial" in render(report)


def test_an_unfinished_study_goes_on_in_the_next_job(sandbox: Sandbox, tmp_path: Path, hold: Path) -> None:
    queue = tmp_path / "queue"
    submit(queue, "tiny.py", "held")
    config = sandbox.config(queue=queue)
    daemon = sandbox.daemon(config, TINY_HOLD=str(hold))
    job = sandbox.job()
    wait_for(lambda: sandbox.events("progress"), "an epoch")
    assert "trains on 1 device" in squeezer("queue", str(queue))
    assert daemon.kill(signal.SIGTERM) == 0
    assert {trial.state for trial in trials(queue, "held")} == {TrialState.WAITING}, "it has released them"
    assert "  waits" in squeezer("queue", str(queue))
    hold.unlink()
    daemon = sandbox.daemon(config)
    wait_for(lambda: ended(queue, "held") == ["done"], "its end")
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    assert {trial.state for trial in trials(queue, "held")} == {TrialState.COMPLETE, TrialState.PRUNED}


@pytest.mark.slow
def test_a_study_in_which_processes_die_has_failed_and_the_others_are_served(sandbox: Sandbox, tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    submit(queue, "crashes.py", "crashes", "--priority", "2")
    submit(queue, "quits.py", "also", "--priority", "1")
    submit(queue, "tiny.py", "good")
    daemon = sandbox.daemon(sandbox.config(queue=queue))
    job = sandbox.job()
    wait_for(lambda: all(ended(queue, "crashes", "also", "good")), "the end of all three")
    *failed, good = ended(queue, "crashes", "also", "good")
    assert good == "done"
    assert failed == ["failed: one process after another died in it; the last: it was killed"] * 2
    assert "study crashes is given up" in daemon.said()
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    turns = served(sandbox)
    assert turns == ["crashes"] * 3 + ["also"] * 3 + ["good"], "max_restarts = 2 holds for each study"
    assert sandbox.side("given_up") == []
