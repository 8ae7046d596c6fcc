"""What other workers train is read when its claim changes, and not with every look at a study in a database."""

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.side_task_runs import expire
from trials.search.cached_storage import CachedStorage
from trials.search.worker import SearchWorker, WorkerConfig


class Many(ToyStudy):
    trials, epochs, rungs = 40, 4, (1, 2)
    prunes: BasePruner | None = None

    def __init__(self) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0, 1)}

    def sampler(self) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler()

    def pruner(self) -> BasePruner | None:
        return self.prunes


def hire(directory: Path, name: str, prunes: BasePruner | None = None) -> SearchWorker:
    study = Many()
    study.prunes = prunes
    storage = f"sqlite:///{directory}/study.db"
    return SearchWorker(
        study, WorkerConfig(storage=storage, study_name="s", worker=name, directory=directory), AtOnce()
    )


def states(worker: SearchWorker) -> list[TrialState]:
    """As the worker sees them at its next claim."""
    found = worker._lock.alone(lambda held: worker._study.get_trials(deepcopy=False))
    return [trial.state for trial in found]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trials each look has read."""
    found: list[int] = []
    read = optuna.storages.RDBStorage._get_trials

    def counted(*arguments: Any) -> list[FrozenTrial]:
        trials: list[FrozenTrial] = read(*arguments)
        found.append(len(trials))
        return trials

    def called(self: Any, study_id: int, states: Any, included_trial_ids: Any, trial_id_greater_than: int) -> Any:
        return counted(self, study_id, states, included_trial_ids, trial_id_greater_than)

    monkeypatch.setattr(optuna.storages.RDBStorage, "_get_trials", called)
    return found


def test_what_trains_elsewhere_is_read_once(tmp_path: Path, rows: list[int]) -> None:
    one, other = hire(tmp_path, "one"), hire(tmp_path, "other")
    assert len(one.ask(20)["trials"]) == 20
    rows.clear()
    for _ in range(3):
        assert states(other) == [TrialState.RUNNING] * 20
    assert rows == [20, 0, 0]
    one.report(3, 1, 0.5, False)
    one.report(4, 4, 0.5, True)
    one.fail(5, "for a test")
    rows.clear()
    seen = states(other)
    assert sum(rows) == 2 and seen[3:6] == [TrialState.RUNNING, TrialState.COMPLETE, TrialState.FAIL]


def test_trials_of_a_dead_worker_are_seen_whoever_takes_them(tmp_path: Path) -> None:
    one, other, third = (hire(tmp_path, name) for name in ("one", "other", "third"))
    one.ask(3)
    assert states(other) == states(third) == [TrialState.RUNNING] * 3
    expire(other, "one")
    assert states(third) == states(other) == [TrialState.WAITING] * 3
    assert [trial["number"] for trial in other.ask(2)["trials"]] == [0, 1]
    expire(third, "other")
    assert [trial["number"] for trial in third.ask(3)["trials"]] == [0], "one at a time, on their last try"
    third.fail(0, "for a test")
    assert [trial["number"] for trial in third.ask(3)["trials"]] == [1]
    third.fail(1, "for a test")
    assert [trial["number"] for trial in third.ask(1)["trials"]] == [2]
    assert states(other) == [TrialState.FAIL] * 2 + [TrialState.RUNNING]


def test_a_trial_that_ended_in_the_study_before_its_worker_died_is_not_trained_again(tmp_path: Path) -> None:
    one, other = hire(tmp_path, "one"), hire(tmp_path, "other")
    one.ask(2)
    assert states(other) == [TrialState.RUNNING] * 2
    one.report(0, 1, 0.5, False)
    one.note({0: 4})
    one.renew()
    one._study.tell(0, 0.5)  # killed before it wrote so to the claims
    other._lock.alone(lambda held: other._released(held, held.release("one", died=True, ended=other._ended_after)))
    assert states(other) == [TrialState.COMPLETE, TrialState.WAITING]
    assert [(span.from_epoch, span.to_epoch) for span in other._claims.spans() if span.kept] == [(0, 1)]


@pytest.mark.parametrize(
    ("prunes", "is_kept"),
    [
        (None, True),
        (MedianPruner(), True),
        (NopPruner(), True),
        (SuccessiveHalvingPruner(), False),  # these compare with the scores of trials that train
        (HyperbandPruner(), False),
    ],
)
def test_pruners_that_look_at_what_trains_see_it(prunes: BasePruner | None, is_kept: bool, tmp_path: Path) -> None:
    one, other = hire(tmp_path, "one", prunes), hire(tmp_path, "other", prunes)
    one.ask(1)
    states(other)
    one.report(0, 1, 0.5, False)
    assert isinstance(other._storage, CachedStorage) is is_kept
    seen = other._study.get_trials(deepcopy=False)[0].intermediate_values
    assert seen == ({} if is_kept else {1: 0.5})


def test_a_new_trial_is_read_for_its_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time costs six statements."""
    worker, read = hire(tmp_path, "one"), list[int]()
    get_trial = optuna.storages.RDBStorage.get_trial
    monkeypatch.setattr(
        optuna.storages.RDBStorage, "get_trial", lambda self, number: read.append(number) or get_trial(self, number)
    )
    (trial,) = worker.ask(1)["trials"]
    for epoch in (1, 2, 3):
        worker.report(trial["number"], epoch, 0.5, False)
    assert read == []
    worker.report(trial["number"], 4, 0.5, True)
    assert len(read) == 1
