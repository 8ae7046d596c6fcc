"""Faults while a real daemon serves a main job with a real side task: what is killed, and who goes on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from ds_hooks.shared.page import Field
from squeezer.policy.state import AHEAD_STEPS
from squeezer.records.reader import load_run, read_groups
from squeezer.reports.report import build_report, render
from tests.integration.place import STUDIES, Child, Job, Place, children, cpu_ticks, is_alive, stat, wait_for
from trials import TrialGroup, build_member
from trials.gate import OpenGate
from trials.study import load_study

pytestmark = pytest.mark.integration


def running(place: Place) -> set[int]:
    return {trial.number for trial in place.trials() if trial.state is TrialState.RUNNING}


def reasons(place: Place) -> set[str]:
    """Why trials failed; none may be left in another state."""
    found = place.trials()
    assert found and all(trial.state is TrialState.FAIL for trial in found), found
    return {str(trial.user_attrs.get("squeezer_reason")) for trial in found}


def trains(place: Place, after: int = 0) -> int:
    """Wait until the side task's process number `after` trains trials; its process id."""

    def progress() -> bool:
        starts_ns = [event["t_ns"] for event in place.side("started")]
        return len(starts_ns) > after and any(said["t_ns"] > starts_ns[after] for said in place.events("progress"))

    wait_for(progress, "the end of an epoch")
    place.works()
    return int(place.side("started")[after]["pid"])


def done(place: Place) -> None:
    """Wait until the study is done, and check what became of its trials."""
    finished_ns = wait_for(lambda: place.side("finished"), "the end of the study")[0]["t_ns"]
    exited = wait_for(lambda: [end for end in place.side("exited") if end["t_ns"] > finished_ns], "the exit")
    assert exited[0]["status"] == 0
    states = {trial.number: trial.state for trial in place.trials()}
    ends = (TrialState.COMPLETE, TrialState.PRUNED)
    assert states == {number: ends[number % 2] for number in range(6)}, "odd trials learn nothing"


def ended_well(job: Job) -> None:
    assert job.finish() == 0
    assert "[ds_hooks]" not in job.said(), job.said()


def sleeps(place: Place, side: int, job: Job) -> bool:
    """Whether the side task does nothing in the job's next 20 steps."""
    ticks, work = cpu_ticks(side), place.word(Field.WORK)
    job.beats(20)
    return cpu_ticks(side) - ticks <= 1 and place.word(Field.WORK) == work


def test_a_daemon_serves_job_after_job_with_one_side_task_that_sleeps_when_there_is_no_bubble(
    place: Place, hold: Path
) -> None:
    daemon = place.daemon(place.config("tiny.py"), TINY_HOLD=str(hold))
    first = place.job()
    side = trains(place)

    first.change(bubble_ms=0, compute_ms=40)
    first.beats(20)  # the forecasts follow
    assert any(sleeps(place, side, first) for _ in range(5)), "a busy machine makes bubbles of its own, but not always"
    ended_well(first)
    assert is_alive(daemon.pid) and is_alive(side)

    second = place.job()
    place.works()
    hold.unlink()
    done(place)
    ended_well(second)
    assert daemon.kill(signal.SIGTERM) == 0

    assert [(job["job"], job["pid"]) for job in place.events("job")] == [(0, first.pid), (1, second.pid)]
    (rank,) = load_run(place.run)
    assert {(bubble["job"], bubble["permit_until_ns"] is None) for bubble in rank.records["bubble"]} == {
        *((0, True), (0, False), (1, True), (1, False))
    }
    assert len(place.side("started")) == 1
    assert place.events("fault") == []
    assert len(place.events("end")) == 1


