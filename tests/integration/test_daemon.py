"""Faults while a real daemon serves a main job with a real side task: what is killed, and who goes on."""

import json
import os
import re
import signal
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from ds_hooks.shared.page.file import socket_path
from ds_hooks.shared.page.layout import Field
from squeezer.policy.state import AHEAD_STEPS
from squeezer.records.reader import load_run, read_groups
from squeezer.reports.report import build_report, render
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Job, Sandbox, children, cpu_ticks, is_alive, stat, wait_for
from trials import TrialGroup, build_member
from trials.gate.base import OpenGate
from trials.search.storage.optuna_storage import open_storage
from trials.study import load_study

pytestmark = pytest.mark.integration


def running(sandbox: Sandbox) -> set[int]:
    return {trial.number for trial in sandbox.trials() if trial.state is TrialState.RUNNING}


def all_wait(sandbox: Sandbox) -> bool:
    """Whether there are trials, and all wait for another worker."""
    found = sandbox.trials()
    return bool(found) and all(trial.state is TrialState.WAITING for trial in found)


def trains(sandbox: Sandbox, after: int = 0) -> int:
    """Wait until the side task's process number `after` trains trials; its process id."""

    def progress() -> bool:
        starts_ns = [event["t_ns"] for event in sandbox.side("started")]
        return len(starts_ns) > after and any(
            progress["t_ns"] > starts_ns[after] for progress in sandbox.events("progress")
        )

    wait_for(progress, "the end of an epoch")
    sandbox.works()
    return int(sandbox.side("started")[after]["pid"])


def done(sandbox: Sandbox) -> None:
    """Wait until the study is done, and check what became of its trials."""
    finished_ns = wait_for(lambda: sandbox.side("finished"), "the end of the study")[0]["t_ns"]
    exited = wait_for(lambda: [end for end in sandbox.side("exited") if end["t_ns"] > finished_ns], "the exit")
    assert exited[0]["status"] == 0
    states = {trial.number: trial.state for trial in sandbox.trials()}
    ends = (TrialState.COMPLETE, TrialState.PRUNED)
    assert states == {number: ends[number % 2] for number in range(6)}, "odd trials learn nothing"


def ended_well(job: Job) -> None:
    assert job.finish() == 0
    assert "[ds_hooks]" not in job.said(), job.said()


def sleeps(sandbox: Sandbox, side: int, job: Job) -> bool:
    """Whether the side task does nothing in the job's next 20 steps."""
    ticks, work = cpu_ticks(side), sandbox.word(Field.WORK)
    job.beats(20)
    return cpu_ticks(side) - ticks <= 1 and sandbox.word(Field.WORK) == work


