"""Hooks in processes that fork, end without a word, or are interrupted while they attach."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hooks import Handle, attach
from ds_hooks.shared.page.file import DIRECTORY_VARIABLE
from ds_hooks.shared.page.layout import Field
from tests.support.hooked_engine import Daemon, Engine, RecvGrad
from tests.support.paths import ROOT


def in_a_child(do: Callable[[], None]) -> int:
    """The exit status of a forked child that does it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            do()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_that_is_forked_in_a_step_and_leaves_it_by_an_exception_shuts_no_gate(
    handle: Handle, engine: Engine, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, found = os.getpid(), []

    def fork(_: Engine) -> None:
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)
        found.append(daemon.page.is_open())

    monkeypatch.setitem(Engine._INSTRUCTION_MAP, RecvGrad, fork)
    try:
        engine.train_batch()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert found == [True]


def test_an_engine_of_a_forked_child_gets_nothing_of_its_parents_hooks(
    handle: Handle, engine: Engine, daemon: Daemon, tmp_path: Path
) -> None:
    def train() -> None:
        own = Engine(engine.page_path)
        attached = attach(own, directory=tmp_path / "run", local_rank=0)
        assert [own.train_batch() for _ in range(3)] == [0.5] * 3
        assert not attached.enabled and "is already the main" in str(attached.fault), attached.fault

    before = daemon.page.words[Field.BUBBLE]
    assert in_a_child(train) == 0
    assert daemon.page.words[Field.BUBBLE] == before


ENDS = """
import multiprocessing, sys
from pathlib import Path
from ds_hooks import attach
from tests.support.hooked_engine import Engine

def train():
    engine = Engine(Path("none"))
    assert attach(engine, directory=Path(sys.argv[1])).enabled
    engine.train_batch()
    global kept
    kept = engine

if __name__ == "__main__":
    if sys.argv[2] == "itself":
        train()
    else:
        child = multiprocessing.get_context(sys.argv[2]).Process(target=train)
        child.start()
        child.join()
        assert child.exitcode == 0
"""


@pytest.mark.parametrize("how", ["itself", "fork", "spawn", "forkserver"])
def test_a_process_that_ends_without_a_word_leaves_no_page(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run"), how]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "run").iterdir()) == []


FORKS = """
import os, sys
from pathlib import Path
from ds_hooks import attach
from ds_hooks.shared.page.file import Page, page_path
from ds_hooks.shared.page.layout import Role
from tests.support.hooked_engine import Engine

def fork():
    child = os.fork()
    if child == 0:
        sys.exit(7)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

statuses = []
engine = Engine(Path("none"))
handle = attach(engine, directory=Path(sys.argv[1]))
assert handle.enabled, handle.fault
for _ in range(5):
    engine.train_batch()
    fork()
assert statuses == [7] * 5, statuses
assert Page.open(page_path(Path(sys.argv[1]), 0)).holder(Role.MAIN) == os.getpid()
assert handle.enabled and engine.train_batch() == 0.5
"""


def test_a_child_that_is_forked_without_a_daemon_and_ends_as_python_does_ends_and_takes_nothing_along(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(FORKS)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


class OutOfTimeError(Exception):
    """What a script's signal handler raises."""


def test_a_time_limit_that_comes_while_hooks_are_attached_is_the_scripts(
    engine: Engine, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_time(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGUSR2, out_of_time)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("ds_hooks.handle.StepHooks", lambda *_: signal.raise_signal(signal.SIGUSR2))
        with pytest.raises(OutOfTimeError):
            attach(engine, directory=tmp_path / "run", local_rank=0)
    signal.signal(signal.SIGUSR2, before)
    assert daemon.page.words[Field.MAIN_PID] == 0
    handle = attach(engine, directory=tmp_path / "run", local_rank=0)
    assert handle.enabled, handle.fault
    handle.detach()


def test_a_directory_may_have_any_bytes_in_its_name(engine: Engine, tmp_path: Path) -> None:
    handle = attach(engine, directory=tmp_path / os.fsdecode(b"\xff%d"), local_rank=0)
    assert handle.enabled, handle.fault
    handle.detach()


@pytest.mark.parametrize("named", ["by the script", "by the environment"])
def test_a_script_may_leave_the_directory_from_which_another_one_is_named(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, "run")
    handle = attach(engine, directory="run" if named == "by the script" else None, local_rank=0)
    assert handle.enabled, handle.fault
    monkeypatch.chdir("/")
    handle.detach()
    assert list((tmp_path / "run").iterdir()) == []
