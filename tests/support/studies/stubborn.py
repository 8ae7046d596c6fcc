"""A study whose loss computes, in one unit, for several times the length of a bubble."""

import time

from tiny import Tiny
from torch import Tensor


class Stubborn(Tiny):
    trials = 2
    fused = 2

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass
        return super().loss(outputs, targets)
