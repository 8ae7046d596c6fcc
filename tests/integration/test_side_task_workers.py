"""A side task's own processes, such as data-loading workers: behind its gate, in its account, and gone with it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import socket_path
from ds_hooks.shared.page.layout import PROCESS_WORDS, STRAY_WORDS, Field
from squeezer.daemon.side_processes.control_group import remove_dead_groups
from tests.support.control_groups import a_parent_group
from tests.support.sandbox import Child, Sandbox, cpu_ticks, is_alive, stat, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # in idle time each takes up to a minute

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Loading:
    """A job, a daemon, and a side task whose workers load."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        standing: bool = False,
        preemptive: bool | str = "stop",
        context: str = "fork",
        leaves: bool = False,
        moves_to: Path | None = None,
    ) -> None:
        self.sandbox, self._noted = sandbox, sandbox.files / "noted"
        self._noted.mkdir()
        self.hold = sandbox.files / "hold"
        self.hold.touch()
        config = sandbox.config("loads.py", preemptive=preemptive)
        sandbox.squeezer = "squeezer"  # whose records come late: its side task has found all its workers by then
        named = {"LOADS": str(self._noted), "TINY_HOLD": str(self.hold), "LOADS_CONTEXT": context}
        named["LOADS_LEAVES"] = "1" if leaves else ""
        named["LOADS_MOVES_TO"] = "" if moves_to is None else str(moves_to / "cgroup.procs")
        self.daemon: Child
        if standing:
            self.daemon = sandbox.daemon(config, 0, **named)
            self.job = sandbox.job("--bubble-ms", "150")
        else:
            self.job = sandbox.job("--bubble-ms", "150")
            self.daemon = sandbox.daemon_of(self.job, config, **named)
        wait_for(lambda: sandbox.side("ready"), "the side task")
        self.side = sandbox.word(Field.SIDE_PROCESS)

    def workers(self) -> list[int]:
        """Those that live, once they load for the trials."""
        wait_for(lambda: self.sandbox.word(Field.WORK) and len(self.living()) >= 2, "workers")
        return self.living()

    def living(self) -> list[int]:
        """All processes that have noted themselves and live."""
        return [int(path.name) for path in self._noted.iterdir() if is_alive(int(path.name))]

    def ends(self) -> None:
        """None of them lives, nor does anything else of ours; in idle time even an end takes long on a busy machine."""
        wait_for(lambda: not self.living() and not self.sandbox.living(), "the end of all")


def shut_s(sandbox: Sandbox) -> float:
    """For how long the gate is shut; 0: it is open."""
    is_open = sandbox.word(Field.BUBBLE) & 1
    return 0.0 if is_open else (time.monotonic_ns() - sandbox.word(Field.BUBBLE_END_NS)) / 1e9


def states(pids: list[int]) -> set[str]:
    return {field for pid in pids for field in stat(pid)[:1]}


def strays(sandbox: Sandbox) -> list[int]:
    words = map(sandbox.word, range(Field.STRAYS, Field.STRAYS + STRAY_WORDS))
    return [pid for word in words if (pid := word & (1 << 22) - 1) and is_alive(pid)]


def classes(pid: int) -> set[int]:
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


def stall(loading: Loading) -> None:
    """Wait until the main job is in the middle of a second outside bubbles."""
    wait_for(lambda: 0.2 < shut_s(loading.sandbox) < 0.5, "a long time outside bubbles")


