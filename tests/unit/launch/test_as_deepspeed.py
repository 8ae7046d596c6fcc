"""What the launcher leaves as it is with DeepSpeed's own command: the environment, children, a run without locks."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import psutil
import pytest

from launch import ds_squeeze, leftovers
from launch.leftovers import RunLock, children, stop_children
from tests.support.sandbox import is_alive, wait_for

LAUNCHER = """
import signal, subprocess, sys, time

def end(*_):
    with open(sys.argv[1], "a") as asked:
        asked.write("asked\\n")

signal.signal(signal.SIGTERM, end)
rank = subprocess.Popen(["sleep", "600"])
print(rank.pid, flush=True)
sys.stdin.read()
rank.kill()
"""
"""Notes how often it is asked to end, and ends, with its rank, when its standard input does."""


def start_launcher(asked: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LAUNCHER, str(asked)]
    asked.touch()
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_environment_only_gets_one_more_place_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    before = dict(os.environ)
    ds_squeeze._prepare_environment()
    path = os.environ["PATH"]
    assert path.startswith("/usr/bin:")
    assert {**os.environ} == {**before, "PATH": path}


def test_children_from_before_the_launch_are_let_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as earlier:
        spare = children()
        with subprocess.Popen(["sleep", "60"]) as started:
            stop_children(0.0, spare)
            assert is_alive(earlier.pid) and not is_alive(started.pid)
        earlier.kill()


def test_no_rank_outlives_a_launcher_that_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "RANK_ENDS_WITHIN_S", 0.0)
    monkeypatch.setattr(leftovers, "_BESIDES_RANKS_S", 0.1)
    spare = children()
    with start_launcher(tmp_path / "asked") as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        stop_children(0.0, spare)
    wait_for(lambda: not is_alive(rank), "the rank's end")


def test_a_launcher_may_take_as_long_as_deepspeeds_for_each_rank(tmp_path: Path) -> None:
    found = find_spec("deepspeed")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "launcher" / "launch.py").read_text()
    assert f"wait_procs(children, timeout={leftovers.RANK_ENDS_WITHIN_S:.0f})" in source
    with start_launcher(tmp_path / "asked") as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        assert leftovers._teardown_s([psutil.Process(launcher.pid)]) > leftovers.RANK_ENDS_WITHIN_S


@pytest.mark.parametrize("on_terminal", [True, False])
def test_what_ctrl_c_has_reached_is_not_asked_again(
    on_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it reaches DeepSpeed's launcher, too; that would ask its ranks again while they save."""
    monkeypatch.setattr(ds_squeeze, "UNASKED_S", 0.0)
    monkeypatch.setattr(ds_squeeze, "is_in_foreground", lambda: on_terminal)
    asked = tmp_path / "asked"
    started: list[subprocess.Popen[str]] = []

    def main() -> None:
        launcher = start_launcher(asked)
        started.append(launcher)
        assert launcher.stdout is not None and launcher.stdin is not None
        launcher.stdout.readline()
        Timer(1.0, launcher.stdin.close).start()
        raise KeyboardInterrupt

    runner = SimpleNamespace(main=main, EXPORT_ENVS=[])
    assert ds_squeeze._launch(runner, Namespace(), list) == 128 + signal.SIGINT
    with started[0]:  # takes its pipes along
        assert not is_alive(started[0].pid)
    assert asked.read_text() == ("" if on_terminal else "asked\n")


def test_a_file_system_without_locks_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path / "run", tmp_path):
        pass
