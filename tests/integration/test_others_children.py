"""A standing daemon whose process has children that are not its own: it ends its side tasks', and no others."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.sandbox import Child, Sandbox, is_alive, wait_for

pytestmark = pytest.mark.integration

REPLACED = """
import os, subprocess, sys
print("before:", subprocess.Popen(["sleep", "600"]).pid, flush=True)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""As `uploader & exec squeezer daemon …` in a shell script."""


def test_children_of_the_program_that_it_has_replaced_live_on(sandbox: Sandbox) -> None:
    config = str(sandbox.config("crashes.py", max_restarts=0))
    options = ("-m", "tests.support.eager_daemon", "daemon", "--config", config)
    daemon: Child = sandbox.start(Child, "-c", REPLACED, *options)
    wait_for(lambda: "serves device" in daemon.said() or not is_alive(daemon.pid), "the daemon")
    earlier = int(daemon.said().partition("before: ")[2].split()[0])
    job = sandbox.job()
    wait_for(lambda: sandbox.side("given_up"), "giving up")
    assert is_alive(earlier)
    assert job.finish() == 0
    assert daemon.kill(signal.SIGTERM) == 0
    assert is_alive(earlier)
    os.kill(earlier, signal.SIGKILL)


FIRST = """
import os, time
from ds_hooks.shared.processes.parent import adopt_orphans
from squeezer.daemon.daemon_keeper import shield
from squeezer.daemon.side_processes.orphans import end_orphans

says, hears = os.pipe()
starts = os.fork()
if starts == 0:
    orphan = os.fork()
    if orphan:
        os.write(hears, str(orphan).encode())
        os._exit(0)
    time.sleep(600)


def serve(ended):
    adopt_orphans()
    orphan = int(os.read(says, 100))
    while open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[1] != "1":
        time.sleep(0.01)
    print(end_orphans(), open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[0] in "ZX", flush=True)
    return 7


raise SystemExit(shield(serve))
"""
"""What the main job of the container leaves becomes the first process's child."""


def test_as_a_containers_first_process_it_ends_no_orphan_of_others() -> None:
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    allowed = subprocess.run([*container, "true"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"{' '.join(container)} is not allowed here, so it is NOT shown: {allowed.stderr.strip()}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*container, sys.executable, "-c", FIRST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "0 False\n"), done.stderr
