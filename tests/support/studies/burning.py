"""Examples that cost CPU time to load, and processes that their starter leaves behind. Not a study."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

BURN_S = 0.003


def note() -> None:
    """Write down this process."""
    directory = os.environ.get("LOADS")
    if directory:
        Path(directory, str(os.getpid())).touch()


def burn() -> None:
    """Use the core."""
    end_s = time.thread_time() + BURN_S
    while time.thread_time() < end_s:
        pass


def leave_behind() -> None:
    """Leave a process in a session of its own whose parent has ended."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork() == 0:
        if where := os.environ.get("LOADS_MOVES_TO"):
            Path(where).write_text("0")
        note()
        while True:
            time.sleep(0.1)
    os._exit(0)


class Burning(Dataset[tuple[Tensor, Tensor]]):
    """16 examples."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        note()
        burn()
        example = torch.full((4,), float(index % 7))
        return example, example.sum(0, keepdim=True)