@pytest.mark.parametrize("preemptive", ["stop", False])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_stand_still_while_the_gate_is_shut(sandbox: Sandbox, context: str, preemptive: bool | str) -> None:
    loading = Loading(sandbox, preemptive=preemptive, context=context)
    workers = loading.workers()
    before = sum(map(cpu_ticks, workers))
    wait_for(lambda: sum(map(cpu_ticks, workers)) > before + 5, "the workers' work in bubbles")
    loading.job.change(stall_ms=1000)
    for _ in range(3):
        stall(loading)
        workers = loading.workers()
        # in the idle class one comes to its stop only when the core is free
        assert states(workers) <= {"T", "R"} and "T" not in states([sandbox.word(Field.SEARCH_PROCESS)])
        used = [cpu_ticks(pid) for pid in workers]
        time.sleep(0.3)
        assert [cpu_ticks(pid) for pid in workers] == used and shut_s(sandbox) > 0.4
        wait_for(lambda: shut_s(sandbox) < 0.1, "the next bubbles")
    assert {os.getpgid(pid) for pid in workers} == {loading.side} and os.getpgid(loading.job.pid) != loading.side
    wait_for(lambda: {each for pid in loading.living() for each in classes(pid)} == {os.SCHED_IDLE}, "the idle class")
    loading.job.change(stall_ms=0)
    sandbox.works()
    loading.hold.unlink()
    wait_for(lambda: sandbox.side("finished"), "the end of the study")
    assert loading.living() == []
    assert loading.job.finish() == 0
    assert loading.daemon.ended() == 0
    assert sandbox.side("exited")[0]["status"] == 0


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_time_of_workers_is_the_side_tasks(sandbox: Sandbox, context: str) -> None:
    loading = Loading(sandbox, context=context)
    workers = loading.workers()
    words = range(Field.FORKED_PROCESSES, Field.FOUND_PROCESSES + PROCESS_WORDS)
    wait_for(lambda: {sandbox.word(index) for index in words} >= set(workers), "their names on the page")
    used = lambda: sum(map(cpu_ticks, (loading.side, *workers))) * TICK_S  # noqa: E731
    own = lambda: cpu_ticks(loading.side) * TICK_S  # noqa: E731
    used_before, own_before, from_ns = used(), own(), time.monotonic_ns()
    wait_for(lambda: used() > used_before + 3, "three seconds of work")
    passed, own_passed, until_ns = used() - used_before, own() - own_before, time.monotonic_ns()
    loading.job.beats(2)
    loading.hold.unlink()
    assert loading.job.finish() == 0
    assert loading.daemon.ended() == 0
    bubbles = [each for each in sandbox.events("bubble") if from_ns < each["start_ns"] < until_ns]
    counted = sum(each["side_ns"] + (each["overrun_ns"] or 0) for each in bubbles) / 1e9
    assert 0.85 * passed < counted < 1.15 * passed
    assert own_passed < 0.7 * passed, "most of it is the workers'"


def test_a_process_that_has_left_group_and_parent_has_idle_time_and_is_counted(sandbox: Sandbox) -> None:
    loading = Loading(sandbox, leaves=True)
    workers = loading.workers()
    left = lambda: [pid for pid in loading.living() if os.getpgid(pid) != loading.side]  # noqa: E731
    wait_for(lambda: len(left()) >= 2, "two that have left")
    # in both: one whose own parent ends at once is the side task's child before it can look
    words = range(Field.FORKED_PROCESSES, Field.FOUND_PROCESSES + PROCESS_WORDS)
    wait_for(lambda: {sandbox.word(index) for index in words} >= set(left()), "their names on the page")
    assert {each for pid in left() for each in classes(pid)} == {os.SCHED_IDLE}
    assert workers
    wait_for(lambda: len(strays(sandbox)) >= 2, "their names as strays")
    loading.job.change(stall_ms=1000)
    for _ in range(2):
        stall(loading)
        assert states(strays(sandbox)) <= {"T", "R"}, "they stand still with the others"
        wait_for(lambda: shut_s(sandbox) < 0.1, "the next bubbles")
    loading.job.change(stall_ms=0)
    used = lambda: sum(map(cpu_ticks, (loading.side, *loading.living()))) * TICK_S  # noqa: E731
    before = used()
    wait_for(lambda: used() > before + 3, "three seconds of work, of which a bubble more or less is little")
    loading.hold.unlink()
    assert loading.job.finish() == 0
    assert loading.daemon.ended() == 0
    loading.ends()
    (started,), (exited,) = sandbox.side("started"), sandbox.side("exited")
    if started["group"] is None:
        pytest.skip(f"no control group here, so that all time is counted is NOT shown: {started['no_group']}")
    assert exited["group_cpu_ms"] > 0 and not Path(started["group"]).exists()
    assert exited["uncounted_ms"] < 0.1 * exited["group_cpu_ms"]


