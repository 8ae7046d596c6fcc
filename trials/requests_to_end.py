"""What asks a run of workers to end: Ctrl-C, a scheduler, a closed terminal."""

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ds_hooks.shared.processes.signals import END_SIGNAL, asked_to_end

AGAIN_S = 1.0
"""A Ctrl-C means something new only so long after the first request: a closing terminal, a scheduler or a program
around this one sends several at once."""


class RequestsToEnd:
    """Passes the first request on to workers. A later Ctrl-C ends them at once.

    Args:
        workers: their processes.
        stack: when it is closed, signals are as they were, unless there was a request. Then this process is about to
            end, and further ones must not kill it while it says what was kept.
    """

    def __init__(self, workers: Sequence["subprocess.Popen[bytes]"], stack: ExitStack) -> None:
        self._workers = workers
        self._first_s: float | None = None
        self._has_said_so = False
        for number in asked_to_end():
            stack.callback(self._put_back, number, signal.signal(number, self._pass_on))

    def __bool__(self) -> bool:
        """Whether there has been one."""
        return self._first_s is not None

    def news(self) -> str | None:
        """What to tell the user of it, once."""
        if not self or self._has_said_so:
            return None
        self._has_said_so = True
        return "saving all trials, which takes some seconds; another Ctrl-C ends the workers at once"

    def _pass_on(self, number: int, _frame: object) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._send(END_SIGNAL)
        elif number == signal.SIGINT and now_s >= self._first_s + AGAIN_S:
            self._send(signal.SIGKILL)

    def _put_back(self, number: signal.Signals, before: Any) -> None:
        signal.signal(number, signal.SIG_IGN if self else before)  # the end of Python undoes handlers, but not this

    def _send(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send_signal(number)
