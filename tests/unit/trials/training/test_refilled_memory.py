"""Loaders that fill the same memory for each batch: batches that are held at once keep their own numbers."""

from collections.abc import Iterator

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import Batch, close
from tests.support.rich_study import RichSolo, RichStudy
from trials import TrialGroup, build_member
from trials.gate.base import OpenGate
from trials.training.inputs.batches import Reader, rounds

TARGETS = torch.zeros(5)


def network(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


class Refilling(RichStudy):
    """One array takes all batches, of all epochs."""

    def __init__(self, by_torch: bool, own: bool = False) -> None:
        super().__init__(network, own=lambda n, epoch: self.filled(10 * n + epoch) if own else None)
        self.memory, self.by_torch = numpy.zeros((5, 4)), by_torch
        self.buffer = torch.zeros(5, 4, dtype=torch.float64)

    def batches(self, epoch: int) -> Iterator[Batch]:
        return self.filled(epoch)

    def filled(self, seed: int) -> Iterator[Batch]:
        for numbers in given(seed):
            if self.by_torch:
                yield self.buffer.copy_(numbers), TARGETS
            else:
                self.memory[:] = numbers.numpy()
                yield torch.from_numpy(self.memory), TARGETS


def given(seed: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 4, dtype=torch.float64, generator=draws) for _ in range(4)]


@pytest.mark.parametrize("by_torch", [False, True])
def test_epochs_that_are_read_side_by_side(by_torch: bool) -> None:
    study = Refilling(by_torch)
    readers = [Reader(0, {"n": 0}, 0), Reader(1, {"n": 1}, 1)]
    for step, found in enumerate(rounds(study, readers)):
        assert torch.equal(found[0][0], given(0)[step])
        assert torch.equal(found[1][0], given(1)[step])


@pytest.mark.parametrize("by_torch", [False, True])
def test_each_trials_own(by_torch: bool) -> None:
    study = Refilling(by_torch, own=True)
    for step, found in enumerate(rounds(study, [Reader(number, {"n": number}, 0) for number in range(3)])):
        for number in range(3):
            assert torch.equal(found[number][0], given(10 * number)[step])


@pytest.mark.parametrize("by_torch", [False, True])
def test_those_of_one_step(by_torch: bool) -> None:
    study, listed = Refilling(by_torch), RichStudy(network, "sgd", [(x, TARGETS) for x in given(0)])
    study.accumulate = listed.accumulate = 2
    group = TrialGroup(study, [build_member(study, number, {"n": number}) for number in range(2)], OpenGate())
    for batch in group.batches(0):
        group.train_step(*batch)
    for row in range(2):
        solo = RichSolo(listed, row)
        solo.epoch()
        for name, value in solo.model.state_dict().items():
            close(group.extract(row)[0][name], value, name)
