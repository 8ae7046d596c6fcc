"""Processes that a benchmark has started, when it ends."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.shared import processes
from benchmarks.shared.processes import start
from tests.support.sandbox import wait_for

DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""


def test_one_that_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_WITHIN_S", 0.2)
    with ExitStack() as ends:
        process = start([sys.executable, "-c", DEAF, str(tmp_path / "ready")], os.environ, ends)
        wait_for((tmp_path / "ready").exists, "the process")
    assert process.poll() == -signal.SIGKILL
