"""Before the host reads what a device computes, it sleeps at the gate until that has ended.

A wait in the driver would hold it, unseen, behind a shut gate.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.fused_and_solo import RecordingGate, ToyStudy, members
from trials import TrialGroup
from trials.training import group_state

STEPS_AT_MOST = 3


class Settling(RecordingGate):
    """Writes down where it was waited for."""

    def settle(self) -> None:
        self.entered.append("settle")


@pytest.fixture
def gate() -> Settling:
    return Settling()


@pytest.fixture
def group(gate: Settling, monkeypatch: pytest.MonkeyPatch) -> TrialGroup:
    """One whose trials the device finds lost."""
    monkeypatch.setattr(group_state, "decides_on_device", lambda device: True)
    monkeypatch.setattr(group_state, "STEPS_AT_MOST", STEPS_AT_MOST)
    study = ToyStudy(lambda n: nn.Sequential(nn.Linear(3, 1)), "sgd", [(torch.randn(2, 3), torch.zeros(2))])
    made = TrialGroup(study, members(study, range(2)), gate)
    assert made._control.alive is not None
    return made


def train(group: TrialGroup) -> None:
    for _ in range(STEPS_AT_MOST + 1):
        group.train_step(torch.randn(2, 3), torch.zeros(2))


@pytest.mark.parametrize(
    "act", [train, lambda group: (group.train_step(torch.randn(2, 3), torch.zeros(2)), group.end_epoch())]
)
def test_the_host_learns_which_trials_are_lost_when_all_has_ended(
    act: Callable[[TrialGroup], object], group: TrialGroup, gate: Settling, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, before = group._control.learn, []
    monkeypatch.setattr(group._control, "learn", lambda: (before.append(gate.entered[-1]), learn()))
    act(group)
    assert before == ["settle"]


def test_it_reads_scores_when_all_has_ended(group: TrialGroup, gate: Settling) -> None:
    group.evaluate()
    assert gate.entered[-2:] == ["settle", "rest"]
