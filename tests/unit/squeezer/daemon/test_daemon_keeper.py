"""A daemon that crashes is started again, a bounded number of times, and what it leaves is removed: real processes."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from squeezer.daemon.daemon_keeper import MAX_RESTARTS
from squeezer.daemon.side_processes.control_group import remove_dead_groups
from tests.support.control_groups import a_parent_group
from tests.support.sandbox import is_alive, wait_for

KEEPS = """
import os, signal, sys
from squeezer.daemon import daemon_keeper
from squeezer.daemon.side_processes.control_group import make_side_group

daemon_keeper.RESTART_AFTER_S = 0.0

def serve(ended):
    group = make_side_group().path if sys.argv[1] == "in a group" else ""
    print(ended, group, sep="|", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

raise SystemExit(daemon_keeper.keep(serve, os.getppid()))
"""


@pytest.mark.parametrize("how", ["without a group", "in a group"])
def test_one_that_crashes_is_started_again_but_not_for_ever_and_its_group_is_removed(how: str) -> None:
    if how == "in a group":
        a_parent_group()
    try:
        done = subprocess.run([sys.executable, "-c", KEEPS, how], capture_output=True, text=True, timeout=60)
        assert done.returncode == 128 + signal.SIGKILL, done.stderr
        ends, groups = zip(*(line.split("|") for line in done.stdout.splitlines()), strict=True)
        assert ends == ("None", *["SIGKILL"] * MAX_RESTARTS)
        assert "ended with SIGKILL and is given up" in done.stderr
        assert [path for path in groups if path and Path(path).exists()] == []
    finally:
        remove_dead_groups()


ENDS = """
import os, signal, sys
from squeezer.daemon import daemon_keeper

daemon_keeper.RESTART_AFTER_S = 0.0
job = os.getppid()
if sys.argv[1] == "its job has ended":
    if not (job := os.fork()):
        os._exit(0)
    os.waitpid(job, 0)

def serve(ended):
    print(ended, flush=True)
    if sys.argv[1] == "it is asked to end":
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
    os.kill(os.getpid(), signal.SIGTERM)

raise SystemExit(daemon_keeper.keep(serve, job))
"""


@pytest.mark.parametrize("why", ["its job has ended", "it is asked to end"])
def test_one_that_crashes_as_it_is_to_end_is_not_started_again(why: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, why], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "None\n"), done.stderr


STAYS = """
import os, signal
from squeezer.daemon.daemon_keeper import keep

def serve(ended):
    print(os.getpid(), flush=True)
    signal.pause()

keep(serve, os.getppid())
"""


def test_it_ends_with_its_keeper() -> None:
    with subprocess.Popen([sys.executable, "-c", STAYS], stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        daemon = int(keeper.stdout.readline())
        keeper.kill()
        try:
            wait_for(lambda: not is_alive(daemon), "its end", patience_s=30)
        finally:
            with suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGKILL)
