"""What the launcher leaves as it is with DeepSpeed's own command: the environment, children, a run without locks."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from launch import ds_squeeze
from launch.leftovers import RunLock, children, stop_children
from tests.support.sandbox import is_alive


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


def test_a_file_system_without_locks_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path / "run", tmp_path):
        pass
