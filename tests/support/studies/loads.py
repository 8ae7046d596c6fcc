"""Trials whose examples are loaded by two worker processes, far ahead, until a file is gone."""

import os
from collections.abc import Iterator

from burning import Burning, leave_behind
from tiny import HOLD, Tiny
from torch import Tensor
from torch.utils.data import DataLoader

CONTEXT = os.environ.get("LOADS_CONTEXT", "fork")
LEAVES = bool(os.environ.get("LOADS_LEAVES"))


def start(_: int) -> None:
    """What each worker does first."""
    if LEAVES:
        leave_behind()


class Loads(Tiny):
    trials = fused = 2
    epochs = 2
    rungs = ()

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(
            Burning(),
            batch_size=1,
            num_workers=2,
            prefetch_factor=8,
            persistent_workers=True,
            multiprocessing_context=CONTEXT,
            worker_init_fn=start if CONTEXT == "fork" else None,
        )
        yield from loader
        while epoch == 1 and os.path.exists(HOLD):
            yield from loader
