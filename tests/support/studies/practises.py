"""A study whose first epoch, so its rehearsal, lasts until a file is gone."""

import os
from collections.abc import Iterable

from tiny import HOLD, Tiny
from torch import Tensor


class Practises(Tiny):
    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        while os.path.exists(HOLD):
            yield self.inputs, self.targets
        yield from super().batches(epoch)
