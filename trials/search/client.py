"""The training process's end of the line to the search worker."""

import atexit
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from ds_hooks.shared.processes.endings import USER_ERROR_STATUS

_ENDED = "the search worker has ended"
LOOK_AGAIN_S = 0.2
THREADS_END_S = 1.0
"""How long the search worker's threads have a core to themselves, before its end is collected beside a main job.

The kernel spins in `wait` until all entries of /proc for those threads are gone. Threads that end leave the group by
which the kernel weighs sessions (autogroup), so beside a spinning parent they got no time: the side task spun until the
main job ended.
"""


class Search(Protocol):
    """Where the scheduler gets trials from and reports their scores to."""

    def send(self, **request: Any) -> None:
        """Make one request; docs/protocol.md lists them."""

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the answers that have come since the last call; wait up to `wait_s` seconds for a first one."""


class SearchError(BaseException):
    """The search worker has ended too early. The message says why.

    Not an `Exception`, because it is no fault of the trials that train meanwhile.

    Attributes:
        status: the exit status for a cause outside our code, such as a wrong address; None: it may be our fault.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether a later try may succeed, such as when a database was away."""
        return self.status not in (None, USER_ERROR_STATUS)


class SearchClient:
    """Forks the search worker, and is the line to it. Reading never blocks for long.

    Args:
        serve: runs in the search worker, with its requests and answers. Returns its exit status.

    Attributes:
        pid: the search worker's.
        last_answers: those that came while it was closed.
    """

    def __init__(self, serve: Callable[[TextIO, TextIO], int]) -> None:
        requests_fd, send_fd = os.pipe()
        receive_fd, answers_fd = os.pipe()
        with suppress(AttributeError, OSError):  # there may be none
            sys.stdout.flush()  # else both write what is in its buffer
        pid = os.fork()  # nothing has been computed yet, so there are no threads to lose
        if pid == 0:
            status = 1
            try:
                atexit._clear()  # what is to run at this process's end is not what the parent has registered
                os.setpgid(0, 0)  # not to be stopped with the side task: it may hold the lock of all search workers
                os.close(send_fd)
                os.close(receive_fd)
                with suppress(AttributeError):
                    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # `_exit` flushes nothing
                status = serve(os.fdopen(requests_fd), os.fdopen(answers_fd, "w"))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        os.close(requests_fd)
        os.close(answers_fd)
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._send_fd, self._receive_fd = send_fd, receive_fd
        self._buffer, self._is_gone = b"", False
        self.last_answers: list[dict[str, Any]] = []

    def send(self, **request: Any) -> None:
        """Write one request.

        Raises:
            SearchError: see `answers`.
        """
        try:
            self._write(request)
        except BrokenPipeError:
            self.answers()  # its last one says why
            raise SearchError(_ENDED) from None

    def _write(self, request: dict[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        while line:  # being stopped can cut a write to a full pipe short
            line = line[os.write(self._send_fd, line) :]

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """See `Search.answers`.

        Raises:
            SearchError: the search worker reported an error or is gone.
        """
        found = self._received(wait_s)
        for answer in found:
            if "error" in answer:
                raise SearchError(answer["error"], answer["status"])
        if self._is_gone:
            raise SearchError(_ENDED)
        return found

    def _received(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while not self._is_gone:
            ready = select.select([self._receive_fd, self._pidfd], [], [], 0.0 if found else wait_s)[0]
            if self._receive_fd not in ready:
                self._is_gone = bool(ready)  # what it has forked may keep the pipe open
                break
            data = os.read(self._receive_fd, 65536)
            self._is_gone = not data
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            found += [json.loads(line) for line in lines]
        return found

    def close(
        self, timeout_s: float = 10.0, *, is_urgent: Callable[[], bool] = lambda: True, beside_main: bool = False
    ) -> bool:
        """Let the search worker finish its requests, release the trials that still run, and exit.

        Args:
            timeout_s: how long it may take once it is urgent.
            is_urgent: until this returns True, the worker may take any time. Beside a busy main job it needs long.
            beside_main: whether there may be a main job: see `THREADS_END_S`.

        Returns:
            Whether it has recorded everything, whatever the user's code did in it after that.
        """
        try:
            self._write({"stop": True})
        except BrokenPipeError:
            pass
        os.close(self._send_fd)
        while not is_urgent() and not select.select([self._pidfd], [], [], LOOK_AGAIN_S)[0]:
            pass
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if beside_main and not is_urgent():
            time.sleep(THREADS_END_S)
        _, status = os.waitpid(self.pid, 0)
        self.last_answers = self._received()
        has_recorded = any("recorded" in answer for answer in self.last_answers)
        os.close(self._pidfd)
        os.close(self._receive_fd)
        return status == 0 or has_recorded
