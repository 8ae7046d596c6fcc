"""Ends what processes that have ended leave behind.

Whoever calls `adopt_orphans` becomes the parent of all that its descendants leave, whatever session or process group
that has gone to. Until it is reaped here, its number is its own, so signals hit no other process.
"""

import os
import signal
import time
from collections.abc import Collection

import psutil

PATIENCE_S = 15.0
"""A killed process ends at once, unless it waits for a device, or for a core on which it has idle time only."""


def end_orphans(spare: Collection[int] = ()) -> int:
    """Kill all children of this process but `spare`, and their children, which become ours. Returns how many."""
    ended: set[int] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while left := [child.pid for child in psutil.Process().children() if child.pid not in spare]:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended.add(pid)
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.001)
    return len(ended)
