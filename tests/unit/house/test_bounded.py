"""A test that hangs fails in words, and those after it run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bounded import within
from tests.support.paths import ROOT

HANGING = """
import threading
import pytest
from tests.support import bounded

bounded.LIMIT_S = 0.2


@pytest.fixture
def never():
    threading.Event().wait()


@pytest.fixture
def at_last():
    yield
    threading.Event().wait()


def test_setup(never): ...
def test_call(): threading.Event().wait()
def test_teardown(at_last): ...
def test_next(): ...
"""


def read_nothing() -> None:
    with os.fdopen(os.pipe()[0]) as reader:
        reader.read()


def lock_twice() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


def join_one_that_waits() -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


def end_no_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            os.waitpid(process.pid, 0)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "hang",
    [
        read_nothing,
        lock_twice,
        join_one_that_waits,
        end_no_process,
        lambda: signal.sigtimedwait([signal.SIGUSR1], 60),
        lambda: time.sleep(60),
    ],
)
def test_whatever_hangs_is_interrupted_and_said_to_be_here(hang: Callable[[], object]) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=rf"^it has not ended after 0\.1 s; it waits in {__file__}:\d+$"),
        within(0.1, "it"),
    ):
        hang()


def test_an_outer_bound_counts_again_after_an_inner_one() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(pytest.fail.Exception, match=r"^the outer one has not ended"), within(0.2, "the outer one"):
        with within(60, "the inner one"):
            time.sleep(0.05)
        threading.Event().wait()
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "this test's own"


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ("-p", "tests.support.bounded", "-p", "no:cacheprovider", "-c", os.devnull)
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 failed, 2 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    for part in ("the setup of test_setup", "test_call", "the teardown of test_teardown"):
        assert f"Failed: {part} has not ended after 0.2 s; it waits in " in done.stdout
