"""Audits leave alone what a study keeps besides tensors: random numbers, batches, and its own attributes."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.audited import data, perceptron
from tests.support.fused_and_solo import Batch, ToyStudy, members, same_bits
from tests.support.states import states
from trials import Study, TrialGroup, build_member
from trials.fusion.autotune import pinned
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit


def drawn(n: int) -> nn.Module:
    """A model whose initial values come from all global random numbers."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[0].weight.data = torch.from_numpy(np.random.randn(5, 4))
    model[1].weight.data = torch.tensor([[random.random() for _ in range(5)] for _ in range(3)])
    return model.double()


class Augmented(ToyStudy):
    """Its batches are drawn from global random numbers."""

    def batches(self, epoch: int) -> Iterator[Batch]:
        for x, y in self.data:
            yield x + torch.randn(4) + float(np.random.randn()) + random.random(), y

    validation = lambda self: self.batches(0)  # noqa: E731


STUDY: dict[str, Any] = {
    "augmented": lambda batches: Augmented(lambda n: perceptron(n).double(), "sgd", batches),
    "drawn models": lambda batches: Augmented(drawn, "sgd", batches),
}


def trained(name: str, audited: bool) -> Any:
    """Return all that training leaves behind."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    study: Study = STUDY[name](data())
    audit = Audit(study) if audited else None
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    for batch in group.batches(0):
        group.unproven = {"training", "evaluation"}
        if audit is not None:
            audit.tables = []  # whatever it costs
        group.train_step(*batch)
        group.evaluate()
    assert audit is None or (audit.done == 6 and not audit.mismatches)
    streams = torch.get_rng_state(), str(random.getstate()), str(np.random.get_state(legacy=False))
    return states(group), streams, list(study.data)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", STUDY)
def test_audits_leave_alone(name: str) -> None:
    with pinned("loop", "batched"):
        assert same_bits(trained(name, audited=True), trained(name, audited=False))


def test_a_trial_is_drawn_from_its_seed_alone() -> None:
    study = ToyStudy(drawn)
    one, other = (build_member(study, 3, {"n": 3}).model.state_dict() for _ in range(2))
    assert same_bits(one, other)
    assert not same_bits(one, build_member(study, 4, {"n": 4}).model.state_dict())