def test_who_moves_to_another_control_group_is_found_stopped_and_ended_all_the_same(sandbox: Sandbox) -> None:
    loading = Loading(sandbox, leaves=True, moves_to=a_parent_group())
    loading.workers()
    left = lambda: [pid for pid in loading.living() if os.getpgid(pid) != loading.side]  # noqa: E731
    wait_for(lambda: len(left()) >= 2, "two that have left")
    wait_for(lambda: len(strays(sandbox)) >= 2, "their names as strays")
    (group,) = (each["group"] for each in sandbox.side("started"))
    inside = set(map(int, Path(group, "side", "cgroup.procs").read_text().split()))
    assert loading.side in inside and not inside & set(left())
    loading.hold.unlink()
    assert loading.job.finish() == 0
    assert loading.daemon.ended() == 0
    loading.ends()
    assert not Path(group).exists()


ENDS: dict[str, Callable[[Loading], int]] = {
    "the side task is killed": lambda loading: loading.side,
    "the daemon is killed": lambda loading: loading.sandbox.word(Field.DAEMON_PID),
    "the rank is killed": lambda loading: loading.job.pid,
    "the keeper is killed": lambda loading: loading.daemon.pid,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_and_what_they_leave_end_with(sandbox: Sandbox, end: str, stopped: bool) -> None:
    is_alone = end == "the keeper is killed"  # then no process of ours is left that could end orphans
    if is_alone:
        a_parent_group()
    loading = Loading(sandbox, leaves=True)
    wait_for(lambda: len(loading.workers()) >= 4, "workers, and what they have left")
    if stopped:
        loading.job.change(stall_ms=1500)
        stall(loading)
    old = loading.living()
    os.kill(ENDS[end](loading), signal.SIGKILL)
    if is_alone:
        wait_for(lambda: not is_alive(loading.side), "the side task's end")
        remove_dead_groups()  # as the next daemon does
    wait_for(lambda: not any(map(is_alive, (loading.side, *old))), "their end")
    loading.hold.unlink()
    if end != "the rank is killed":
        loading.job.change(stall_ms=0)
        loading.job.beats(5)
        assert loading.job.finish() == 0
    loading.daemon.ended()
    loading.ends()
    if end == "the keeper is killed":  # nobody is left to remove it
        socket_path(sandbox.directory, 0).unlink()


def test_what_a_side_task_has_in_shared_memory_goes_with_it(sandbox: Sandbox) -> None:
    noted = sandbox.files / "noted"
    job = sandbox.job()
    keeper = sandbox.daemon_of(job, sandbox.config("shares.py"), SHARES=str(noted))
    sandbox.works()
    names = lambda: noted.read_text().split()  # noqa: E731
    left = lambda: [name for name in names() if Path("/dev/shm", name).exists()]  # noqa: E731
    assert left() == names()
    for killed in (Field.SIDE_PROCESS, Field.DAEMON_PID):
        before = names()
        os.kill(sandbox.word(killed), signal.SIGKILL)
        wait_for(lambda: len(names()) > len(before), "the next side task")  # noqa: B023
        assert not set(left()) & set(before)
        sandbox.works()
    assert job.finish() == 0
    keeper.ended()
    assert left() == []


def test_workers_end_with_a_standing_daemon_that_is_killed(sandbox: Sandbox) -> None:
    loading = Loading(sandbox, standing=True)
    assert len(loading.workers()) >= 2
    assert loading.daemon.kill(signal.SIGKILL) == -signal.SIGKILL
    remove_dead_groups()  # as the next daemon does
    wait_for(lambda: not loading.living(), "their end")
    loading.job.beats(5)
    assert loading.job.finish() == 0
    loading.ends()
    socket_path(sandbox.directory, 0).unlink()
