"""Ties the lives of processes to those which started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None, *, wanted: bool = True) -> None:
    """Have the kernel kill this process when its parent ends, even if it is stopped then. Linux only.

    It outlasts `exec`, but not `fork`.

    Args:
        parent_pid: the parent. If that has ended already, this process ends now.
        wanted: False takes it back.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends. It outlasts `exec`, but not `fork`."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
