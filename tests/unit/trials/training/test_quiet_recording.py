"""A recording is made while nothing else waits in the stream.

Another thread holds back what is to come of a unit that runs, by events and waits. In a recording they would be a part
of the graph, or end it; and events that were recorded cannot be asked.
"""

from typing import Never

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, ToyStudy, members
from trials.training import cuda_graph, group
from trials.training.cuda_graph import WARM_UP_STEPS
from trials.training.group import TrialGroup


class QueueGate(RecordingGate):
    """Knows whether units may be left that have not ended."""

    is_empty = True

    def enter(self, unit: int) -> None:
        self.is_empty = False
        super().enter(unit)

    def settle(self) -> None:
        self.is_empty = True


class Plain(ToyStudy):
    """Whose loss can be recorded."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def test_no_unit_is_left_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def record(*_: object) -> Never:
        found.append(gate.is_empty)
        raise RuntimeError("no recording today")

    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(group, "can_capture", lambda device: True)
    batch = torch.ones(5, 3), torch.zeros(5, 1)
    study = Plain(lambda n: nn.Linear(3, 1), "adam", [batch])
    gate = QueueGate()
    trained = TrialGroup(study, members(study, range(2)), gate)
    for _ in range(WARM_UP_STEPS + 3):
        trained.train_step(*batch)
    assert found == [True]
