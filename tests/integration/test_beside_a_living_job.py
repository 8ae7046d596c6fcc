"""What ends, leaves or signals our processes while the main job lives: nothing of ours may run ungated beside it."""

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import socket_path
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.priority import HOLDER_NICE
from tests.support.sandbox import Child, Job, Sandbox, cpu_ticks, is_alive, stat, wait_for

pytestmark = pytest.mark.integration
LOWER = min(os.getpriority(os.PRIO_PROCESS, 0) + HOLDER_NICE, 19)


def classes(pid: int) -> set[int]:
    """The scheduling classes of a process's threads."""
    try:
        return {os.sched_getscheduler(thread) for thread in threads(pid)}
    except OSError:
        return set()


def threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def trains(sandbox: Sandbox) -> int:
    """Wait until the side task works; its process id."""
    wait_for(lambda: sandbox.word(Field.WORK), "the side task")
    return sandbox.word(Field.SIDE_PROCESS)


def silent_s(sandbox: Sandbox) -> float:
    """For how long no bubble has come."""
    is_open = sandbox.word(Field.BUBBLE) & 1
    return 0.0 if is_open else (time.monotonic_ns() - sandbox.word(Field.BUBBLE_END_NS)) / 1e9


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_daemon_that_is_told_to_end_beside_its_job_measures_nothing_and_lets_the_side_task_only_idle(
    sandbox: Sandbox, number: signal.Signals
) -> None:
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("stubborn.py", calibrate_s=2.0, priority="nice"))
    side = trains(sandbox)
    job.change(compute_ms=40, stall_ms=600)
    wait_for(lambda: stat(side)[:1] == ["T"], "a stopped side task")
    daemon.process.send_signal(number)
    seen = set()
    while is_alive(side):
        named = sandbox.word(Field.SIDE_PROCESS) == side
        assert named or not is_alive(side), "the hooks halt it until it is gone"
        if stat(side)[:1] == ["R"] and not sandbox.word(Field.BUBBLE) & 1:  # a bubble may come before the daemon looks
            seen |= classes(side)
        time.sleep(0.0005)  # on the side task's core
    job.change(stall_ms=0)
    assert daemon.ended() == 0
    assert seen <= {os.SCHED_IDLE}
    assert sandbox.events("end")[0]["dedicated"] is None
    job.beats(3)
    assert job.finish() == 0


@pytest.mark.slow
def test_a_lock_that_a_stopped_side_task_holds_is_released(sandbox: Sandbox, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("locks.py"), LOCK=str(lock))
    side = trains(sandbox)
    job.change(compute_ms=20, lock=str(lock))
    wait_for(lambda: silent_s(sandbox) > 2, "a job that waits for the lock")
    job.change(lock="")
    job.beats(3)
    assert sandbox.word(Field.SIDE_PROCESS) == side and is_alive(side), "it has reached its gate"
    sandbox.works()
    assert job.finish() == 0
    assert daemon.ended() == 0
    assert "JobSilent" in {action["cause"] for action in sandbox.events("action")}


def test_a_daemon_looks_for_silence_whatever_else_happens(sandbox: Sandbox, tmp_path: Path) -> None:
    """The same, sooner: it bears ten steps."""
    lock = tmp_path / "lock"
    job = sandbox.job("--bubble-ms", "20", "--compute-ms", "10")
    daemon = sandbox.daemon_of(job, sandbox.config("locks.py"), LOCK=str(lock), PATIENCE_S="0.3")
    side = trains(sandbox)
    job.change(lock=str(lock))
    wait_for(lambda: silent_s(sandbox) > 0.4, "a job that waits for the lock")
    job.change(lock="")
    wait_for(lambda: "JobSilent" in {each["cause"] for each in sandbox.events("action")}, "a silence", patience_s=20)
    job.beats(3)
    assert sandbox.word(Field.SIDE_PROCESS) == side and is_alive(side), "it has reached its gate"
    assert job.finish() == 0
    assert daemon.ended() == 0


