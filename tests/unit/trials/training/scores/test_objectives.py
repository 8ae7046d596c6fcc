"""Scores of several objectives."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import Solo, ToyStudy, members
from trials import TrialGroup
from trials.gate.base import OpenGate


class TwoObjectives(ToyStudy):
    directions = ("maximize", "minimize")

    def score(self, outputs: Tensor, targets: Tensor) -> Any:
        dropped = functional.dropout(outputs, 0.4)
        return dropped.mean(), dropped.square().mean()


def test_all_objectives_are_of_one_draw() -> None:
    stream = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, dtype=torch.float64, generator=stream), torch.zeros(4)) for _ in range(2)]
    study = TwoObjectives(lambda n: nn.Linear(3, 5).double(), "sgd", data)
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    found = torch.tensor(group.evaluate())
    for row in range(2):
        solo = Solo(study, row)
        solo.model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            torch.set_rng_state(solo.rng_state)
            scores = [torch.stack(study.score(solo.model(x), y)) for x, y in study.data]
            assert torch.equal(group.export(row).stream, torch.get_rng_state())
        torch.testing.assert_close(found[row].double(), torch.stack(scores).mean(0))
