"""Starts the daemon of one rank again after a crash, a bounded number of times.

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

from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.processes.parent import adopt_orphans, die_with_parent
from ds_hooks.shared.processes.signals import asked_to_end
from squeezer.daemon.side_processes.control_group import remove_dead_groups
from squeezer.daemon.side_processes.orphans import await_gated, end_orphans

MAX_RESTARTS = 3
RESTART_AFTER_S = 1.0

log = logging.getLogger(__name__)


def keep(serve: Callable[[str | None], int], job_pid: int) -> int:
    """Run `serve` in a process of its own, and again after a crash while `job_pid` lives.

    Args:
        serve: is the daemon; returns its exit status. It is told how the one before it ended; None: it is the first.
        job_pid: the rank that it serves.

    Returns:
        The exit status of the last daemon, as a shell would give it.
    """
    signals = {*asked_to_end(), signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    adopt_orphans()
    job_fd = _open_job(job_pid)
    ended: str | None = None
    for restarts in range(MAX_RESTARTS + 1):
        status, was_asked = _await(_fork(serve, ended, before), signals)
        await_gated()
        remove_dead_groups()  # a killed daemon's side task has ended too, but not that one's own processes
        end_orphans()
        is_over = job_fd < 0 or bool(select.select([job_fd], [], [], 0)[0])
        if status in (0, USER_ERROR_STATUS) or was_asked or is_over:
            break
        ended = f"status {status}" if status > 0 else signal.Signals(-status).name
        if restarts == MAX_RESTARTS:
            log.error("the daemon ended with %s and is given up; the main job continues alone", ended)
            break
        log.warning("the daemon ended with %s; restarting", ended)
        time.sleep(RESTART_AFTER_S)
    return status if status >= 0 else 128 - status


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
            sys.stdout.flush()
        os._exit(status)


def _await(pid: int, signals: set[signal.Signals]) -> tuple[int, bool]:
    """Wait for the end of the daemon, and pass on to it what asks for that. Returns (exit status, asked to end)."""
    was_asked = False
    while True:
        number = signal.sigwait(signals)
        if number != signal.SIGCHLD:
            was_asked = True
            os.kill(pid, number)  # it is not reaped yet, so the number is its own
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), was_asked