def test_a_killed_daemon_takes_its_side_task_along_and_its_successor_serves_the_running_job(
    place: Place, hold: Path
) -> None:
    job = place.job()
    job.beats(3)
    config = place.config("tiny.py")
    first = place.daemon(config, TINY_HOLD=str(hold))
    side = trains(place)
    helpers, numbers = children(side), running(place)
    assert helpers and numbers

    # The job hears nothing of the change of daemons: it has nothing to say meanwhile.
    job.change(stall_ms=4000)
    stalled_ns = 500_000_000
    wait_for(
        lambda: not place.word(Field.BUBBLE) & 1 and time.monotonic_ns() - place.word(Field.BUBBLE_END_NS) > stalled_ns,
        "a long compute",
    )
    job.change(stall_ms=0)
    assert first.kill(signal.SIGKILL) == -signal.SIGKILL
    second = place.daemon(config, TINY_HOLD=str(hold))
    wait_for(lambda: not any(is_alive(pid) for pid in (side, *helpers)), "the end of the side task")
    wait_for(lambda: len(place.events("job")) == 2, "another hello")
    assert {hello["pid"] for hello in place.events("job")} == {job.pid}
    trains(place, after=1)
    assert running(place) >= numbers, "taken over"

    job.change(bubble_ms=60_000)
    wait_for(
        lambda: place.word(Field.BUBBLE) & 1 and time.monotonic_ns() - place.word(Field.BUBBLE_START_NS) > stalled_ns,
        "a long bubble",
    )
    assert job.kill(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: [fault for fault in place.events("fault") if "without saying goodbye" in fault["what"]], "notice")
    work = place.word(Field.WORK)
    assert place.word(Field.BUBBLE) & 1, "nobody closed it"
    assert place.word(Field.PERMIT_UNTIL_NS) == 0
    assert second.kill(signal.SIGTERM) == 0
    assert place.side("exited")[-1]["status"] == 0
    assert work and reasons(place) == {"the main job or its daemon ended before the trial did"}


def test_a_daemon_that_falls_silent_ends_the_squeezing(place: Place, hold: Path) -> None:
    daemon = place.daemon(place.config("tiny.py"), TINY_HOLD=str(hold))
    job = place.job()
    trains(place)
    os.kill(daemon.pid, signal.SIGSTOP)
    job.beats(AHEAD_STEPS + 3)
    work = place.word(Field.WORK)
    job.beats(5)
    assert (place.word(Field.PERMIT_UNTIL_NS), place.word(Field.WORK)) == (0, work)
    os.kill(daemon.pid, signal.SIGCONT)
    place.works()
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0


def test_a_killed_side_task_is_restarted_and_finishes_the_same_trials(place: Place, hold: Path) -> None:
    daemon = place.daemon(place.config("tiny.py"), TINY_HOLD=str(hold))
    job = place.job()
    side = trains(place)
    numbers = running(place)
    os.kill(side, signal.SIGKILL)
    trains(place, after=1)
    assert running(place) >= numbers
    hold.unlink()
    done(place)
    assert [(end["status"], end["restarted"]) for end in place.side("exited")] == [(-9, True), (0, False)]
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_side_task_that_dies_too_often_is_given_up_and_its_trials_fail(place: Place, hold: Path) -> None:
    daemon = place.daemon(place.config("tiny.py", max_restarts=0), TINY_HOLD=str(hold))
    job = place.job()
    os.kill(trains(place), signal.SIGKILL)
    wait_for(lambda: "is given up; the main job goes on alone" in daemon.said(), "giving up")
    wait_for(lambda: not running(place), "the end of its trials")
    job.beats(5)
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    assert place.side("given_up")[0]["status"] == -9
    assert reasons(place) == {"the side task ended with status -9 and was given up"}


def test_at_its_end_a_daemon_removes_what_names_it_to_others(place: Place, hold: Path) -> None:
    named = place.files / "run-1" / "daemon0.pid"
    named.parent.mkdir()
    options = ("-m", "squeezer", "daemon", "--config", str(place.config()), "--pid-file", str(named))
    daemon: Child = place.start(Child, *options)
    wait_for(lambda: "serves device" in daemon.said() or not is_alive(daemon.pid), "the daemon")
    named.touch()
    assert daemon.kill(signal.SIGTERM) == 0, daemon.said()
    assert not named.parent.exists()
    named.parent.mkdir()
    named.touch()
    Path(options[4]).write_text("[squeeze]\npreemptive = 3")
    status, said = place.run_to_end(*options)
    assert status == 2 and "preemptive" in said
    assert not named.parent.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_daemon_and_all_its_processes_ends_them_cleanly(
    place: Place, hold: Path, number: signal.Signals
) -> None:
    daemon = place.daemon(place.config("tiny.py"), TINY_HOLD=str(hold))
    job = place.job()
    trains(place)
    os.killpg(daemon.pid, number)
    assert daemon.ended() == 0, daemon.said()
    assert all(reason.startswith("the main job or its daemon ended") for reason in reasons(place))
    ended_well(job)


