"""Programs that take too long: each is ended, with all that it has started, and what is not in the group lives."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from squeezer.calibration import limited
from squeezer.calibration.limited import run_limited
from tests.support.fake_mps import FakeMps, fake_mps
from tests.support.oddly_named import oddly_named
from tests.support.sandbox import is_alive, wait_for
from tests.support.struck_limits import LIMIT_S, strike_the_first

pytestmark = pytest.mark.integration

BEGIN = """
import os, pathlib, signal, subprocess, sys, time
from squeezer.calibration.limited import ended_when_asked

def note(name, text=""):
    path = pathlib.Path(sys.argv[1], name)
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)

asked = ended_when_asked()
asked.__enter__()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
note("child", child.pid)
note("self", os.getpid())
"""
CLEANS_UP = """
try:
    time.sleep(1000)
finally:
    child.kill()
    note("cleaned")
"""
CLEANS_UP_SLOWLY = """
try:
    note("ready")
    time.sleep(1000)
finally:
    note("cleaning")
    while not pathlib.Path(sys.argv[1], "enough").exists():
        time.sleep(0.01)
    child.kill()
    note("cleaned")
"""
HELD_IN_A_CALL = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit strikes as soon as the program has begun, and then little is waited for."""
    strike_the_first(monkeypatch, (tmp_path / "self").exists)


def command(code: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", BEGIN + code, str(folder)]


def pid(folder: Path, name: str) -> int:
    return int((folder / name).read_text())


def late(code: str, folder: Path) -> None:
    """Run it until its limit."""
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(command(code, folder), os.environ, LIMIT_S)
    for name in ("self", "child"):
        assert not is_alive(pid(folder, name))


def test_one_that_ends_in_time_tells_how(tmp_path: Path) -> None:
    assert run_limited(command("child.kill(); sys.exit(3)", tmp_path), os.environ, 300) == 3


def test_what_it_leaves_is_ended_too(tmp_path: Path) -> None:
    assert run_limited(command("", tmp_path), os.environ, 300) == 0
    assert not is_alive(pid(tmp_path, "child"))


def test_processes_of_others_may_have_any_name(tmp_path: Path) -> None:
    with oddly_named() as other:
        assert run_limited(command("child.kill(); sys.exit(3)", tmp_path), os.environ, 300) == 3
        assert is_alive(other)


@pytest.fixture
def neighbour() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as other:
        yield other
        other.kill()


def test_one_that_is_late_may_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbour: "subprocess.Popen[bytes]"
) -> None:
    monkeypatch.setattr(limited, "GRACE_S", 60.0)
    late(CLEANS_UP, tmp_path)
    assert (tmp_path / "cleaned").exists()
    assert neighbour.poll() is None


def test_one_that_does_not_hear_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    late(HELD_IN_A_CALL, tmp_path)


def test_one_that_runs_others_has_the_time_to_end_them(tmp_path: Path) -> None:
    program = command(HELD_IN_A_CALL, tmp_path)
    code = f"""
import os
from squeezer.calibration import limited
limited.GRACE_S = 0.5  # three times, which is more than the limit of most
with limited.ended_when_asked():
    limited.run_limited({program!r}, os.environ, 1000)
"""
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited([sys.executable, "-c", code], os.environ, LIMIT_S, grace_s=60)
    for name in ("self", "child"):
        assert not is_alive(pid(tmp_path, name))


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_is_asked_to_end_cleans_up_however_often_it_is_asked(first: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(command(CLEANS_UP_SLOWLY, tmp_path)) as program:
        wait_for(lambda: (tmp_path / "ready").exists(), "the program")
        program.send_signal(first)
        wait_for(lambda: (tmp_path / "cleaning").exists(), "its end")
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            program.send_signal(number)
        (tmp_path / "enough").touch()
        assert program.wait(60) == 128 + first
    assert (tmp_path / "cleaned").exists()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[FakeMps]:
    with fake_mps(tmp_path / "mps") as made:
        yield made


def test_clients_of_an_mps_server_are_dropped_before_they_are_killed(
    control: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", control.path)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(control.pipes))
    clients = f"""
with open({str(control.pipes / f"clients.{control.server}")!r}, "w") as file:
    file.write(f"{{os.getpid()}}\\n{{child.pid}}\\n")
"""
    late(clients + HELD_IN_A_CALL, tmp_path)
    both = {str(pid(tmp_path, name)) for name in ("self", "child")}
    assert set(control.lines("terminated")) == both, "they lived when they were dropped"


def test_it_ends_with_who_has_started_it(tmp_path: Path) -> None:
    program = command(HELD_IN_A_CALL, tmp_path)
    code = (
        f"import os; from squeezer.calibration.limited import run_limited; run_limited({program!r}, os.environ, 1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as first:
        wait_for(lambda: (tmp_path / "self").exists(), "the program")
        first.kill()
    wait_for(lambda: not is_alive(pid(tmp_path, "self")), "its end")
    os.kill(pid(tmp_path, "child"), signal.SIGKILL)
