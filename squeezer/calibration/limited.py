"""Runs a measurement in a process of its own, with a limit: one that hangs ends alone, and leaves nothing that runs."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.processes.signals import asked_to_end
from squeezer.calibration.mps import MpsError, server_of, terminate_client

FIGURE_LIMIT_S = 40.0
"""Of one figure of the calibration; the six that decide take four minutes at most."""
GRACE_S = 10.0
"""How long what is told to end may take; and again what it leaves."""
ENDS_WITHIN_S = 6 * GRACE_S
"""The longest that `run_limited` takes to end a program and what it leaves, but for what it asks an MPS server."""
_LOOK_S = 0.05


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    *,
    grace_s: float | None = None,
    quiet: bool = False,
) -> int:
    """Run a program until it ends; then end what it has left.

    A program that takes longer is asked to end (SIGTERM), so that it ends what it has started. If it does not, its MPS
    server, if it has one, drops it before it is killed, and then what it has started is ended in the same way. If this
    process ends, so does the program.

    Args:
        command: the program. It and what it starts are one process group.
        environment: of both.
        limit_s: how long it may take.
        grace_s: how long it may take to end when it is asked to, by default `GRACE_S`. More for one that itself runs
            programs in this way: killed in the middle of ending them, it would leave a part of them.
        quiet: what it prints goes nowhere.

    Returns:
        Its exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    pidfd = os.pidfd_open(process.pid)
    try:
        if not _has_ended(pidfd, limit_s):
            raise subprocess.TimeoutExpired(command, limit_s)
    finally:
        _end(process, pidfd, GRACE_S if grace_s is None else grace_s)
        _end_group(process.pid)  # until it is waited for, its number means no other group
        os.close(pidfd)
        with suppress(subprocess.TimeoutExpired):  # the driver may keep even who is killed
            process.wait(GRACE_S)
    return process.returncode


@contextmanager
def ended_when_asked() -> Iterator[None]:
    """Leave all `with` blocks at the first request to end; further ones, as of a terminal that is closed, do not count.

    So what was started is ended as a whole. Only in the main thread.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in asked_to_end()}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: "subprocess.Popen[bytes]", pidfd: int, grace_s: float) -> None:
    if _has_ended(pidfd, 0.0):
        return
    process.terminate()
    if not _has_ended(pidfd, grace_s):
        _drop(process.pid)
        process.kill()
        _has_ended(pidfd, GRACE_S)


def _has_ended(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


def _end_group(group: int) -> None:
    """End what the leader of a group has left: it sees the leader's end, is asked to end, is killed."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        if number == signal.SIGKILL:
            for pid in _members(group):
                _drop(pid)
        with suppress(ProcessLookupError):
            os.killpg(group, number)
        end_s = time.monotonic() + GRACE_S
        while _members(group) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        if not _members(group):
            return


def _drop(pid: int) -> None:
    """Let its MPS server drop a process, so that its death is no fault of that server."""
    with suppress(MpsError):
        terminate_client(server_of(pid), pid, lambda: None)


def _members(group: int) -> list[int]:
    """Those of the group that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdecimal():
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                state, _, its_group = stat.rpartition(")")[2].split()[:3]
                if state not in "ZX" and int(its_group) == group:
                    found.append(int(entry))
    return found
