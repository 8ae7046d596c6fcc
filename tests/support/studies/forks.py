"""Trials that start a process in each epoch, after some work."""

import multiprocessing
from collections.abc import Iterable

from burning import burn
from endless import Endless
from torch import Tensor


class Forks(Endless):
    trials = fused = 2

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        for _ in range(30):
            burn()
        process = multiprocessing.get_context("fork").Process(target=burn)
        process.start()
        process.join()
        yield self.inputs, self.targets
