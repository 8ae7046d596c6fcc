"""A study with a thread that never rests, as one that prepares examples; it may keep the process from its end."""

import _thread
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
UNKNOWN = bool(os.environ.get("PREFETCHES_UNKNOWN"))
"""Python does not know the thread, as if it were a library's own."""


class Prefetches(Tiny):
    has_begun = False

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        if not self.has_begun:
            self.has_begun = True
            if UNKNOWN:
                _thread.start_new_thread(prepare, ())
            else:
                thread.start()
        yield from super().batches(epoch)
