"""The side task's program: what it sends to its daemon."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_hooks.shared import statuses
from tests.support.paths import ROOT
from trials.side_task import main


def test_a_status_whose_write_is_cut_short_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    def write_a_part(fd: int, data: Any) -> int:
        assert fd == 7
        written.append(bytes(data[:1000]))
        return len(written[-1])

    status = statuses.Error("too long for one write " * 150)
    monkeypatch.setattr(os, "write", write_a_part)
    main._send(7, status)
    assert len(written) > 1
    assert b"".join(written) == statuses.encode(status)


STANDS_BACK = """
import os, signal
from trials.side_task.main import _stand_back

_stand_back(None)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU):
    os.kill(os.getpid(), number)
print("goes on")
"""


def test_signals_to_the_whole_job_do_not_end_it() -> None:
    """Whoever has started it: a daemon has these ignored already."""
    done = subprocess.run([sys.executable, "-c", STANDS_BACK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


AT_ITS_END = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from tests.support.studies.tiny import Tiny as Small

POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()

def late():
    threading.main_thread().join()
    print("the thread has ended")

class Held:
    def __del__(self):
        print("freed")

HELD = Held()
atexit.register(print, "the exit function has run")

class Tiny(Small):
    def batches(self, epoch):
        if threading.active_count() < 3:
            threading.Thread(target=late).start()
        return super().batches(epoch)
"""


def test_at_its_end_it_does_all_but_free_its_objects(tmp_path: Path) -> None:
    study = tmp_path / "study.py"
    study.write_text(AT_ITS_END)
    command = [sys.executable, "-m", "trials.side_task.main", "--study", str(study), "--measure", "0.01"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured, *said = done.stdout.splitlines()
    assert json.loads(measured)["trials"]
    assert said == ["the thread has ended", "the exit function has run"]