@pytest.mark.slow
def test_a_job_that_pauses_now_and_then_does_not_cost_a_side_task_its_start_each_time(sandbox: Sandbox) -> None:
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("starts_slowly.py"))
    pids = []
    for _ in range(3):
        wait_for(lambda: sandbox.word(Field.PLAN_UNTIL_STEP), "a daemon that knows its job's steps")
        job.beats(20)  # more than it remembers: a long step is borne longer
        pids.append(wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "the side task"))
        job.change(stall_ms=7000)
        wait_for(lambda: silent_s(sandbox) > 2, "a pause")
        job.change(stall_ms=0)
        job.beats(1)
    job.beats(3)
    pids.append(sandbox.word(Field.SIDE_PROCESS))
    assert pids[0] != pids[1] == pids[2] == pids[3], "killed once: it might have held a lock"
    assert job.finish() == 0
    assert daemon.ended() == 0


def test_hooks_that_leave_while_the_side_task_starts_take_it_along(sandbox: Sandbox) -> None:
    daemon = sandbox.daemon(sandbox.config("starts_slowly.py"))
    job = sandbox.job()
    side = wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "the side task")
    job.change(detach=1)
    wait_for(lambda: not is_alive(side), "its end", patience_s=20)
    job.beats(3)
    assert sandbox.word(Field.SIDE_PROCESS) == 0
    assert job.finish() == 0
    again = sandbox.job()
    wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "another one, for the next job")
    assert again.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0


def test_a_side_task_that_starts_goes_on_when_another_engine_takes_over(sandbox: Sandbox) -> None:
    daemon = sandbox.daemon(sandbox.config("starts_slowly.py"))
    job = sandbox.job()
    side = wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "the side task")
    for engine in (1, 0):
        job.change(engine=engine)
        wait_for(lambda engine=engine: len(sandbox.events("job")) == 2 + (not engine), "the other engine's hooks")
    job.beats(10)  # those of the first six are shut
    before = cpu_ticks(side)
    wait_for(lambda: cpu_ticks(side) > before + 10, "the side task to go on in bubbles")
    assert sandbox.word(Field.SIDE_PROCESS) == side
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    assert len(sandbox.side("started")) == 1 and sandbox.events("fault") == []


@pytest.mark.parametrize(
    ("priority", "scheduling"),
    [("idle", (os.SCHED_IDLE, LOWER)), pytest.param("nice", (os.SCHED_OTHER, 19), marks=pytest.mark.slow)],
)
def test_what_shares_the_main_jobs_core_gives_way_to_it(
    sandbox: Sandbox, priority: str, scheduling: tuple[int, int]
) -> None:
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("tiny.py", priority=priority))
    side = trains(sandbox)
    assert {(os.sched_getscheduler(t), os.getpriority(os.PRIO_PROCESS, t)) for t in threads(side)} == {scheduling}
    own = sandbox.word(Field.DAEMON_PID)
    assert (os.sched_getscheduler(own), os.getpriority(os.PRIO_PROCESS, own)) == (os.SCHED_BATCH, 19)
    assert job.finish() == 0
    assert daemon.ended() == 0


ATTACHES_LATE = "import os; os.read(0, 100); from tests.support.metronome import main; main()"


@pytest.mark.parametrize(
    "is_late", [pytest.param(False, id="job first"), pytest.param(True, id="job later", marks=pytest.mark.slow)]
)
def test_a_side_task_that_rehearses_gives_way_as_soon_as_there_is_a_job(
    sandbox: Sandbox, hold: Path, is_late: bool
) -> None:
    job: Job = sandbox.start(Job, "-c", ATTACHES_LATE) if is_late else sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("practises.py"), TINY_HOLD=str(hold))
    search = wait_for(lambda: sandbox.word(Field.SEARCH_PROCESS), "the search worker")
    side = sandbox.word(Field.SIDE_PROCESS)
    if is_late:
        time.sleep(0.5)
        assert classes(side) == {os.SCHED_BATCH}, "nobody is there to be idle for"
        job.change()
    wait_for(lambda: classes(side) == {os.SCHED_IDLE}, "the idle class")
    job.beats(5)
    assert not sandbox.side("ready") and os.SCHED_BATCH in classes(search)
    hold.unlink()
    sandbox.works()
    assert job.finish() == 0
    assert daemon.ended() == 0


