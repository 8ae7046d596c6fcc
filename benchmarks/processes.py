"""Starts and ends the processes of a benchmark."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.common import ROOT


def last_core() -> str:
    """The core that a ghost stage shares with everything beside it."""
    return str(max(os.sched_getaffinity(0)))


def start(command: Sequence[str], env: Mapping[str, str], ends: ExitStack) -> "subprocess.Popen[bytes]":
    """Start a process; `ends` ends it if it still runs."""
    process = subprocess.Popen(command, env=dict(env), cwd=ROOT, stdout=subprocess.DEVNULL)

    def end() -> None:
        if process.poll() is None:
            process.terminate()
            process.wait()

    ends.callback(end)
    return process
