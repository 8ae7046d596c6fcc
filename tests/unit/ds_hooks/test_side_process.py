"""How the main job wakes and halts a side task: a real process, real signals."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Field, SideActivity
from ds_hooks.shared.processes.identity import start_time
from ds_hooks.shared.processes.strays import name_strays
from ds_hooks.side_process import SideProcess
from tests.support import reused_pid
from tests.support.ever_forking import assert_stands_still_each_time, ever_forking
from tests.support.sandbox import wait_for

COUNTS_WAKE_UPS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGUSR1])
    print("woken", flush=True)
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.open(page_path(tmp_path / "pages", 0))
    yield made
    made.close()


@pytest.fixture
def process(page: Page) -> Iterator[subprocess.Popen[str]]:
    """The side task's process; as yet it is starting."""
    command = [sys.executable, "-c", COUNTS_WAKE_UPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stdout.readline() == "ready\n"
        page.words[Field.SIDE_PROCESS] = made.pid
        page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST
        yield made
        made.kill()


def becomes(process: subprocess.Popen[str], states: str) -> None:
    """Wait until the process is in one of the kernel's `states`."""
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in states:
        assert time.monotonic() < deadline_s, f"never in one of {states}"


def no_file_is_left() -> Callable[[], None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def another_user() -> Callable[[], None]:
    if os.getuid() != 0:
        pytest.skip("only root may become another user, so a script that does is NOT shown to do no harm")
    os.setresuid(65534, 65534, 0)
    return lambda: os.setresuid(0, 0, 0)


@pytest.mark.parametrize("becomes_unable", [no_file_is_left, another_user])
@pytest.mark.parametrize("call", ["wake", "halt"])
def test_one_that_can_no_longer_be_signalled_is_not_taken_for_one_that_has_ended(
    page: Page, process: subprocess.Popen[str], becomes_unable: Callable[[], Callable[[], None]], call: str
) -> None:
    side = SideProcess(page.words)
    page.words[Field.SIDE_PID] = process.pid
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP if call == "wake" else SideActivity.HOST
    able_again = becomes_unable()
    try:
        with pytest.raises(OSError):
            getattr(side, call)()
    finally:
        able_again()
    side.leave()


@pytest.mark.parametrize("call", ["wake", "halt"])
def test_a_page_that_names_process_1_has_nothing_signalled(page: Page, call: str) -> None:
    page.words[Field.SIDE_PROCESS] = 1
    with pytest.raises(OSError, match="process 1 "):
        getattr(SideProcess(page.words), call)()


def test_a_page_that_names_the_job_itself_does_not_stop_it(page: Page) -> None:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        page.words[Field.SIDE_PROCESS] = os.getpid()
        try:
            SideProcess(page.words).halt()
        except OSError:
            os._exit(0)
        os._exit(1)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert status == 0


def test_a_starting_one_is_halted_and_goes_on_without_a_signal_that_would_end_it(
    page: Page, process: subprocess.Popen[str]
) -> None:
    side = SideProcess(page.words)
    assert side.halt()
    becomes(process, "T")
    assert not side.halt(), "it is stopped already"
    side.wake()
    becomes(process, "S")
    page.words[Field.SIDE_PID] = process.pid
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
    side.wake()
    assert process.stdout is not None and process.stdout.readline() == "woken\n", "and not before"
    side.leave()


def test_one_that_the_daemon_stopped_while_it_started_goes_on(page: Page, process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    becomes(process, "T")
    side = SideProcess(page.words)
    side.wake()
    becomes(process, "S")
    side.leave()


def test_one_that_sleeps_is_let_alone_at_a_bubbles_end(page: Page, process: subprocess.Popen[str]) -> None:
    page.words[Field.SIDE_PID] = process.pid
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
    side = SideProcess(page.words)
    assert not side.halt()
    page.words[Field.SIDE_ACTIVITY] = SideActivity.UNIT
    assert side.halt()
    becomes(process, "T")
    side.wake()
    becomes(process, "S")
    side.leave()


def test_one_may_end_its_unit_of_device_work_but_nothing_else(page: Page, process: subprocess.Popen[str]) -> None:
    side = SideProcess(page.words)
    page.words[Field.SIDE_ACTIVITY] = SideActivity.UNIT
    assert side.halt([SideActivity.UNIT]), "it starts, and does not ask the gate"
    becomes(process, "T")
    page.words[Field.SIDE_PID] = process.pid
    side.wake()
    becomes(process, "S")
    assert not side.halt([SideActivity.UNIT])
    page.words[Field.SIDE_CHILDREN] = 1
    assert side.halt([SideActivity.UNIT]), "its own processes would run on as long"
    becomes(process, "T")
    side.wake()
    becomes(process, "S")
    page.words[Field.SIDE_CHILDREN] = 0
    page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST
    assert side.halt([SideActivity.UNIT]), "host work can be stopped anywhere, on every device"
    becomes(process, "T")
    side.leave()


LEADS_A_GROUP = """
import os, time
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os.wait()
"""


def test_its_own_processes_are_stopped_and_continued_with_it_even_if_it_sleeps(page: Page) -> None:
    command = [sys.executable, "-c", LEADS_A_GROUP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as leader:
        try:
            assert leader.stdout is not None
            child = int(leader.stdout.readline())
            state = lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: E731
            words = page.words
            words[Field.SIDE_PROCESS], words[Field.SIDE_ACTIVITY] = leader.pid, SideActivity.HOST
            side = SideProcess(words)
            assert side.halt()
            becomes(leader, "T")
            wait_for(lambda: state() == "T", "the child's stop")
            side.wake()
            wait_for(lambda: state() == "S", "the child's going on")
            words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
            assert not side.halt() and state() == "S", "it has none that the page knows of"
            words[Field.SIDE_CHILDREN] = 1
            assert not side.halt(), "it was not awake"
            wait_for(lambda: state() == "T", "the child's stop")
            side.wake()
            wait_for(lambda: state() == "S", "the child's going on")
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
    side.leave()


def test_one_that_was_stopped_in_its_sleep_is_woken_by_the_next_bubble(
    page: Page, process: subprocess.Popen[str]
) -> None:
    page.words[Field.SIDE_PID] = process.pid
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
    page.words[Field.SIDE_CHILDREN] = 1
    side = SideProcess(page.words)
    side.halt()
    becomes(process, "T")
    side.wake()
    assert process.stdout is not None and process.stdout.readline() == "woken\n"
    side.leave()


def test_one_that_former_hooks_stopped_as_it_went_to_sleep_is_woken_by_the_next_ones(
    page: Page, process: subprocess.Popen[str]
) -> None:
    page.words[Field.SIDE_PID] = process.pid
    former, side = SideProcess(page.words), SideProcess(page.words)
    assert former.halt()
    becomes(process, "T")
    former.leave()
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP  # written just before the stop
    assert not side.halt()
    side.wake()
    assert process.stdout is not None and process.stdout.readline() == "woken\n"
    side.leave()


def test_one_that_has_ended_is_forgotten_and_the_next_is_found(page: Page, process: subprocess.Popen[str]) -> None:
    side = SideProcess(page.words)
    side.wake()
    process.kill()
    process.wait()
    side.wake()
    assert not side.halt()
    page.words[Field.SIDE_PROCESS] = 0
    side.wake()
    with subprocess.Popen([sys.executable, "-c", COUNTS_WAKE_UPS], stdout=subprocess.DEVNULL) as second:
        page.words[Field.SIDE_PROCESS] = second.pid
        assert side.halt()
        second.kill()
    side.leave()


def test_without_one_nothing_happens(page: Page) -> None:
    side = SideProcess(page.words)
    side.wake()
    assert not side.halt()


def test_one_whose_work_is_queued_on_a_device_is_woken_and_never_halted(
    page: Page, process: subprocess.Popen[str]
) -> None:
    page.words[Field.SIDE_PID] = process.pid
    side = SideProcess(page.words, can_halt=False)
    assert not side.halt() and not side.halt([SideActivity.UNIT])
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
    side.wake()
    assert process.stdout is not None and process.stdout.readline() == "woken\n", "so it was not stopped"
    side.leave()


def test_one_that_has_left_its_group_is_stopped_and_continued_even_if_it_sleeps(
    page: Page, process: subprocess.Popen[str]
) -> None:
    page.words[Field.SIDE_PID] = process.pid
    page.words[Field.SIDE_ACTIVITY] = SideActivity.ASLEEP
    with subprocess.Popen([sys.executable, "-c", COUNTS_WAKE_UPS], stdout=subprocess.PIPE, text=True) as stray:
        try:
            assert stray.stdout is not None and stray.stdout.readline()
            name_strays(page.words, {stray.pid: start_time(stray.pid)})
            side = SideProcess(page.words)
            assert not side.halt(), "it was not awake"
            becomes(stray, "T")
            side.wake()
            becomes(stray, "S")
            side.leave()
        finally:
            stray.kill()


def test_one_that_others_have_continued_is_halted_again_once_it_is_known(
    page: Page, process: subprocess.Popen[str]
) -> None:
    side = SideProcess(page.words)
    assert side.halt()
    becomes(process, "T")
    os.kill(process.pid, signal.SIGCONT)
    becomes(process, "S")
    assert not side.halt(), "nothing says that it goes on"
    side.has_run_on()
    assert side.halt()
    becomes(process, "T")
    side.has_run_on()
    side.wake()
    becomes(process, "S")
    side.leave()


def test_a_child_that_is_being_forked_is_halted_too(page: Page) -> None:
    with ever_forking() as leader:
        page.words[Field.SIDE_PROCESS] = page.words[Field.SIDE_PID] = leader
        page.words[Field.SIDE_ACTIVITY] = SideActivity.HOST
        side = SideProcess(page.words)
        assert_stands_still_each_time(leader, side.halt, side.wake)
        side.leave()


def test_a_number_that_another_process_has_by_now_gets_no_signal(page: Page) -> None:
    with subprocess.Popen(["sleep", "60"], process_group=0) as first:
        page.words[Field.SIDE_PROCESS], page.words[Field.SIDE_ACTIVITY] = first.pid, SideActivity.HOST
        side = SideProcess(page.words)
        assert side.halt()
        first.kill()
    stranger = reused_pid.start_with(first.pid)
    side.has_run_on()
    assert not side.halt()
    assert reused_pid.end(stranger) == 0
    side.leave()
