"""What trials are trained on: one loader for all that are at the same epoch, or each trial's own batches."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trials.fusion import FuseError
from trials.study import Study


class SharedLoaderError(Exception):
    """`Study.batches` gave two epochs the same object, so that to read one may disturb the other."""


Batch = tuple[Tensor, Tensor]
"""``(inputs_B, targets_B)``."""


class Pinned:
    """Batches in memory from where a device copies by itself; else the host would wait for the gate with it."""

    def __init__(self, given: Iterable[Batch]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Batch]:
        """Each pinned as it is read."""
        for inputs, targets in self.given:
            yield _pin(inputs), _pin(targets)


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
        SharedLoaderError: before any batch, if epochs cannot be read side by side.
    """
    streams: list[tuple[list[int], Iterator[Batch]]] = []
    loaders: list[object] = []
    owners: list[Reader] = []
    for epoch in dict.fromkeys(reader.epoch for reader in readers):
        here = [reader for reader in readers if reader.epoch == epoch]
        own = [study.trial_batches(reader.params, reader.number, epoch) for reader in here]
        if any(batches is not None for batches in own):
            owners += here
            streams += [([r.number], iter(() if given is None else given)) for r, given in zip(here, own, strict=True)]
            continue
        given = study.batches(epoch)
        loader = given.given if isinstance(given, Pinned) else given
        if any(loader is other for other in loaders) and not isinstance(loader, (list, tuple)):
            raise SharedLoaderError
        loaders.append(loader)
        stream = iter(given)
        # its order is drawn now, before another epoch is asked for
        streams.append(([reader.number for reader in here], chain(tuple(islice(stream, 1)), stream)))
    while True:
        found: dict[int, Batch] = {}
        for numbers, stream in streams:
            batch = next(stream, None)
            if batch is not None:
                found.update(dict.fromkeys(numbers, batch))
        if not found:
            return
        _check_own(owners, found)
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


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _check_own(readers: Sequence[Reader], found: dict[int, Batch]) -> None:
    by_epoch: dict[int, set[tuple[torch.Size, torch.Size] | None]] = {}
    for reader in readers:
        by_epoch.setdefault(reader.epoch, set()).add(shapes(found.get(reader.number)))
    for kinds in by_epoch.values():
        if len(kinds) > 1 and None in kinds:
            raise FuseError("Study.trial_batches gave some trials more batches than others; allowed: equally many")
        if len(kinds) > 1:
            raise FuseError("Study.trial_batches gave batches of different shapes; allowed: equal ones for all trials")
