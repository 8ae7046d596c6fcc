"""A group that is audited, beside its trials alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.fused_and_solo import Batch, Solo, ToyStudy, assert_same_trial, close, members
from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit, Mismatch


def data(count: int = 3, kind: torch.dtype = torch.float64) -> list[Batch]:
    stream = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=stream).to(kind), torch.zeros(6)) for _ in range(count)]


class Audited:
    """A group that is audited, and its trials alone."""

    def __init__(self, make: Callable[[int], nn.Module], optimizer: Any = "adamw", size: int = 2) -> None:
        self.study = ToyStudy(lambda n: make(n).double(), optimizer, data())
        self.found: list[Mismatch] = []
        self.audit = Audit(self.study, on_mismatch=self.found.append)
        self.group = TrialGroup(self.study, members(self.study, range(size)), OpenGate(), self.audit)
        self.solos = [Solo(self.study, number) for number in range(size)]

    def train(self, steps: int = 3) -> None:
        for inputs, targets in self.study.data[:steps]:
            self.group.train_step(inputs, targets)
            for solo in self.solos:
                solo.step(inputs, targets)

    def assert_moved(self, way: str, what: str, steps: int = 3) -> None:
        """After training, the trials are trained in `way`, for what the first mismatch names, as if from the start."""
        self.train(steps)
        assert self.found and what in self.found[0].what, self.found
        assert self.audit.way == way
        for row, solo in enumerate(self.solos):
            assert_same_trial(self.group, row, solo)
        close(self.group.evaluate(), [solo.score() for solo in self.solos], "score")


def perceptron(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