@pytest.mark.slow
@pytest.mark.parametrize("preemptive", [True, False])
def test_a_unit_longer_than_the_bubbles_is_stopped_and_goes_on_in_the_next(place: Place, preemptive: bool) -> None:
    daemon = place.daemon(place.config("stubborn.py", preemptive=preemptive))
    job = place.job("--compute-ms", "20")
    wait_for(lambda: place.side("ready"), "the side task")
    side = place.side("started")[0]["pid"]
    wait_for(lambda: place.word(Field.UNITS_RUN), "a unit")
    if preemptive:  # else it is stopped too late before the next bubble to be seen
        state = ""
        deadline_s = time.monotonic() + 60
        while state != "T" and time.monotonic() < deadline_s:
            state = stat(side)[0]
        assert state == "T"
    place.works()
    place.works()  # what it takes now is known, and all the same it is not kept out for ever
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    ready_ns = place.side("ready")[0]["t_ns"]
    assert any(bubble["stopped"] for bubble in place.events("bubble") if bubble["start_ns"] > ready_ns)


def test_a_side_task_that_overruns_breaks_the_budget_and_is_shut_out_for_a_while(place: Place) -> None:
    daemon = place.daemon(place.config("stubborn.py", preemptive=False, guard=True))
    job = place.job("--compute-ms", "20")
    shut = wait_for(lambda: [found for found in place.events("guard") if found["what"] == "shut"], "the guard")[0]
    assert shut["cause"] == "overrun" and shut["figures"]["overrun_share"] > 0.01
    first, last = shut["step"] + 2, shut["step"] + shut["figures"]["for_steps"]
    wait_for(lambda: place.events("bubble")[-1]["step"] > last, "the end of that while")
    permits = {found["permit_until_ns"] for found in place.events("bubble") if first <= found["step"] <= last}
    assert permits == {None}
    # whether it is then acquitted, and when, is the guard's to say
    wait_for(lambda: [it for it in place.events("guard") if it["what"] == "compare" and it["step"] >= last], "a try")
    wait_for(lambda: any(it["permit_until_ns"] for it in place.events("bubble") if it["step"] > last), "a permit")
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    assert {step["squeezed"] for step in place.events("step") if first <= step["step"] <= last} == {None}


@pytest.mark.slow
def test_a_group_whose_units_fit_no_bubble_is_split_until_they_do(place: Place) -> None:
    daemon = place.daemon(place.config("wide.py", preemptive=False))
    job = place.job("--bubble-ms", "45")  # 56 ms for four trials, 28 for two
    wait_for(lambda: place.side("finished"), "the end of the study", patience_s=100)
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0

    first = place.side("starved")[0]
    assert (first["unit"], first["trials"], first["did"]) == ("loss", 4, "split")
    assert first["needs_ms"] > first["longest_bubble_ms"]
    assert daemon.said().count('side task: unit "loss" of 4 trials needs ') == 1
    report = build_report(place.run)
    assert report["side"]["starved"][0]["trials"] == 4
    assert "longer than every bubble: loss of 4, " in render(report)
    groups = read_groups(place.run / "rank0.units.jsonl")
    assert {2, 4} <= {group["trials"] for group in groups}

    done = place.trials("wide")
    assert [trial.state for trial in done] == [TrialState.COMPLETE] * 4
    study = load_study(STUDIES / "wide.py")
    members = [build_member(study, t.number, json.loads(t.user_attrs["squeezer_params"])) for t in done]
    alone = TrialGroup(study, members, OpenGate())
    for epoch in range(study.epochs):
        for batch in alone.batches(epoch):
            alone.train_step(*batch)
    assert [trial.value for trial in done] == pytest.approx(alone.evaluate(), rel=1e-5)
