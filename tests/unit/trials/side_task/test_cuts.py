"""Studies of many kinds go on in the middle of an epoch, and what a cut may part or lose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from tests.support.interrupted import (
    Asked,
    assert_all_accounted,
    make_study,
    saved,
    work,
)
from trials.gate.base import StopRequested
from trials.side_task import checkpoints


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are saved after every step."""
    monkeypatch.setattr(checkpoints, "PERIOD_S", 0.0)
    for cost in ("MOST_COST", "MOST_COST_WITHIN", "MOST_COST_AT_RUNGS"):
        monkeypatch.setattr(checkpoints, cost, float("inf"))


@pytest.mark.usefixtures("eager")
def test_what_cannot_be_saved_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.factor = lambda step: 0.9**step  # no file can hold it
            super().__init__(optimizer)

        def get_lr(self) -> list[Any]:
            return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    study = make_study()
    study.schedule = lambda n, optimizer: Own(optimizer)
    worker, _, ended = work(study, tmp_path, Asked(100))
    assert isinstance(ended, StopRequested) and not any(saved(tmp_path).values())
    assert caplog.text.count("trials are not saved") == 1 and "lambda" in caplog.text
    worker, _, _ = work(study, tmp_path)
    assert_all_accounted(worker)
