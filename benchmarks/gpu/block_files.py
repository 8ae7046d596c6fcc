"""The files of `gpu_pipeline`, by which its processes know of each other. Needs no package."""

import mmap
from pathlib import Path

RANKS = 2


def step_word(folder: Path, rank: int, *, create: bool = False) -> "memoryview[int]":
    """One shared word in `folder`: the number of the step that the rank has begun last."""
    path = folder / f"step{rank}"
    if create:
        path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


def steps_path(folder: Path, rank: int) -> Path:
    """Where a rank writes a line for each step as soon as the next one begins: its number, ms."""
    return folder / f"steps{rank}.jsonl"


def ready_path(folder: Path, mode: str, rank: int) -> Path:
    """Is there once a side task without a gate has loaded everything and waits for its blocks."""
    return folder / f"{mode}{rank}.ready"


def trained_path(folder: Path, mode: str, rank: int) -> Path:
    """Where a side task without a gate writes a line for each of its blocks: the round, training steps."""
    return folder / f"{mode}{rank}.jsonl"
