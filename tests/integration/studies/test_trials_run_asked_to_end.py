"""`trials run` is asked to end, however often: its trials are saved and released, and the next run goes on."""

import os
import signal
import sys
import termios
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from tests.support.sandbox import children, is_alive, wait_for
from tests.support.slow_cases import others_slow
from tests.support.steady_study import assert_all_ended_once, has_trained, started, told, trials, write
from trials.requests_to_end import AGAIN_S
from trials.run import INTERRUPTED_STATUS

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_terminal_that_closes_takes_no_trial_with_it(place: Path) -> None:
    write(slow_s=1.5)  # so what is shown until the workers have saved their trials goes nowhere
    process, terminal = os.forkpty()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "trials", "run", "steady.py"])
    termios.tcsetwinsize(terminal, (24, 100))
    shown = b""
    while b"4 running" not in shown:
        shown += os.read(terminal, 65536)
    os.close(terminal)
    os.waitpid(process, 0)
    states = {trial.state for trial in trials()}
    assert states == {TrialState.WAITING}, "all were released"


ASKED = [
    [signal.SIGINT],
    [signal.SIGINT] * 2,
    [signal.SIGTERM] * 2,
    [signal.SIGHUP, signal.SIGINT, signal.SIGINT, signal.SIGTERM],
]


@pytest.mark.parametrize("asked", others_slow(ASKED, ASKED[3:]))
def test_an_interrupted_study_goes_on(asked: list[signal.Signals], place: Path) -> None:
    """However often it is asked in quick succession, as by a terminal that closes."""
    write(slow_s=0.03)
    with started("run", "steady.py") as process:
        wait_for(has_trained, "a score")
        for number in asked:
            process.send_signal(number)
            time.sleep(0.05)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == INTERRUPTED_STATUS
    states = {trial.state for trial in trials()}
    assert TrialState.WAITING in states and not states & {TrialState.FAIL, TrialState.RUNNING}
    assert " unfinished; " in said and "The same command resumes them." in said
    write()
    told("run", "steady.py")
    assert_all_ended_once()


def test_a_second_ctrl_c_waits_for_nothing(place: Path) -> None:
    write(slow_s=0.03)
    with started("run", "steady.py") as process:
        wait_for(has_trained, "a score")
        (worker,) = children(process.pid)
        (search,) = children(worker)
        os.kill(search, signal.SIGSTOP)  # so it saves nothing
        process.send_signal(signal.SIGINT)
        time.sleep(AGAIN_S)
        assert is_alive(worker)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: not is_alive(worker), "the worker's end")
        os.kill(search, signal.SIGCONT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == INTERRUPTED_STATUS and "another Ctrl-C ends the workers at once" in said
