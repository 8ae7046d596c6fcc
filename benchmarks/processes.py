"""Starts and ends the processes of a benchmark."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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


@contextmanager
def child(target: Callable[..., object], *arguments: Any, core: int) -> Iterator[int]:
    """Fork a process that runs `target` on `core`, and kill it in the end. Yields its number."""
    pid = os.fork()
    if not pid:
        try:
            os.sched_setaffinity(0, {core})
            target(*arguments)
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
