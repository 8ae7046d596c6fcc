"""How many trials to fuse, by measurement.

Fusing saves the overhead of each call, which K trials share. Where arithmetic takes all the time, or a batched kernel
is slower than K plain ones, it gains nothing, and one trial after another is as fast in a fraction of the memory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

from trials.fusion.errors import is_out_of_memory
from trials.study import Study
from trials.training.group import TrialGroup
from trials.training.malloc import give_back_freed_memory

WORTH = 1.05
"""Twice as many trials must gain this factor: they need twice the memory, and a sampler learns less from each."""

LONG_S = 0.2
"""If a step takes longer, larger groups are tried only as long as they gain."""

LEAST_STEPS, ENOUGH_S = 2, 0.1


@dataclass(frozen=True, slots=True)
class MostFused:
    """What was found.

    Attributes:
        trials: K.
        gain: how many times faster K trials train at once than one after another; None: it was not measured.
    """

    trials: int
    gain: float | None = None


class Known(Protocol):
    """What was found before, on this machine and elsewhere."""

    def find(self, of_study: str) -> MostFused | None:
        """Return what was found here in that situation; None: nothing that still holds."""

    def keep(self, of_study: str, found: MostFused) -> None:
        """Keep what was found, if that is possible."""


def most_fused(study: Study, most: int, group_of: Callable[[int], TrialGroup]) -> MostFused:
    """Find the K up to `most` at which trials of `study` train fastest.

    Args:
        study: the user's.
        most: the largest K; 1, 2, 4, … are tried.
        group_of: makes a group of K trials with an open gate.
    """
    give_back_freed_memory()
    found = choose(lambda trials: _step_s(study, group_of(trials)), most)
    give_back_freed_memory()
    return found


def choose(step_s: Callable[[int], float], most: int) -> MostFused:
    """Choose K by the time of a step of K trials.

    Args:
        step_s: K -> seconds. It may raise what an allocator raises: then K is too large.
        most: the largest K.
    """
    alone_s = step_s(1)
    best, gain, trials, took_s = 1, 1.0, 1, alone_s
    while trials < most:
        trials = min(2 * trials, most)
        try:
            took_s = step_s(trials)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if trials == 2:
                return MostFused(1)
            break
        found = trials * alone_s / took_s
        if found >= WORTH * gain:
            best, gain = trials, found
        elif took_s > LONG_S:
            break
    return MostFused(best, gain)


def describe(found: MostFused) -> str:
    """What fusing gains, in words."""
    if found.gain is None:
        return "two do not fit into memory"
    if found.trials == 1:
        return "fused ones would train no faster than one after another"
    return f"{found.gain:.1f} times as fast as one after another"


def _step_s(study: Study, group: TrialGroup) -> float:
    """Return the processor time of a step, all threads together: what else runs on the machine does not count.

    The first step allocates. Of the others the fastest counts, because a pause between two leaves caches cold. All take
    the same few batches, as a loader may be slow.
    """
    batches = list(islice(group.batches(0), LEAST_STEPS + 1))
    # schedulers that step with each batch may allow no more steps than a trial has
    most = len(batches) * study.epochs if study.scheduler_every == "step" else None
    took_s: list[float] = []
    for batch in islice(cycle(batches), most):
        began_s = time.process_time()
        group.train_step(*batch)
        took_s.append(time.process_time() - began_s)
        if len(took_s) > LEAST_STEPS and sum(took_s) >= ENOUGH_S:
            break
    group.keep([])  # it refers to itself, and the next one needs its memory
    return min(took_s[1:] or took_s)
