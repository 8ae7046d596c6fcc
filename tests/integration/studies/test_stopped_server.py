"""A server that has stopped, and answers nobody: a run that is interrupted ends all the same."""

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.shared import postgres as postgresql
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from tests.support.paths import STUDIES
from tests.support.sandbox import Child, Sandbox, children, wait_for
from trials.run import INTERRUPTED_STATUS, LOOK_EVERY_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_an_interrupted_run_ends(sandbox: Sandbox, hold: Path, tmp_path: Path) -> None:
    if (missing := postgresql.missing()) is not None:
        pytest.skip(missing)
    with postgresql.running(**postgresql.FASTEST) as server, server.database() as name:
        settings = {"TINY_HOLD": str(hold), "COUNTED": str(tmp_path / "counted"), STORAGE_VARIABLE: server.url(name)}
        command = ["-m", "trials", "run", str(STUDIES / "counted.py"), "--storage", f"env:{STORAGE_VARIABLE}"]
        run: Child = sandbox.start(Child, *command, "--directory", str(tmp_path / "studies"), **settings)
        wait_for((tmp_path / "counted").exists, "training")
        before = children(os.getpid())
        (pid,) = [each for each in before if each != run.pid]
        stopped = [pid, *children(pid)]
        for each in stopped:
            os.kill(each, signal.SIGSTOP)
        time.sleep(3 * LOOK_EVERY_S)  # by then it looks for its progress bar, and hears nothing
        try:
            assert run.kill(signal.SIGINT) == INTERRUPTED_STATUS
            assert "The same command resumes them." in run.said()
        finally:
            for each in stopped:
                os.kill(each, signal.SIGCONT)
