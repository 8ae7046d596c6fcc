"""The daemon's loop: what its parts hear of each other."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from squeezer.config import Config, RunTable
from squeezer.daemon.loop import Daemon

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """One that does not run."""
    with tempfile.TemporaryDirectory(prefix="bsq-", dir="/tmp") as directory:
        monkeypatch.setenv("SQUEEZER_DIR", directory)
        made = Daemon(Config(run=RunTable(directory=tmp_path)), tmp_path, 0)
        yield made
        made._receiver.close()
        made._recorder.close()
        made._page.close()


def test_whatever_comes_ends_a_silence(daemon: Daemon) -> None:
    """Else its side task would be let run, and killed, again and again."""
    assert daemon._silence.left_s(HOUR_NS, time.monotonic_ns() - 2 * HOUR_NS), "it begins now"
    assert not daemon._silence.left_s(HOUR_NS, time.monotonic_ns())
    daemon._hear()
    assert daemon._silence.left_s(HOUR_NS, time.monotonic_ns())


def test_it_goes_where_its_job_is_before_a_side_task_starts(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[int, object]] = []
    monkeypatch.setattr(daemon._device, "join", lambda *where: not joined.append(where))
    daemon._join(os.getpid())
    assert joined == [(os.getpid(), None)]
