"""Runs a training script whose steps wait, twice, until squeezing has been seen: `patient.py train.py …`.

Before an even step, from the 12th on, rank 1 waits until rank 0's side task has run some units in the bubble that
this makes. Before an odd step, from the 17th on, it is the other way round. Each takes the first such step that
the other's daemon means to squeeze and in which the other's bubble opens. And before each step, a rank waits until the
other's daemon, if it was killed, has been restarted. So every rank is squeezed, and by the daemon that follows another,
however busy the machine is, and no number changes.

Where each rank has a launcher, PATIENT_DIRECTORIES names their runtime directories, in the order of ranks.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_hooks.shared.page.file import Page, page_path, runtime_dir
from ds_hooks.shared.page.layout import Field
from tests.support.sandbox import is_alive

WAITS_FROM = {1: 12, 0: 17}
"""Who waits, and from which step on: every second one, so that never both wait."""
UNITS = 150
PATIENCE_S = 100.0
"""Less than a test's own, so that it is the test that says what is missing."""
OPENS_WITHIN_S = 1.0
"""What waits longer for a bubble is in a wait that stays shut: a late one, say, whose forecast end is too near."""

train_batch = PipelineEngine.train_batch


def page_of(rank: int) -> Path:
    """Where the page of a rank's device is."""
    named = os.environ.get("PATIENT_DIRECTORIES")
    if named is None:
        return page_path(runtime_dir(), rank)
    (found,) = Path(named.split(os.pathsep)[rank]).rglob(page_path(Path(), 0).name)
    return found


def wait_until_squeezed(rank: int) -> bool:
    """Wait until the side task of `rank` has run some units, or was killed once it ran, or its daemon was killed.

    Returns:
        False if no bubble has opened, or the side task was ended while it started: it has to be waited for again.
    """
    started_s = time.monotonic()
    page = Page.open(page_of(rank), create=False)
    words = page.words
    daemon, side, before = words[Field.DAEMON_PID], words[Field.SIDE_PROCESS], words[Field.UNITS_RUN]
    opened, is_over = False, False
    while not is_over and words[Field.UNITS_RUN] < before + UNITS:
        time.sleep(0.01)
        waited_s = time.monotonic() - started_s
        opened = opened or bool(words[Field.BUBBLE] & 1)
        given_up = not opened and waited_s > OPENS_WITHIN_S
        if given_up or words[Field.SIDE_PROCESS] != side:
            break
        is_over = waited_s > PATIENCE_S or not is_alive(daemon)
    is_over = is_over or words[Field.UNITS_RUN] > before
    page.close()
    return is_over


def may_be_squeezed(rank: int, step: int) -> bool:
    """Whether `step` is planned to be squeezed on `rank`."""
    page = Page.open(page_of(rank), create=False)
    planned = page.words[Field.PLAN_FROM_STEP] <= step < page.words[Field.PLAN_UNTIL_STEP]
    page.close()
    return planned


def wait_for_the_next_daemon(rank: int) -> None:
    """Wait until the daemon of `rank`, if it was killed, has been replaced."""
    until_s = time.monotonic() + PATIENCE_S
    page = Page.open(page_of(rank), create=False)
    while (daemon := page.words[Field.DAEMON_PID]) and not is_alive(daemon) and time.monotonic() < until_s:
        time.sleep(0.01)
    page.close()


def train_batch_patiently(self: PipelineEngine, *args: object, **kwargs: object) -> object:
    rank, step = torch.distributed.get_rank(), self.global_steps + 1
    if step > 1:  # the other has attached
        wait_for_the_next_daemon(1 - rank)
    since = step - WAITS_FROM.get(rank, step + 1)
    if since >= 0 and since % 2 == 0 and may_be_squeezed(1 - rank, step) and wait_until_squeezed(1 - rank):
        del WAITS_FROM[rank]
    return train_batch(self, *args, **kwargs)


if __name__ == "__main__":
    PipelineEngine.train_batch = train_batch_patiently
    # a launcher puts its own first
    sys.argv = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]
    runpy.run_path(sys.argv[0], run_name="__main__")
