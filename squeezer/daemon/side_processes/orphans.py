"""Ends what processes that have ended leave behind, once it has removed what they leave in shared memory.

Whoever calls `adopt_orphans` becomes the parent of all that its descendants leave, whatever session or process group
that has gone to. Until it is reaped here, its number is its own, so signals hit no other process.
"""

import os
import select
import signal
import time
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

PATIENCE_S = 15.0
"""A killed process ends at once, unless it waits for a device, or for a core on which it has idle time only."""

CLEARING_S = 5.0
"""To clear up takes milliseconds, on a core on which there is time for it."""
FEW = 64
"""A side task that has more processes may be forking without end, so that all are to be killed at once."""

_CLEAR_UP = (b"torch_shm_manager", b"from multiprocessing.resource_tracker import main")
"""Of PyTorch's sharing strategy `file_system`, and of Python's shared memory and semaphores."""

_AWAITED = 32
"""No more, for there may be more than this process may have files."""

GATED_PATIENCE_S = 25.0
"""A CUDA side task gives itself 20 s: see `trials.gate.parent_watch`."""


def ends_by_itself(pid: int) -> bool:
    """Whether a process is a CUDA side task, which ends by itself once its daemon was killed, and shuts the gate.

    Nobody else may kill it meanwhile: a kill while its kernel runs can end all clients of its MPS server, the main job
    among them.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        leads = os.getpgid(pid) == pid  # what it has forked has the same words
    except OSError:
        return False  # it has ended
    return leads and b"--page" in words and (b"--device", b"cuda") in pairwise(words)


def await_gated(timeout_s: float = GATED_PATIENCE_S) -> None:
    """Wait until no child of this process is one that `ends_by_itself`."""
    deadline_s = time.monotonic() + timeout_s
    while gated := [child.pid for child in psutil.Process().children() if ends_by_itself(child.pid)]:
        _await_one(gated, deadline_s - time.monotonic())
        if time.monotonic() >= deadline_s:
            break


def let_clear_up(spare: Collection[int] = ()) -> None:
    """Let those descendants end by themselves that remove what others leave in shared memory; kill these others first.

    Killed too, they would leave it for ever, where the main job needs the room.

    Args:
        spare: children that live on.
    """
    own, end_s = psutil.Process(), time.monotonic() + CLEARING_S
    while may_clear_up([each.pid for each in own.children(recursive=True)]) and time.monotonic() < end_s:
        children = [child.pid for child in own.children() if child.pid not in spare]
        for pid in children:
            os.kill(pid, signal.SIGCONT if clears_up(pid) else signal.SIGKILL)  # it may be stopped
        _await_one(children, end_s - time.monotonic())
        for pid in children:
            os.waitpid(pid, os.WNOHANG)


def may_clear_up(pids: Collection[int]) -> bool:
    """Whether there is something to wait for: see `let_clear_up`."""
    return len(pids) <= FEW and any(map(clears_up, pids))


def clears_up(pid: int) -> bool:
    """Whether a process removes what others have left in shared memory, once they have ended, and then ends itself."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended
    return any(word.startswith(name) or word.endswith(b"/" + name) for word in words for name in _CLEAR_UP)


def end_orphans(spare: Collection[int] = ()) -> int:
    """Kill all children of this process but `spare`, and their children, which become ours. Returns how many."""
    let_clear_up(spare)
    ended: set[int] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while left := [child.pid for child in psutil.Process().children() if child.pid not in spare]:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        _await_one(left, deadline_s - time.monotonic())
        ended |= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if time.monotonic() >= deadline_s:
            break
    return len(ended)


def _await_one(children: Sequence[int], timeout_s: float) -> None:
    """Wait asleep until one of them ends: to look again and again would take the core on which they end."""
    pidfds = [os.pidfd_open(pid) for pid in children[:_AWAITED]]
    try:
        select.select(pidfds, [], [], max(0.0, timeout_s))
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
