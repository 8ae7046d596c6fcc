"""The batches that trials train on: one loader for all at the same epoch, or each trial's own."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trials.fusion import FuseError
from trials.study import Study


class SharedLoaderError(Exception):
    """`Study.batches` gave two epochs the same object, so reading one may disturb the other."""


Batch = tuple[Tensor, Tensor]
"""``(inputs_B, targets_B)`` of B examples."""


class Pinned:
    """Batches in pinned memory. A device copies from there by itself, so the host does not wait for the gate too."""

    def __init__(self, given: Iterable[Batch]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Batch]:
        """Pin each batch as it is read."""
        for inputs, targets in self.given:
            yield _pin(inputs), _pin(targets)


class Kept:
    """A batch as it is before a step, whose loss may change it in place.

    Attributes:
        inputs: a copy.
        targets: likewise.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._given = inputs, targets
        self.inputs, self.targets = inputs.clone(), targets.clone()
        self._versions = [_version(tensor) for tensor in self._given]

    def put_back(self) -> None:
        """Undo what has been changed in place."""
        for tensor, kept, version in zip(self._given, (self.inputs, self.targets), self._versions, strict=True):
            if _version(tensor) != version:  # else it may be memory that nobody may write
                tensor.copy_(kept)
        self._versions = [_version(tensor) for tensor in self._given]


class Reader(NamedTuple):
    """A trial, and the epoch whose batches it reads, counted from 0."""

    number: int
    params: dict[str, Any]
    epoch: int


def rounds(study: Study, readers: Sequence[Reader]) -> Iterator[dict[int, Batch]]:
    """Yield the next batch of each trial, by its number, until the epochs of all are over.

    Trials at the same epoch of `Study.batches` get the very same pair. A trial whose epoch is over gets none.

    Raises:
        FuseError: trials at the same epoch have batches of their own that differ in number or shape.
        SharedLoaderError: epochs cannot be read side by side. Raised before any batch.
    """
    readings: list[tuple[list[int], Iterator[Batch]]] = []
    loaders: list[object] = []
    owners: list[Reader] = []
    for epoch in dict.fromkeys(reader.epoch for reader in readers):
        here = [reader for reader in readers if reader.epoch == epoch]
        own = [study.trial_batches(reader.params, reader.number, epoch) for reader in here]
        if any(batches is not None for batches in own):
            owners += here
            readings += [([r.number], iter(() if given is None else given)) for r, given in zip(here, own, strict=True)]
            continue
        given = study.batches(epoch)
        loader = given.given if isinstance(given, Pinned) else given
        if any(loader is other for other in loaders) and not isinstance(loader, (list, tuple)):
            raise SharedLoaderError
        loaders.append(loader)
        reading = iter(given)
        # reading the first batch draws the epoch's order, before another epoch is asked for
        readings.append(([reader.number for reader in here], chain(tuple(islice(reading, 1)), reading)))
    while True:
        found: dict[int, Batch] = {}
        for numbers, reading in readings:
            batch = next(reading, None)
            if batch is not None:
                found.update(dict.fromkeys(numbers, batch))
        if not found:
            return
        _check_own(owners, found)
        yield found


def shapes(batch: Batch | None) -> tuple[torch.Size, torch.Size] | None:
    """Return a key that is equal for batches that can be fused; None for no batch."""
    return None if batch is None else (batch[0].shape, batch[1].shape)


def fuse_batches(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, bool]:
    """Return the arguments of `TrialGroup.train_step`, from one batch per trial, of equal shapes."""
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


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _check_own(readers: Sequence[Reader], found: dict[int, Batch]) -> None:
    by_epoch: dict[int, set[tuple[torch.Size, torch.Size] | None]] = {}
    for reader in readers:
        by_epoch.setdefault(reader.epoch, set()).add(shapes(found.get(reader.number)))
    for kinds in by_epoch.values():
        if len(kinds) > 1 and None in kinds:
            raise FuseError("Study.trial_batches gave some trials more batches than others; allowed: equally many")
        if len(kinds) > 1:
            raise FuseError("Study.trial_batches gave batches of different shapes; allowed: equal ones for all trials")
