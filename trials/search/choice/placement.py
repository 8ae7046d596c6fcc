"""Which of the waiting trials a worker gets first: those of the structure that its device trains best.

Each worker measures its *speed* for each structure: the samples that trials train, per second of the time that its
device spends on it, closed gates included. A device with few bubbles is slow, however fast it is inside them, and what
counts is who is done sooner.

A sample is worth more in a structure that all workers train slowly: all trials are wanted, so a speed counts in
multiples of the structure's mean over the workers. The sum of these is largest where each worker does what it does
best compared with the others (`scipy.optimize.linear_sum_assignment`). What has not been measured is estimated.

It is an order, and no worker idles for it. Nothing moves while it trains; under promotion, trials come back at each
rung anyway.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

GAIN = 1.2
"""An order changes only if the new one is worth this many times as much. Speeds are measured, and vary."""

INFEASIBLE = -1e12
"""The worth of a structure where it does not fit; with -inf, there might be no solution."""

NO_ROOM = "not even one trial fits into the side task's memory"
"""Why a trial fails that fits on no living worker's device."""

HALF_LIFE_S = 120.0
"""After this much more time of the device, a measurement counts half as much."""

_ROUNDS = 20


class Speeds:
    """A worker's speeds, by structure.

    The more trials are fused, the faster. So what is measured with less than half as many as before does not count,
    until that is long ago.
    """

    def __init__(self) -> None:
        self._measured: dict[str, tuple[float, float, float]] = {}  # trials, samples, seconds: weighted sums
        self._unfit: set[str] = set()

    def measure(self, structure: str, trials: int, samples: float, device_s: float) -> None:
        """Note how many samples, of all its trials, a group trained in how much time of the device."""
        most, known, known_s = self._measured.get(structure, (0.0, 0.0, 0.0))
        weight = 0.5 ** (device_s / HALF_LIFE_S)
        if 2 * trials < most:
            self._measured[structure] = most * weight, known, known_s
        elif trials > 2 * most:
            self._measured[structure] = trials, samples, device_s
        else:
            self._measured[structure] = max(most, trials), known * weight + samples, known_s * weight + device_s

    def does_not_fit(self, name: str) -> None:
        """Note that not even one trial of a structure fits."""
        self._unfit.add(name)

    def samples_per_s(self) -> dict[str, float]:
        """The speeds; 0: it does not fit."""
        speeds = {name: samples / device_s for name, (_, samples, device_s) in self._measured.items() if samples > 0}
        return speeds | dict.fromkeys(self._unfit, 0.0)


def trial_name(number: int) -> str:
    """A structure of its own, for a trial that is too large to be built, so that its structure is unknown."""
    return f"trial {number}"


def groups(waiting: int, fused: int) -> int:
    """How many groups that number of trials makes."""
    return ceil(waiting / fused)


def assign(
    slots: Mapping[str, int],
    workers: Sequence[str],
    speeds: Mapping[tuple[str, str], float],
    stands: Mapping[str, str],
) -> dict[str, str]:
    """Return worker -> the structure of which it gets trials first. A worker may get none.

    Args:
        slots: structure -> how many groups of it wait.
        workers: those that live.
        speeds: (structure, worker) -> samples per second; 0: it does not fit there.
        stands: the order until now. It is kept, as far as it can be, unless another is worth `GAIN` times as much.
    """
    structures = sorted(slots)
    if len(structures) < 2 or len(workers) < 2:
        return {}
    worth = _worth(structures, workers, speeds)
    rows, columns = {name: i for i, name in enumerate(structures)}, {name: i for i, name in enumerate(workers)}
    left = dict(slots)
    kept: dict[str, str] = {}
    for worker, structure in stands.items():
        if worker in columns and left.get(structure, 0) > 0 and worth[rows[structure], columns[worker]] > 0:
            kept[worker] = structure
            left[structure] -= 1
    kept |= _assign(structures, left, [each for each in workers if each not in kept], worth, columns)
    best = _assign(structures, slots, workers, worth, columns)

    def total(placed: Mapping[str, str]) -> float:
        return sum(float(worth[rows[structure], columns[worker]]) for worker, structure in placed.items())

    return best if total(best) > GAIN * total(kept) else kept


def solver() -> Callable[..., tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return what solves an assignment. The first call takes half a second, and most studies need none."""
    from scipy.optimize import linear_sum_assignment

    solves: Callable[..., tuple[NDArray[np.int64], NDArray[np.int64]]] = linear_sum_assignment
    return solves


def _assign(
    structures: Sequence[str],
    slots: Mapping[str, int],
    workers: Sequence[str],
    worth: NDArray[np.float64],
    columns: Mapping[str, int],
) -> dict[str, str]:
    """Give each worker at most one slot, for the largest sum of what they are worth."""
    rows = [row for row, name in enumerate(structures) for _ in range(min(slots[name], len(workers)))]
    if not rows or not workers:
        return {}
    chosen = worth[np.ix_(rows, [columns[worker] for worker in workers])]
    pairs = zip(*solver()(chosen, maximize=True), strict=True)
    return {workers[column]: structures[rows[slot]] for slot, column in pairs if chosen[slot, column] > 0}


def _worth(
    structures: Sequence[str], workers: Sequence[str], speeds: Mapping[tuple[str, str], float]
) -> NDArray[np.float64]:
    """Return what a second of each worker is worth for each structure, in multiples of the structure's mean.

    A speed that is unknown is estimated as the product of the worker's and the structure's, which fit best what is
    known: in logarithms, as sums.
    """
    known = np.full((len(structures), len(workers)), np.nan)
    rows, columns = {name: i for i, name in enumerate(structures)}, {name: i for i, name in enumerate(workers)}
    for (structure, worker), speed in speeds.items():
        if structure in rows and worker in columns:
            known[rows[structure], columns[worker]] = speed
    is_known = known > 0
    logs = np.where(is_known, np.log(np.where(is_known, known, 1.0)), 0.0)
    of_structures, of_workers = np.zeros((len(structures), 1)), np.zeros((1, len(workers)))
    for _ in range(_ROUNDS):
        of_structures = _mean(logs - of_workers, is_known, axis=1)
        of_workers = _mean(logs - of_structures, is_known, axis=0)
    estimated = np.where(is_known, known, np.exp(of_structures + of_workers))
    fits = ~(known == 0)
    means = np.sum(estimated, axis=1, where=fits, keepdims=True) / np.maximum(fits.sum(axis=1, keepdims=True), 1)
    return np.where(fits, estimated / np.where(means > 0, means, 1.0), INFEASIBLE)


def _mean(
    values: NDArray[np.float64],
    of: NDArray[np.bool_],
    axis: int,
) -> NDArray[np.float64]:
    """The mean of the values that are known; 0 where none is."""
    counts = of.sum(axis=axis, keepdims=True)
    mean: NDArray[np.float64] = np.sum(values, axis=axis, where=of, keepdims=True) / np.maximum(counts, 1)
    return mean
