"""What trials are trained on: one loader for all that are at the same epoch, or each trial's own batches."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trials.fusion import FuseError
from trials.study import Study


class SharedIteratorError(Exception):
    """`Study.batches` gave two epochs the same iterator, as a loader with persistent workers does."""


Batch = tuple[Tensor, Tensor]
"""``(inputs_B, targets_B)``."""


class Reader(NamedTuple):
    """A trial, and the epoch, counted from 0, whose batches it reads."""

    number: int
    params: dict[str, Any]
    epoch: int


def rounds(study: Study, readers: Sequence[Reader]) -> Iterator[dict[int, Batch]]:
    """What each trial is trained on next, by its number, until the epochs of all are over.

    Trials at the same epoch of `Study.batches` get the very same pair. A trial whose epoch is over gets none.

    Raises:
        FuseError: the own batches of trials at the same epoch differ in number or shape.
        SharedIteratorError: before any batch, if epochs cannot be read side by side.
    """
    own = [study.trial_batches(reader.params, reader.number, reader.epoch) for reader in readers]
    streams: list[tuple[list[int], Iterator[Batch]]] = []
    if own[0] is not None:
        streams = [([r.number], iter(() if o is None else o)) for r, o in zip(readers, own, strict=True)]
    else:
        for epoch in dict.fromkeys(reader.epoch for reader in readers):
            numbers = [reader.number for reader in readers if reader.epoch == epoch]
            streams.append((numbers, iter(study.batches(epoch))))
        if len({id(stream) for _, stream in streams}) < len(streams):
            raise SharedIteratorError
    while True:
        found: dict[int, Batch] = {}
        for numbers, stream in streams:
            batch = next(stream, None)
            if batch is not None:
                found.update(dict.fromkeys(numbers, batch))
        if not found:
            return
        if own[0] is not None:
            _check_own(readers, found)
        yield found


def shapes(batch: Batch | None) -> tuple[torch.Size, torch.Size] | None:
    """Equal for batches that can be fused; None for none."""
    return None if batch is None else (batch[0].shape, batch[1].shape)


def fuse_batches(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, bool]:
    """What `TrialGroup.train_step` is called with, from a batch of each trial, of equal shapes."""
    first = batches[0]
    if all(batch is first for batch in batches):
        return (*first, False)
    return _stack(inputs for inputs, _ in batches), _stack(targets for _, targets in batches), True


def _stack(tensors: Iterable[Tensor]) -> Tensor:
    given = tuple(tensors)
    stacked = torch.stack(given)
    return stacked.pin_memory() if given[0].is_pinned() else stacked


def _check_own(readers: Sequence[Reader], found: dict[int, Batch]) -> None:
    by_epoch: dict[int, set[tuple[torch.Size, torch.Size] | None]] = {}
    for reader in readers:
        by_epoch.setdefault(reader.epoch, set()).add(shapes(found.get(reader.number)))
    for kinds in by_epoch.values():
        if len(kinds) > 1 and None in kinds:
            raise FuseError("Study.trial_batches gave some trials more batches than others; allowed: equally many")
        if len(kinds) > 1:
            raise FuseError("Study.trial_batches gave batches of different shapes; allowed: equal ones for all trials")
