"""A control daemon that a script plays, processes that may be its clients, and a page."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, page_path
from squeezer.calibration import mps
from tests.support.fake_mps import FakeMps, fake_mps

OBSTINATE = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(1000)"
Run = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nothing"))


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    monkeypatch.setattr(mps, "LIMIT_S", 60.0)
    monkeypatch.delenv(mps.PIPE_VARIABLE, raising=False)
    with fake_mps(tmp_path / "mps") as made:
        monkeypatch.setenv("PATH", made.path)
        yield made


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[subprocess.Popen[bytes]] = []

    def start(pipes: Path | str | None, program: str = OBSTINATE) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **({} if pipes is None else {mps.PIPE_VARIABLE: str(pipes)})}
        process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    opened = Page.open(page_path(tmp_path / "pages", 0))
    yield opened
    opened.close()
