"""What a study gives to train on."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy
from trials import FuseError
from trials.training.inputs.batches import SMALL_BYTES, Reader, rounds
from trials.training.inputs.batches_seen import BatchesSeen

BATCH = torch.ones(1, 2), torch.zeros(1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, r"Study\.batches returned None; allowed: pairs \(inputs, targets\)"),
        ([BATCH, None, BATCH], r"Study\.batches gave a NoneType; allowed: pairs \(inputs, targets\)"),
        ([], "the study gave no batches in epoch 3"),
    ],
)
def test_what_is_no_batch_ends_no_epoch(given: Any, says: str) -> None:
    study = ToyStudy(lambda n: nn.Linear(2, 1))
    study.data = given
    with pytest.raises(FuseError, match=says):
        list(rounds(study, [Reader(0, {}, 3)]))


class Noted(ToyStudy):
    """Notes when each epoch's batches are read."""

    def __init__(self, examples: int) -> None:
        super().__init__(lambda n: nn.Linear(2, 1))
        self.examples, self.read = examples, list[tuple[int, int]]()

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Twenty, each of which says which it is."""
        for at in range(20):
            self.read.append((epoch, at))
            yield torch.full((self.examples, 2), 100.0 * epoch + at), torch.zeros(self.examples)


def mark_of(study: Noted, epoch: int, at: int) -> str:
    """The mark of an epoch's batches up to that one, read one by one."""
    seen = BatchesSeen()
    for each in islice(study.batches(epoch), at + 1):
        seen.add(each)
    return seen.mark


@pytest.mark.parametrize("accumulate", [1, 3])
def test_small_batches_of_several_epochs_are_read_ahead_and_each_comes_in_its_turn_with_its_mark(
    accumulate: int,
) -> None:
    study, marks = Noted(4), dict[int, str]()
    study.accumulate = accumulate
    for step, found in enumerate(rounds(study, [Reader(0, {}, 2), Reader(1, {}, 7)], marks=marks)):
        read_before = len(study.read)
        for number, epoch in ((0, 2), (1, 7)):
            last = min(accumulate * (step + 1), 20) - 1
            inputs = found[number][0] if accumulate == 1 else found[number][0][-1]
            assert inputs[0, 0] == 100 * epoch + last
            assert marks[number] == mark_of(study, epoch, last)
        del study.read[read_before:]
        if not step:
            assert len(study.read) == 2 * accumulate, "the first alone: nothing is known of their size yet"
    assert study.read.index((7, 2 * accumulate)) > study.read.index((2, 3 * accumulate)), "one epoch at a time"
    assert sorted(study.read) == [(epoch, at) for epoch in (2, 7) for at in range(20)]


@pytest.mark.parametrize(("examples", "epochs"), [(SMALL_BYTES // 4, (2, 7)), (4, (2, 2))])
def test_large_batches_and_those_of_one_epoch_are_read_one_by_one(examples: int, epochs: tuple[int, int]) -> None:
    """The first would take memory, and the second would have to be copied."""
    study = Noted(examples)
    reading = rounds(study, [Reader(number, {}, epoch) for number, epoch in enumerate(epochs)])
    for step in range(1, 8):
        next(reading)
        assert len(study.read) == step * len(set(epochs))


class Annealed(Noted):
    """Its loss reads what is changed in place for each batch."""

    def __init__(self) -> None:
        super().__init__(4)
        self.step = [0]

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for at, batch in enumerate(super().batches(epoch)):
            self.step[0] = at
            yield batch

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean() * self.step[0]


@pytest.mark.parametrize("epochs", [(2, 7), (2, 2)])
def test_what_a_loss_reads_is_as_its_batch_has_left_it(epochs: tuple[int, int]) -> None:
    study = Annealed()
    for step, _ in enumerate(rounds(study, [Reader(number, {}, epoch) for number, epoch in enumerate(epochs)])):
        assert study.step == [step]


class Growing(Noted):
    """Small batches first, as of a loader that sorts by length."""

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for at, batch in enumerate(super().batches(epoch)):
            inputs, targets = batch
            yield (inputs.repeat(SMALL_BYTES, 1), targets.repeat(SMALL_BYTES)) if at > 4 else batch


def test_batches_that_grow_are_read_ahead_no_longer() -> None:
    study = Growing(1)
    for step, _ in enumerate(rounds(study, [Reader(0, {}, 2), Reader(1, {}, 7)])):
        if step >= 9:
            assert len(study.read) == 2 * (step + 1)
