"""What a run of workers does with signals."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from contextlib import ExitStack
from trials.requests_to_end import RequestsToEnd

first, later = (getattr(signal, name, None) for name in sys.argv[1:])
with ExitStack() as stack:
    asked = RequestsToEnd([], stack)
    if first is not None:
        os.kill(os.getpid(), first)
        assert asked
if first is None:
    os.kill(os.getpid(), later)


class Last:
    def __del__(self, write=os.write, kill=os.kill, pid=os.getpid()):  # when Python has undone its handlers
        kill(pid, later)
        write(1, b"said what was kept")


sys.last = Last()
"""
SIGNALS = "SIGINT", "SIGTERM", "SIGHUP"


def ended_by(first: str, later: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, first, later], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("later", SIGNALS)
def test_after_a_request_no_other_cuts_short_what_is_said_at_the_end(later: str) -> None:
    assert ended_by("SIGTERM", later) == (0, "said what was kept")


@pytest.mark.parametrize("later", SIGNALS[1:])
def test_without_a_request_signals_are_as_before(later: str) -> None:
    assert ended_by("none", later) == (-getattr(signal, later), "")