def test_a_side_task_that_loads_its_study_yields_from_its_first_instruction(sandbox: Sandbox) -> None:
    """Part of its search worker must not be idle, so it is not idle itself until that is forked."""
    job: Job = sandbox.start(Job, "-c", ATTACHES_LATE)
    daemon = sandbox.daemon_of(job, sandbox.config("starts_slowly.py"))
    first = wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "the side task, before the job attaches")
    assert (os.sched_getscheduler(first), os.getpriority(os.PRIO_PROCESS, first)) == (os.SCHED_BATCH, LOWER)
    job.change()
    job.beats(3)
    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: (now := sandbox.word(Field.SIDE_PROCESS)) != first and now, "the next side task")
    assert (os.sched_getscheduler(second), os.getpriority(os.PRIO_PROCESS, second)) >= (os.SCHED_BATCH, LOWER)
    assert not sandbox.word(Field.SEARCH_PROCESS), "it loads its study"
    assert job.finish() == 0
    assert daemon.ended() == 0


def test_signals_to_the_whole_job_harm_none_of_ours(sandbox: Sandbox, hold: Path) -> None:
    job = sandbox.job()
    daemon = sandbox.daemon_of(job, sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    trains(sandbox)
    ours = [pid for pid in sandbox.living() if pid != job.pid]
    assert len(ours) == 4, "keeper, daemon, side task, search worker"
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for pid in ours:
            os.kill(pid, number)
    time.sleep(0.5)
    assert all(map(is_alive, ours))
    sandbox.works()
    hold.unlink()
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert job.finish() == 0
    assert daemon.ended() == 0


def test_a_crashed_daemon_is_replaced_and_the_job_squeezed_on(sandbox: Sandbox, hold: Path) -> None:
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    trains(sandbox)
    for crashes in range(1, 5):
        daemon, side = sandbox.word(Field.DAEMON_PID), sandbox.word(Field.SIDE_PROCESS)
        assert daemon != keeper.pid
        os.kill(daemon, signal.SIGKILL)
        if crashes < 4:
            wait_for(lambda d=daemon: sandbox.word(Field.DAEMON_PID) not in (0, d), "another daemon")
            wait_for(lambda s=side: sandbox.word(Field.SIDE_PROCESS) not in (0, s), "its side task")
            assert len(sandbox.events("run")) == crashes + 1, "killed at once, it would have left its record"
        if crashes == 1:
            sandbox.works()
    socket_path(sandbox.directory, 0).unlink()
    assert keeper.ended() == 128 + signal.SIGKILL
    assert "is given up; the main job continues alone" in keeper.said()
    assert {fault["what"] for fault in sandbox.events("fault")} == {"the daemon before this one ended with SIGKILL"}
    job.beats(5)
    assert job.finish() == 0


def test_a_side_task_that_starts_before_the_hooks_are_heard_waits_for_a_bubble(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """That of a crashed daemon's successor, in a long step, say."""
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("starts_slowly.py"))
    first = wait_for(lambda: sandbox.word(Field.SIDE_PROCESS), "the side task")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job.change(lock=lock.name)
        wait_for(lambda: silent_s(sandbox) > 0.5, "a long time without bubbles")
        os.kill(sandbox.word(Field.DAEMON_PID), signal.SIGKILL)
        second = wait_for(lambda: (now := sandbox.word(Field.SIDE_PROCESS)) != first and now, "the next side task")
        wait_for(lambda: stat(second)[:1] == ["T"], "its stop", patience_s=5)
        assert silent_s(sandbox) > 0.5, "no bubble has come"
        job.change(lock="")
    used = cpu_ticks(second)
    wait_for(lambda: cpu_ticks(second) > used + 5, "it starts in bubbles")
    assert job.finish() == 0
    assert keeper.ended() == 0


OWN_SESSION = """
import os, sys
os.setpgid(0, os.getpgid(os.getppid()))  # who leads a group cannot leave its session
os.setsid()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def session_of(pid: int) -> list[str]:
    """The session by which the kernel weighs the process, and its niceness; what is older than sessions has no name."""
    name, _, nice = Path(f"/proc/{pid}/autogroup").read_text().strip().rpartition(" nice ")
    return [name, nice or "0"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel weighs no sessions")
@pytest.mark.slow
def test_beside_a_job_of_another_session_a_side_task_has_one_that_gives_way(sandbox: Sandbox, hold: Path) -> None:
    """As beside that of a standing daemon; within a session its own class and niceness count."""
    daemon = sandbox.daemon(sandbox.config("tiny.py"), TINY_HOLD=str(hold))
    first = sandbox.job()
    side = trains(sandbox)
    assert session_of(side) == session_of(daemon.pid) == session_of(first.pid)
    assert first.finish() == 0
    other: Job = sandbox.start(Job, "-c", OWN_SESSION, "-m", "tests.support.metronome")
    wait_for(lambda: len(sandbox.side("started")) == 2, "another side task")
    sandbox.works()
    side = sandbox.word(Field.SIDE_PROCESS)
    assert session_of(side)[0] not in (session_of(daemon.pid)[0], session_of(other.pid)[0])
    assert session_of(side)[1] == "19" == session_of(sandbox.word(Field.SEARCH_PROCESS))[1]
    assert session_of(daemon.pid)[1] == session_of(other.pid)[1] == "0"
    hold.unlink()
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert other.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0


def measuring(sandbox: Sandbox) -> tuple[Path, Child]:
    """A configuration, and its daemon after the job's end, which measures the dedicated rate for ten minutes."""
    config = sandbox.config("lasting.py", calibrate_s=600.0)
    job = sandbox.job()
    daemon: Child = sandbox.daemon_of(job, config)
    wait_for(lambda: sandbox.events("progress"), "an epoch")
    job.kill(signal.SIGKILL)
    wait_for(lambda: not sandbox.word(Field.SIDE_PROCESS), "the end of the side task")
    return config, daemon


@pytest.mark.slow
def test_a_job_that_begins_again_has_its_new_daemon_at_once_and_nothing_measured_beside_it(sandbox: Sandbox) -> None:
    """As where an elastic launcher starts the ranks anew after one of them has died."""
    config, former = measuring(sandbox)
    again = sandbox.job()
    assert former.ended() == 0, "the job's hooks have the page: it measures no more"
    after = sandbox.daemon_of(again, config)
    trains(sandbox)
    again.kill(signal.SIGKILL)
    wait_for(lambda: not sandbox.word(Field.SIDE_PROCESS), "the end of the side task")
    third = sandbox.start(Child, "-m", "squeezer", "daemon", "--config", str(config), "--job-pid", str(os.getpid()))
    assert after.ended() == 0, "another daemon waits for the page: it measures no more"
    wait_for(lambda: sandbox.word(Field.DAEMON_PID) or not is_alive(third.pid), "the next daemon")
    assert is_alive(third.pid), third.said()
    assert third.kill(signal.SIGTERM) == 0
    assert [each["dedicated"] for each in sandbox.events("end")] == [None] * 3


@pytest.mark.slow
def test_a_daemon_that_measures_after_its_job_ends_when_it_is_asked_to(sandbox: Sandbox) -> None:
    _, daemon = measuring(sandbox)
    assert daemon.kill(signal.SIGTERM) == 0
    assert "no dedicated rate, so no yield: this daemon was asked to end" in daemon.said()
    assert [each["dedicated"] for each in sandbox.events("end")] == [None]
