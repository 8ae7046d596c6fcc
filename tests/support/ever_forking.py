"""A process group whose leader forks one child after another, so that nearly each signal comes in the middle of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.sandbox import stat, wait_for

ROUNDS = 120
"""Of ten stops, one or more let a child get away where the leader is signalled before its group."""
FORKS = """
import os, signal
memory = b"x" * 100_000_000  # to fork takes a while
while True:
    child = os.fork()
    while not child:
        pass
    os.kill(child, signal.SIGKILL)
    os.wait()
"""


@contextmanager
def ever_forking() -> Iterator[int]:
    """The process; its number is its group's."""
    with subprocess.Popen([sys.executable, "-c", FORKS], process_group=0) as leader:
        try:
            yield leader.pid
        finally:
            os.killpg(leader.pid, signal.SIGKILL)


def assert_stands_still_each_time(leader: int, stop: Callable[[], object], resume: Callable[[], object]) -> None:
    """Stop the group again and again."""
    for _ in range(ROUNDS):
        before_ns = _cpu_ns(leader)
        wait_for(lambda before_ns=before_ns: _cpu_ns(leader) > before_ns + 1_000_000, "its going on")
        stop()
        wait_for(lambda: all(state in "TZX" for state in _states(leader)), "all processes' stop", patience_s=20)
        resume()


def _cpu_ns(pid: int) -> int:
    return time.clock_gettime_ns(~pid << 3 | 2)


def _states(group: int) -> list[str]:
    found = [stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return [fields[0] for fields in found if fields and fields[2] == str(group)]
