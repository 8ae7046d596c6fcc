"""Keeps a daemon in a process of its own, and starts that of one rank again after a crash, a bounded number of times.

The rank cannot do that: `launch/rank.py` becomes the training. So the process that it starts only waits, and forks the
daemon proper. Whatever ends the waiting process ends the daemon too.
"""

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.processes.identity import is_stopped
from ds_hooks.shared.processes.parent import adopt_orphans, die_with_parent
from ds_hooks.shared.processes.signals import asked_to_end
from squeezer.daemon.side_processes.control_group import remove_dead_groups
from squeezer.daemon.side_processes.orphans import await_gated, end_orphans

MAX_RESTARTS = 3
RESTART_AFTER_S = 1.0
LOOK_EVERY_S = 1.0
"""While the daemon is stopped. One that runs needs no look."""

log = logging.getLogger(__name__)


def keep(serve: Callable[[str | None], int], job_pid: int) -> int:
    """Run `serve` in a process of its own, and again after a crash while `job_pid` lives.

    Args:
        serve: is the daemon; returns its exit status. It is told how the one before it ended; None: it is the first.
        job_pid: the rank that it serves.

    Returns:
        The exit status of the last daemon, as a shell would give it.
    """
    signals, before = _block_signals()
    adopt_orphans()
    job_fd = _open_job(job_pid)

    def is_over() -> bool:
        return job_fd < 0 or bool(select.select([job_fd], [], [], 0)[0])

    ended: str | None = None
    for restarts in range(MAX_RESTARTS + 1):
        try:
            pid = _fork(serve, ended, before)
        except OSError as error:
            log.error("no daemon, so nothing is squeezed; the main job continues alone: %s", error.strerror)
            return 1
        status, was_asked = _await(pid, signals, is_over)
        await_gated()
        remove_dead_groups()  # a killed daemon's side task has ended too, but not that one's own processes
        end_orphans()
        if status in (0, USER_ERROR_STATUS) or was_asked or is_over():
            break
        ended = f"status {status}" if status > 0 else signal.Signals(-status).name
        if restarts == MAX_RESTARTS:
            log.error("the daemon ended with %s and is given up; the main job continues alone", ended)
            break
        log.warning("the daemon ended with %s; restarting", ended)
        time.sleep(RESTART_AFTER_S)
    return status if status >= 0 else 128 - status


def shield(serve: Callable[[str | None], int]) -> int:
    """Run a standing daemon where all of its children are its own, since it kills them with each side task.

    The first process of a container becomes the parent of whatever loses its own there, be it of the main job; and a
    program keeps the children of the one that it replaces.

    Args:
        serve: as for `keep`.

    Returns:
        Its exit status.
    """
    if os.getpid() != 1 and not psutil.Process().children():
        return serve(None)
    signals, before = _block_signals()
    status, _ = _await(_fork(serve, None, before), signals, lambda: False)
    return status if status >= 0 else 128 - status


def _block_signals() -> tuple[set[signal.Signals], set[int | signal.Signals]]:
    """Block what `_await` waits for. Returns that, and the mask before."""
    signals = {*asked_to_end(), signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel forgets children at once
    return signals, signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def _open_job(job_pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.pidfd_open(job_pid)
    return -1


def _fork(serve: Callable[[str | None], int], ended: str | None, mask: set[int | signal.Signals]) -> int:
    """Fork the daemon; returns its process id."""
    keeper_pid = os.getpid()
    pid = os.fork()  # no thread has been started here
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(keeper_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = serve(ended)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            os.kill(keeper_pid, signal.SIGCONT)  # somebody may have stopped it
            sys.stdout.flush()
        os._exit(status)


def _await(pid: int, signals: set[signal.Signals], is_over: Callable[[], bool]) -> tuple[int, bool]:
    """Wait for the end of the daemon, and pass on to it what asks for that.

    Args:
        pid: of the daemon, which is continued if it is to end while it is stopped.
        signals: what to wait for. The kernel sends one when the daemon stops, but none when the job ends.
        is_over: whether the job has ended.

    Returns:
        (exit status, asked to end).
    """
    was_asked = False
    while True:
        found = signal.sigtimedwait(signals, LOOK_EVERY_S) if is_stopped(pid) else signal.sigwaitinfo(signals)
        if found is not None and found.si_signo != signal.SIGCHLD:
            was_asked = True
            os.kill(pid, found.si_signo)  # it is not reaped yet, so the number is its own
        if (was_asked or is_over()) and is_stopped(pid):
            os.kill(pid, signal.SIGCONT)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # of others nobody else takes notice
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1]), was_asked
