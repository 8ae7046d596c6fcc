"""A side task whose stream waits at the gate, and whose parent is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hooks.shared.page.file import Page, make_private_dir, page_path
from ds_hooks.shared.page.layout import DeviceGate, Field
from tests.support.sandbox import is_alive, wait_for
from trials.gate.parent_watch import ParentWatch

pytestmark = pytest.mark.integration

SIDE = """
import os, sys, time
from pathlib import Path
from ds_hooks.shared.page.layout import DeviceGate, Field
from ds_hooks.shared.page.file import Page
from trials.gate.parent_watch import ParentWatch

page = Page.open(Path(sys.argv[1]), create=False)
if os.fork():
    time.sleep(600)  # the daemon
watch = ParentWatch(page.words, os.getppid(), patience_s=float(sys.argv[2]))
page.words[Field.SIDE_PID] = os.getpid()
while page.words[Field.DEVICE_GATE] != DeviceGate.FORCED:
    time.sleep(1e-3)  # what the stream does
page.words[Field.DEVICE_GATE] = DeviceGate.CLOSED  # as the main job's device may
while page.words[Field.DEVICE_GATE] != DeviceGate.FORCED:
    time.sleep(1e-3)
page.words[Field.UNITS_RUN] += 1
if sys.argv[3] == "ends":
    watch.close()
    page.words[Field.UNITS_RUN] += 1
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "patience_s"), [("ends", 600.0), ("hangs", 0.5)])
def test_an_orphan_runs_what_waits_and_ends(tmp_path: Path, how: str, patience_s: float) -> None:
    page = Page.open(page_path(make_private_dir(tmp_path / "pages"), 0))
    words = page.words
    daemon = subprocess.Popen([sys.executable, "-c", SIDE, str(page.path), str(patience_s), how])
    side = 0
    try:
        side = int(wait_for(lambda: words[Field.SIDE_PID], "the side task"))
        assert words[Field.DEVICE_GATE] == DeviceGate.CLOSED and is_alive(side)
        daemon.kill()
        daemon.wait()
        wait_for(lambda: not is_alive(side), "its end")
        assert (words[Field.UNITS_RUN], words[Field.DEVICE_GATE]) == (1, DeviceGate.CLOSED)
    finally:
        daemon.kill()
        daemon.wait()
        if side and is_alive(side):
            os.kill(side, signal.SIGKILL)
        page.close()


def test_while_the_parent_lives_nothing_happens(tmp_path: Path) -> None:
    page = Page.open(page_path(make_private_dir(tmp_path / "pages"), 0))
    page.words[Field.DEVICE_GATE] = 7
    files = len(os.listdir("/proc/self/fd"))
    watch = ParentWatch(page.words, os.getppid())
    watch.close()
    watch.close()
    assert page.words[Field.DEVICE_GATE] == 7
    assert len(os.listdir("/proc/self/fd")) == files
    page.close()
