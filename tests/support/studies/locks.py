"""A study whose loss holds a lock for several times the length of a bubble, or for as long as there is a file."""

import fcntl
import os
import time
from pathlib import Path

from tiny import Tiny
from torch import Tensor

LOCK = Path(os.environ["LOCK"])
HELD_WHILE = os.environ.get("LOCK_HELD_WHILE", "")


class Locks(Tiny):
    trials = 2
    fused = 2

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            end_s = time.thread_time() + 0.1
            while time.thread_time() < end_s or os.path.exists(HELD_WHILE):
                pass
        return super().loss(outputs, targets)
