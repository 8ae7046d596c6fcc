"""A process with the number of one that has ended: no signal that was meant for that one may reach it."""

import subprocess
from pathlib import Path

import pytest

_LAST = Path("/proc/sys/kernel/ns_last_pid")
_TRIES = 20


def start_with(pid: int) -> "subprocess.Popen[bytes]":
    """Start a `cat` with a number that nobody has; else the test is skipped."""
    for _ in range(_TRIES):
        try:
            _LAST.write_text(str(pid - 1), encoding="ascii")
        except OSError as error:
            pytest.skip(
                f"no process id can be chosen here, so it is NOT shown what a reused one gets: {error.strerror}"
            )
        started = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        if started.pid == pid:
            return started
        end(started)
    pytest.skip("others take the process id, so it is NOT shown what a reused one gets")


def end(started: "subprocess.Popen[bytes]") -> int:
    """Let it end by itself; returns its exit status, or what has ended or stopped it as a negative number."""
    try:
        started.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()
    return started.returncode