@pytest.mark.alone
def test_a_daemon_serves_job_after_job_with_one_side_task_that_sleeps_when_there_is_no_bubble(
    sandbox: Sandbox, hold: Path
) -> None:
    daemon = sandbox.daemon(sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    first = sandbox.job()
    side = trains(sandbox)

    first.change(bubble_ms=0, compute_ms=40)
    first.beats(20)  # the forecasts follow
    assert any(sleeps(sandbox, side, first) for _ in range(15)), (
        "a busy machine makes bubbles of its own, but not always"
    )
    ended_well(first)
    assert is_alive(daemon.pid) and is_alive(side)

    core = max(os.sched_getaffinity(0))
    second = sandbox.job("--core", str(core))
    sandbox.works()
    threads = [int(thread) for pid in (side, *children(side)) for thread in os.listdir(f"/proc/{pid}/task")]
    assert {on for thread in threads for on in os.sched_getaffinity(thread)} == {core}, "it follows the job"
    hold.unlink()
    done(sandbox)
    ended_well(second)
    assert daemon.kill(signal.SIGTERM) == 0

    assert [(job["job"], job["pid"]) for job in sandbox.events("job")] == [(0, first.pid), (1, second.pid)]
    (rank,) = load_run(sandbox.run)
    assert {(bubble["job"], bubble["permit_until_ns"] is None) for bubble in rank.records["bubble"]} == {
        *((0, True), (0, False), (1, True), (1, False))
    }
    assert len(sandbox.side("started")) == 1
    assert sandbox.events("fault") == []
    assert len(sandbox.events("end")) == 1


def test_two_jobs_with_one_local_rank_are_served_by_two_standing_daemons(sandbox: Sandbox, hold: Path) -> None:
    config = sandbox.config("tiny.py")
    daemons = [sandbox.daemon(config, local_rank, TINY_HOLD=str(hold)) for local_rank in (0, 1)]
    jobs = [sandbox.job(), sandbox.job()]
    for rank, job in enumerate(jobs):
        found = wait_for(lambda rank=rank: sandbox.events("job", rank), "the job")
        assert [each["pid"] for each in found] == [job.pid]
        wait_for(lambda rank=rank: sandbox.side("started", rank), "the side task")
    assert "another job has this local rank" in jobs[1].said()
    ended_well(jobs[0])
    third = sandbox.job()
    wait_for(lambda: len(sandbox.events("job")) == 2, "the third job")
    assert [found["pid"] for found in sandbox.events("job")] == [jobs[0].pid, third.pid]
    jobs[1].beats(5)
    ended_well(third)
    assert jobs[1].finish() == 0
    assert [daemon.kill(signal.SIGTERM) for daemon in daemons] == [0, 0]


def test_a_killed_daemon_takes_its_side_task_along_and_its_successor_serves_the_running_job(
    sandbox: Sandbox, hold: Path
) -> None:
    job = sandbox.job()
    job.beats(3)
    config = sandbox.config("tiny.py")
    first = sandbox.daemon(config, TINY_HOLD=str(hold))
    side = trains(sandbox)
    helpers, numbers = children(side), running(sandbox)
    assert helpers and numbers

    # The job hears nothing of the change of daemons: it has nothing to say meanwhile.
    job.change(stall_ms=2500)
    stalled_ns = 500_000_000
    wait_for(
        lambda: (
            not sandbox.word(Field.BUBBLE) & 1 and time.monotonic_ns() - sandbox.word(Field.BUBBLE_END_NS) > stalled_ns
        ),
        "a long compute",
    )
    job.change(stall_ms=0)
    assert first.kill(signal.SIGKILL) == -signal.SIGKILL
    second = sandbox.daemon(config, TINY_HOLD=str(hold))
    wait_for(lambda: not any(is_alive(pid) for pid in (side, *helpers)), "the end of the side task")
    wait_for(lambda: len(sandbox.events("job")) == 2, "another hello")
    assert {hello["pid"] for hello in sandbox.events("job")} == {job.pid}
    trains(sandbox, after=1)
    wait_for(lambda: running(sandbox) >= numbers, "all its trials, taken over")

    job.change(bubble_ms=60_000)
    wait_for(
        lambda: (
            sandbox.word(Field.BUBBLE) & 1 and time.monotonic_ns() - sandbox.word(Field.BUBBLE_START_NS) > stalled_ns
        ),
        "a long bubble",
    )
    assert job.kill(signal.SIGKILL) == -signal.SIGKILL
    wait_for(
        lambda: [fault for fault in sandbox.events("fault") if "without saying goodbye" in fault["what"]], "notice"
    )
    work = sandbox.word(Field.WORK)
    assert sandbox.word(Field.BUBBLE) & 1, "nobody closed it"
    assert sandbox.word(Field.PERMIT_UNTIL_NS) == 0
    assert second.kill(signal.SIGTERM) == 0
    assert sandbox.side("exited")[-1]["status"] == 0
    assert work and all_wait(sandbox)


@pytest.mark.slow
@pytest.mark.parametrize("_", range(12))
def test_a_daemon_that_finds_time_only_when_its_job_has_ended_hears_the_goodbye(sandbox: Sandbox, _: int) -> None:
    """It and ZeroMQ's thread race for what has come meanwhile, so this is tried some times."""
    config = sandbox.files / "observe.toml"
    config.write_text(f'[run]\ndirectory = "{sandbox.run}"\n')
    job = sandbox.job("--bubble-ms", "5", "--compute-ms", "2")
    daemon = sandbox.daemon_of(job, config)
    wait_for(lambda: sandbox.events("job"), "the hello")
    job.beats(10)
    processes = [daemon.pid, *children(daemon.pid)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    assert job.finish() == 0
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    assert daemon.ended() == 0
    assert sandbox.events("fault") == []
    assert max(bubble["step"] for bubble in sandbox.events("bubble")) == sandbox.events("step")[-1]["step"]


@pytest.mark.slow
def test_a_study_goes_on_in_another_run_that_names_its_directory(sandbox: Sandbox, hold: Path) -> None:
    studies = sandbox.files / "studies"
    daemon = sandbox.daemon(sandbox.config("tiny.py", studies=studies), TINY_HOLD=str(hold))
    job = sandbox.job()
    trains(sandbox)
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    storage = open_storage(str(studies / "study.journal"))
    states = [trial.state for trial in optuna.load_study(study_name="tiny", storage=storage).trials]
    assert TrialState.WAITING in states and not {TrialState.FAIL, TrialState.RUNNING} & set(states)
    hold.unlink()

    sandbox.run = sandbox.files / "another run"
    daemon = sandbox.daemon(sandbox.config("tiny.py", studies=studies))
    job = sandbox.job()
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    trials = build_report(sandbox.run)["trials"]
    assert (trials["completed"] + trials["pruned"], trials["failed"], trials["waiting"]) == (6, 0, 0)
    assert not (sandbox.run / "study").exists()


def test_a_daemon_that_falls_silent_ends_the_squeezing(sandbox: Sandbox, hold: Path) -> None:
    daemon = sandbox.daemon(sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    job = sandbox.job()
    trains(sandbox)
    os.kill(daemon.pid, signal.SIGSTOP)
    job.beats(AHEAD_STEPS + 3)
    work = sandbox.word(Field.WORK)
    job.beats(5)
    assert (sandbox.word(Field.PERMIT_UNTIL_NS), sandbox.word(Field.WORK)) == (0, work)
    os.kill(daemon.pid, signal.SIGCONT)
    sandbox.works()
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_killed_side_task_is_restarted_and_finishes_the_same_trials(sandbox: Sandbox, hold: Path) -> None:
    daemon = sandbox.daemon(sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    job = sandbox.job()
    side = trains(sandbox)
    numbers = running(sandbox)
    os.kill(side, signal.SIGKILL)
    trains(sandbox, after=1)
    wait_for(lambda: running(sandbox) >= numbers, "all its trials, taken over")
    hold.unlink()
    done(sandbox)
    assert [(end["status"], end["restarted"]) for end in sandbox.side("exited")] == [(-9, True), (0, False)]
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_side_task_that_dies_too_often_is_given_up_and_its_trials_wait_for_another(
    sandbox: Sandbox, hold: Path
) -> None:
    daemon = sandbox.daemon(sandbox.config("tiny.py", max_restarts=0), TINY_HOLD=str(hold))
    job = sandbox.job()
    os.kill(trains(sandbox), signal.SIGKILL)
    wait_for(lambda: "is given up; the main job continues alone" in daemon.said(), "giving up")
    wait_for(lambda: not running(sandbox), "the end of its trials")
    job.beats(5)
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    assert sandbox.side("given_up")[0]["status"] == -9
    assert all_wait(sandbox)


def test_at_its_end_a_daemon_removes_what_names_it_to_others(sandbox: Sandbox, hold: Path) -> None:
    named = sandbox.files / "run-1" / "daemon0.pid"
    named.parent.mkdir()
    options = ("-m", "squeezer", "daemon", "--config", str(sandbox.config()), "--pid-file", str(named))
    daemon: Child = sandbox.start(Child, *options)
    wait_for(lambda: "serves device" in daemon.said() or not is_alive(daemon.pid), "the daemon")
    named.write_text(str(daemon.pid))
    assert daemon.kill(signal.SIGTERM) == 0, daemon.said()
    assert not named.parent.exists()
    named.parent.mkdir()
    Path(options[4]).write_text("[squeeze]\npreemptive = 3")
    refused: Child = sandbox.start(Child, *options)
    named.write_text(str(refused.pid))
    assert refused.ended() == 2 and "preemptive" in refused.said()
    assert not named.parent.exists()


def test_at_its_end_a_daemon_leaves_what_names_the_next_one(sandbox: Sandbox) -> None:
    named = sandbox.files / "run-1" / "daemon0.pid"
    named.parent.mkdir()
    named.write_text("1")
    options = ("-m", "squeezer", "daemon", "--config", str(sandbox.config()), "--pid-file", str(named))
    daemon: Child = sandbox.start(Child, *options)
    wait_for(lambda: "serves device" in daemon.said() or not is_alive(daemon.pid), "the daemon")
    assert daemon.kill(signal.SIGTERM) == 0, daemon.said()
    assert named.read_text() == "1"


@pytest.mark.slow
def test_a_daemon_without_standard_error_serves_all_the_same_and_logs_to_its_file(sandbox: Sandbox) -> None:
    script = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    options = ("-m", "squeezer", "daemon", "--config", str(sandbox.config("crashes.py")))
    served: Child = sandbox.start(Child, "-c", script, *options)
    wait_for(lambda: socket_path(sandbox.directory, 0).exists(), "the daemon")
    assert os.readlink(f"/proc/{served.pid}/fd/2") == os.devnull, (
        "not the page, into which the side task would write its errors"
    )
    job = sandbox.job()
    wait_for(lambda: sandbox.side("given_up"), "giving up")
    job.beats(3)
    assert job.finish() == 0
    assert served.kill(signal.SIGTERM) == 0
    log = (sandbox.run / "rank0.log").read_text()
    origin = "rank 0 run run squeezer.daemon.side_task_supervisor"
    assert f"WARNING {origin}: side task ended with status 3; restarting" in log
    assert "is given up; the main job continues alone" in log


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_the_daemon_and_all_its_processes_ends_them_cleanly(
    sandbox: Sandbox, hold: Path, number: signal.Signals
) -> None:
    daemon = sandbox.daemon(sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    job = sandbox.job()
    trains(sandbox)
    for pid in sandbox.living():
        if pid != job.pid:
            os.kill(pid, number)
    assert daemon.ended() == 0, daemon.said()
    assert all_wait(sandbox)
    ended_well(job)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stop", False])
def test_a_unit_longer_than_the_bubbles_is_stopped_and_goes_on_in_the_next(sandbox: Sandbox, mode: bool | str) -> None:
    daemon = sandbox.daemon(sandbox.config("stubborn.py", preemptive=mode))
    job = sandbox.job("--compute-ms", "20")
    wait_for(lambda: sandbox.side("ready"), "the side task")
    side = sandbox.side("started")[0]["pid"]
    wait_for(lambda: sandbox.word(Field.UNITS_RUN), "a unit")
    if mode:  # else it is stopped too late before the next bubble to be seen
        state = ""
        deadline_s = time.monotonic() + 60
        while state != "T" and time.monotonic() < deadline_s:
            state = stat(side)[0]
        assert state == "T"
    sandbox.works()
    sandbox.works()  # what it takes now is known, and all the same it is not kept out for ever
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    ready_ns = sandbox.side("ready")[0]["t_ns"]
    assert any(bubble["stopped"] for bubble in sandbox.events("bubble") if bubble["start_ns"] > ready_ns)


@pytest.mark.alone
def test_a_side_task_that_overruns_breaks_the_budget_and_is_shut_out_for_a_while(sandbox: Sandbox) -> None:
    daemon = sandbox.daemon(sandbox.config("stubborn.py", preemptive=False, guard=True))
    # bubbles in which it starts soon, though what overruns meanwhile makes their margins wide
    job = sandbox.job("--bubble-ms", "45", "--compute-ms", "10")
    shut = wait_for(lambda: [found for found in sandbox.events("guard") if found["what"] == "shut"], "the guard")[0]
    job.change(bubble_ms=15)
    assert shut["cause"] == "overrun" and shut["figures"]["overrun_share"] > 0.01
    first, last = shut["step"] + 2, shut["step"] + shut["figures"]["for_steps"]
    wait_for(lambda: sandbox.events("bubble")[-1]["step"] > last, "the end of that while")
    permits = {found["permit_until_ns"] for found in sandbox.events("bubble") if first <= found["step"] <= last}
    assert permits == {None}
    wait_for(lambda: [it for it in sandbox.events("guard") if it["what"] == "retry" and it["step"] >= last], "a try")
    wait_for(lambda: any(it["permit_until_ns"] for it in sandbox.events("bubble") if it["step"] > last), "a permit")
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0
    assert {step["squeezed"] for step in sandbox.events("step") if first <= step["step"] <= last} == {None}


@pytest.mark.slow
def test_a_group_whose_units_fit_no_bubble_is_split_until_they_do(sandbox: Sandbox) -> None:
    daemon = sandbox.daemon(sandbox.config("wide.py", preemptive=False))
    job = sandbox.job("--bubble-ms", "45")  # 56 ms for four trials, 28 for two
    wait_for(lambda: sandbox.side("finished"), "the end of the study", patience_s=100)
    ended_well(job)
    assert daemon.kill(signal.SIGTERM) == 0

    first = sandbox.side("starved")[0]
    assert (first["unit"], first["trials"], first["remedy"]) == ("loss", 4, "split")
    assert first["needs_ms"] > first["longest_bubble_ms"]
    assert daemon.said().count('side task: unit "loss" of 4 trials needs ') == 1
    report = build_report(sandbox.run)
    assert report["side"]["starved"][0]["trials"] == 4
    assert re.search(r"longer than every bubble \([\d.]+ ms\): loss of 4, ", render(report))
    groups = read_groups(sandbox.run / "rank0.units.jsonl")
    assert {2, 4} <= {group["trials"] for group in groups}

    done = sandbox.trials("wide")
    assert [trial.state for trial in done] == [TrialState.COMPLETE] * 4
    study = load_study(STUDIES / "wide.py")
    members = [build_member(study, t.number, json.loads(t.user_attrs["squeezer_params"])) for t in done]
    alone = TrialGroup(study, members, OpenGate())
    for epoch in range(study.epochs):
        for batch in alone.batches(epoch):
            alone.train_step(*batch)
    assert [trial.value for trial in done] == pytest.approx(alone.evaluate(), rel=1e-5)
