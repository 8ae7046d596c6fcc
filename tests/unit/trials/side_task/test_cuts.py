"""Studies of many kinds go on in the middle of an epoch, and what a cut may part or lose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from ds_hooks.shared import statuses
from tests.support.fused_and_solo import OPTIMIZERS, AtOnce, members
from tests.support.interrupted import (
    BATCHES,
    SAMPLES,
    Asked,
    Killed,
    Killing,
    Long,
    assert_all_accounted,
    batches_of,
    make_study,
    saved,
    trained,
    work,
)
from tests.support.side_task_runs import Direct, data
from trials.gate.base import OpenGate, StopRequested
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task import checkpoint_format, checkpoints
from trials.side_task.checkpoints import Checkpoints
from trials.side_task.scheduler import Scheduler
from trials.training.group import TrialGroup
from trials.training.trial_state import TrialState


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


@pytest.mark.usefixtures("eager")
def test_a_trial_that_went_back_is_saved_in_the_middle_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(make_study(), tmp_path, Asked(330))
    assert all("_" in names[0] for names in saved(tmp_path).values())
    step, steps, again = TrialGroup.train_step, 0, make_study()
    others = [(x + 1, y) for x, y in again.batches(2)]

    def short_of_memory(group: TrialGroup, *batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise MemoryError
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", short_of_memory)
    _, reported, _ = work(batches_of(again, lambda epoch: others), tmp_path)
    assert steps > 3 and trained(reported) == BATCHES * SAMPLES * Long.trials, "that epoch once"


@pytest.mark.parametrize("is_within", [False, True])
def test_batches_that_cannot_be_known_again(
    is_within: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Their trials are saved at the ends of epochs only, there in any case."""
    study, gate = make_study(), Asked()
    given = [(x.float().to_sparse(), y) for x, y in data(0, BATCHES)]
    study.make = lambda n: torch.nn.Linear(3, 2)
    study.rungs = ()
    if is_within:
        request.getfixturevalue("eager")

    class Ending(Direct):
        def send(self, **request: Any) -> None:
            super().send(**request)
            if "trained" in request:  # an epoch has ended
                gate._at = gate.asked + (30 if is_within else 0)

    _, _, ended = work(batches_of(study, lambda epoch: given), tmp_path, gate, Ending)
    assert isinstance(ended, StopRequested)
    assert [names[0][:2] for names in saved(tmp_path).values()] == ["1-"] * Long.trials
    assert caplog.text.count("at the ends of epochs only") == is_within


def test_what_files_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second, of which three are at most a 40th of the time in the middle of epochs, and a 20th of all."""
    now_s = 0.0

    def slow(state: TrialState, path: Path) -> None:
        nonlocal now_s
        now_s += 1.0
        checkpoint_format.save(state, path)

    class Deaf(Direct):
        def send(self, **request: Any) -> None:
            pass

    monkeypatch.setattr(checkpoints, "save", slow)
    study = make_study()
    study.epochs, study.rungs = 10, ()
    worker = SearchWorker(study, WorkerConfig(storage="sqlite:///:memory:", study_name="s", worker="w"), AtOnce())
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    written = Checkpoints(study, tmp_path, OpenGate(), Deaf(worker), lambda: now_s)

    def is_saved(at_s: float, *, at_end: bool) -> bool:
        nonlocal now_s
        now_s = at_s
        if at_end:
            group.end_epoch()
            written.epoch_ended(group)
        else:
            group.train_step(*next(iter(study.batches(0))))
            assert written.step_ended(group, lambda number: "known") == (now_s > at_s)
        return now_s > at_s

    written.epoch_begins()
    assert not is_saved(0.0, at_end=False) and is_saved(60.0, at_end=False)  # what it costs is not known before
    assert not is_saved(179.0, at_end=False) and is_saved(181.0, at_end=False)
    assert not is_saved(59.0 + 120.0, at_end=True), "two files of each so far"
    assert is_saved(190.0, at_end=True) and is_saved(251.0, at_end=True)
    group.train_step(*next(iter(study.batches(0))))
    now_s = 1000.0
    written.trained(group.numbers, SAMPLES)
    monkeypatch.setattr(checkpoints, "SAVES_WITHIN_S", 1.5)
    written.save_at_the_end([(group, lambda number: "known")])
    assert now_s == 1002.0, "no third file is begun"


def test_trials_that_pause_in_memory_lose_nothing() -> None:
    study, reported = make_study(), list[statuses.Status]()
    study.search, study.rungs = "asha", (1, 2)
    worker = SearchWorker(study, WorkerConfig(storage="sqlite:///:memory:", study_name="s", worker="w"), AtOnce())
    Scheduler(study, OpenGate(), Direct(worker), reported.append).run()
    assert_nothing_lost(worker, reported)


@pytest.mark.usefixtures("eager")
def test_an_epochs_scores_are_computed_once_and_saving_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, evaluated = TrialGroup.evaluate, 0

    def counted(group: TrialGroup) -> Any:
        nonlocal evaluated
        evaluated += 1
        return evaluate(group)

    monkeypatch.setattr(TrialGroup, "evaluate", counted)
    study = make_study()  # one of its trials has a scheduler that acts on scores
    _, reported, _ = work(study, tmp_path)
    assert evaluated == study.epochs
    found = [each.work for each in reported if isinstance(each, statuses.Progress)]
    assert found[:4] == [0, SAMPLES * Long.trials, 2 * SAMPLES * Long.trials, 3 * SAMPLES * Long.trials]
