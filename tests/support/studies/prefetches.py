"""A study with a thread that never rests, as one that prepares examples; it may keep the process from its end."""

import os
import threading
from collections.abc import Iterable

from burning import burn
from tiny import Tiny
from torch import Tensor

LASTS = os.environ.get("PREFETCHES_WHILE", "")
"""A file. If it is named, the thread outlives the study until the file is gone."""


def prepare() -> None:
    while not LASTS or os.path.exists(LASTS):
        burn()


thread = threading.Thread(target=prepare, daemon=not LASTS)


class Prefetches(Tiny):
    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        if thread.ident is None:
            thread.start()
        yield from super().batches(epoch)
