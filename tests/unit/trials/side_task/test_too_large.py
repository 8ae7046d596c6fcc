"""Side tasks of different memory share a study: what does not fit at one is trained at the other."""

from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from ds_hooks.shared.statuses import Status
from ds_hooks.shared.trial_attributes import REASON, WORKER
from tests.support.fused_and_solo import AtOnce
from tests.support.side_task_runs import Direct, Starving, Widths, assert_as_alone, of_widths
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task import scheduler
from trials.side_task.cohort import TRIES
from trials.side_task.scheduler import Scheduler
from trials.training.group import TrialGroup

LARGE = 9


@pytest.fixture(autouse=True)
def asks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else works meanwhile, so there is nothing to wait for."""
    monkeypatch.setattr(scheduler, "ASK_AGAIN_S", 0.01)


class Idle(Direct):
    """When its side task has nothing to do, the other one has its turn, once."""

    def __init__(self, worker: SearchWorker, other: Scheduler | None) -> None:
        super().__init__(worker)
        self.requests: list[dict[str, Any]] = []
        self._other = other

    def send(self, **request: Any) -> None:
        self.requests.append(request)
        super().send(**request)

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        found = super().answers(wait_s)
        if wait_s and not found and self._other is not None:
            other, self._other = self._other, None
            other.run()
        return found


LITTLE = Starving(())
"""The gate of the side task with little memory."""


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth trial is too large for one of the side tasks."""
    step = TrialGroup.train_step

    def crowded(group: TrialGroup, *batch: Any) -> None:
        if group._gate is LITTLE and group.params[0]["n"] % 4 == 3:
            raise torch.OutOfMemoryError("no more")
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", crowded)


def study_of(trials: int) -> Widths:
    study = of_widths(lambda n: LARGE if n % 4 == 3 else 4)
    study.trials, study.fused = trials, 4
    return study


def side_task(
    name: str, study: Widths, directory: Path, other: Scheduler | None = None
) -> tuple[Scheduler, Idle, SearchWorker, list[Status]]:
    config = WorkerConfig(
        storage=f"{directory}/study.journal", study_name="s", worker=name, directory=directory / "study"
    )
    worker, told = SearchWorker(study, config, AtOnce()), list[Status]()
    line = Idle(worker, other)
    gate = LITTLE if name == "little" else Starving(())
    return Scheduler(study, gate, line, told.append, directory=directory / "study"), line, worker, told


def trained_by(trials: list[FrozenTrial]) -> dict[str, set[int]]:
    return {name: {t.number for t in trials if t.user_attrs[WORKER] == name} for name in ("little", "roomy")}


@pytest.mark.usefixtures("little_memory")
def test_large_trials_end_at_the_side_task_that_can_train_them(tmp_path: Path) -> None:
    study = study_of(12)
    roomy, *_ = side_task("roomy", study, tmp_path)
    little, line, worker, _ = side_task("little", study, tmp_path, roomy)
    little.run()
    trials = worker._study.get_trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 12
    assert trained_by(trials)["roomy"] == {3, 7, 11}
    assert_as_alone(trials[::5], study)
    unfit = [request["unfit"] for request in line.requests if "unfit" in request]
    assert sorted(unfit) == [3, 7, 11], "each is tried or built once"
    ran = [request["trials"] for request in line.requests if "ran" in request]
    assert max(ran[len(ran) // 2 :]) > 1, "the others are fused as before"


@pytest.mark.usefixtures("little_memory")
def test_alone_they_fail_in_todays_words_and_the_rest_is_fused_as_before(tmp_path: Path) -> None:
    study = study_of(12)
    little, _, worker, _ = side_task("little", study, tmp_path)
    little.run()
    trials = worker._study.get_trials()
    assert [t.number for t in trials if t.state is TrialState.FAIL] == [3, 7, 11]
    assert {trials[n].user_attrs[REASON] for n in (3, 7, 11)} == {
        "MemoryError: not even one trial fits into the side task's memory"
    }
    assert {t.state for t in trials if t.number % 4 != 3} == {TrialState.COMPLETE}


@pytest.mark.parametrize(("shortages", "ends"), [(TRIES + 1, TrialState.COMPLETE), (TRIES + 2, TrialState.FAIL)])
def test_memory_that_is_short_for_a_moment_fails_no_trial(
    shortages: int, ends: TrialState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four trials find no memory at once, then two, then one, as often as one may."""
    step, steps = TrialGroup.train_step, count(1)

    def crowded(group: TrialGroup, *batch: Any) -> None:
        if next(steps) <= shortages:
            raise torch.OutOfMemoryError("no more")
        step(group, *batch)

    monkeypatch.setattr(TrialGroup, "train_step", crowded)
    study = of_widths(lambda _: 4)
    study.trials, study.fused = 4, 4
    alone, _, worker, _ = side_task("alone", study, tmp_path)
    alone.run()
    trials = worker._study.get_trials()
    assert {trial.state for trial in trials} == {ends}
    if ends is TrialState.COMPLETE:
        assert_as_alone(trials, study)


def test_a_trial_that_cannot_be_built_for_want_of_memory_is_built_elsewhere(tmp_path: Path) -> None:
    study, poor = study_of(4), study_of(4)
    make = poor.model

    def model(params: dict[str, Any]) -> nn.Module:
        if params["n"] == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
        return make(params)

    poor.model = model  # type: ignore[method-assign]
    roomy, *_ = side_task("roomy", study, tmp_path)
    other, _, worker, _ = side_task("poor", poor, tmp_path, roomy)
    other.run()
    trials = worker._study.get_trials()
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert trials[3].user_attrs[WORKER] == "roomy"


def test_speed_and_structure_are_told_to_the_search_worker(tmp_path: Path) -> None:
    study = study_of(8)
    alone, line, worker, _ = side_task("roomy", study, tmp_path)
    alone.run()
    built = {request["built"]: request["structure"] for request in line.requests if "built" in request}
    large, small = {built[n] for n in (3, 7)}, {built[n] for n in (0, 1, 2, 4, 5, 6)}
    assert len(large) == len(small) == 1 and large != small
    ran = [request for request in line.requests if "ran" in request]
    assert sum(each["trials"] for each in ran) == 8 * study.epochs
    assert sum(each["samples"] for each in ran) == 8 * study.epochs * 3 * 5
    assert all(first["ended_s"] <= then["began_s"] for first, then in pairwise(ran))
    worker.renew()
    with worker._claims.alone() as held:
        speeds = held.fleet().speeds
        assert {structure for structure, _ in speeds} == large | small and min(speeds.values()) > 0
        assert held.known([0, 3]) == {0: (*small, True), 3: (*large, True)}
    account = worker._claims.account()
    assert sum(each.epochs for each in account.minutes) == pytest.approx(8 * study.epochs)
