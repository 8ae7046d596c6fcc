"""Studies of many kinds go on in the middle of an epoch, and what a cut may part or lose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from ds_hooks.shared import statuses
from tests.support.fused_and_solo import OPTIMIZERS
from tests.support.interrupted import (
    BATCHES,
    SAMPLES,
    Asked,
    Killed,
    Killing,
    Long,
    assert_all_accounted,
    make_study,
    saved,
    work,
)
from tests.support.side_task_runs import Direct
from trials.gate.base import StopRequested
from trials.search.worker import SearchWorker
from trials.side_task import checkpoints
from trials.training.group import TrialGroup


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


def test_at_a_rung_all_trials_of_a_group_are_saved_or_none(tmp_path: Path) -> None:
    """Else those that resume are apart from each other; the first file's cost is not known before."""
    study = make_study()
    study.rungs = (1,)
    _, _, ended = work(study, tmp_path, Killing(165))
    assert isinstance(ended, Killed) and len(saved(tmp_path)) == Long.trials


@pytest.mark.usefixtures("eager")
def test_a_promoted_trial_goes_on_from_its_file_not_from_its_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in memory as well, as it was when it paused."""
    study = make_study()
    study.search, study.rungs, study.reduction_factor = "asha", (1, 2), 2
    study.trials = 10
    study.make_optimizer = OPTIMIZERS["sgd"]
    step = TrialGroup.train_step
    crowded: list[list[int]] = []

    def short_of_memory(group: TrialGroup, *batch: Any) -> None:
        if not crowded and group.size > 1 and min(group.epochs_done) and group.place > 1:
            crowded.append(group.numbers)
            raise MemoryError
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", short_of_memory)
    worker, reported, _ = work(study, tmp_path)
    assert crowded
    assert_nothing_lost(worker, reported)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("at", [3, 7])
def test_a_file_counts_before_the_search_worker_has_taken_it(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may have to wait for its core, while memory is short here."""
    step, steps = TrialGroup.train_step, 0

    class Lagging(Direct):
        """Leaves the last three requests undone, if any of them is a checkpoint, until it is waited for."""

        def __init__(self, worker: SearchWorker) -> None:
            super().__init__(worker)
            self.waiting: list[dict[str, Any]] = []

        def send(self, **request: Any) -> None:
            self.waiting.append(request)
            while len(self.waiting) > (3 if any("checkpoint" in each for each in self.waiting) else 0):
                super().send(**self.waiting.pop(0))

        def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
            while wait_s and self.waiting:
                super().send(**self.waiting.pop(0))
            return super().answers(wait_s)

    def short_of_memory(group: TrialGroup, *batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            raise MemoryError
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", short_of_memory)
    worker, reported, _ = work(make_study(), tmp_path, line=Lagging)
    assert steps > at
    assert_nothing_lost(worker, reported)


def assert_nothing_lost(worker: SearchWorker, reported: list[statuses.Status]) -> None:
    kept = sum(span.to_epoch - span.from_epoch for span in worker._claims.spans() if span.kept)
    last = [each for each in reported if isinstance(each, statuses.Progress)][-1]
    assert last.work == BATCHES * SAMPLES * kept and not last.lost
