"""The side task of the soak: the example's study, with batches that a loader's worker process reads."""

import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import BATCH, Digits


class LoadedDigits(Digits):
    """As many trials as two ranks never finish, so that there is a side task to the end."""

    trials = 2000
    epochs = 4
    rungs = (1, 2)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All training examples in order, read by a process of its own."""
        yield from DataLoader(TensorDataset(self.inputs, self.targets), batch_size=BATCH, num_workers=1)
