"""Whole studies with promotion: trials pause at rungs, and whoever promotes them, they give what they give alone."""

from collections.abc import Callable, Iterator
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

from ds_hooks.shared import statuses
from ds_hooks.shared.trial_attributes import MILESTONE
from tests.support.accounts import assert_accounts
from tests.support.fused_and_solo import AtOnce
from tests.support.side_task_runs import Direct, Seven, assert_as_alone, expire, make_study
from tests.support.slow_cases import others_slow
from trials.gate.base import OpenGate, StopRequested
from trials.search.choice.paused import is_paused
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task import checkpoints
from trials.side_task.checkpoint_format import load
from trials.side_task.scheduler import Scheduler


class Ending(OpenGate):
    """Raises when it is asked for the given time, counted from 1."""

    def __init__(self, at: int) -> None:
        self.asked, self._at = 0, at

    def enter(self, unit: int) -> None:
        self.asked += 1
        if self.asked == self._at:
            raise StopRequested


def bracket(trials: int = 9, factor: int = 3, rungs: tuple[int, ...] = (1, 2), fused: int = 4) -> Seven:
    """Trial 1 diverges in its first epoch."""
    study = make_study(False)
    study.trials, study.fused, study.rungs, study.epochs = trials, fused, rungs, 4
    study.search, study.reduction_factor = "asha", factor
    return study


def hire(study: Seven, directory: Path | None, name: str = "w", storage: str = "{}/study.journal") -> SearchWorker:
    where = "sqlite:///:memory:" if directory is None else storage.format(directory)
    config = WorkerConfig(storage=where, study_name="s", worker=name, directory=directory)
    return SearchWorker(study, config, AtOnce())


def work(study: Seven, worker: SearchWorker, directory: Path | None, gate: OpenGate | None = None) -> None:
    reported: list[statuses.Status] = []
    Scheduler(study, gate or OpenGate(), Direct(worker), reported.append, directory=directory).run()
    assert isinstance(reported[-1], statuses.Finished)


def assert_ended(worker: SearchWorker, study: Seven) -> list[FrozenTrial]:
    """Each trial has ended where the rule says, with the scores that it has alone."""
    trials = worker._study.get_trials()
    assert len(trials) == study.trials
    assert_as_alone([trial for trial in trials if trial.number != 1], study)
    for trial in trials:
        reached = max(trial.intermediate_values, default=0)
        if trial.number == 1:
            assert trial.state is TrialState.FAIL
        elif reached == study.epochs:
            assert trial.state is TrialState.COMPLETE and trial.value == trial.intermediate_values[reached]
        else:
            assert trial.state is TrialState.PRUNED and reached in study.rungs
            assert trial.value == trial.intermediate_values[reached], "its last score"
    assert any(trial.state is TrialState.COMPLETE for trial in trials)
    for rung in [rung for rung in study.rungs if rung < study.epochs]:
        at = [trial for trial in trials if rung in trial.intermediate_values]
        at.sort(key=lambda trial: trial.intermediate_values[rung], reverse=True)
        above = [trial.number for trial in at if max(trial.intermediate_values) > rung]
        assert above
        assert {trial.number for trial in at[: len(at) // study.reduction_factor]} <= set(above)
    return trials


BRACKETS = (9, 3, (1, 2), 4), (9, 2, (1, 2, 3), 16), (2, 4, (2,), 1), (11, 4, (1, 3), 5), (4, 2, (1, 4), 3)


@pytest.mark.parametrize(
    ("trials", "factor", "rungs", "fused", "kept"),
    others_slow(
        [(*bracket, kept) for bracket in BRACKETS for kept in (True, False)],
        [(*bracket, at % 2 == 0) for at, bracket in enumerate(BRACKETS)],
    ),
)
def test_a_whole_study(
    trials: int, factor: int, rungs: tuple[int, ...], fused: int, kept: bool, tmp_path: Path
) -> None:
    study = bracket(trials, factor, rungs, fused)
    directory = tmp_path if kept else None
    worker = hire(study, directory)
    work(study, worker, directory)
    spans = worker._claims.spans()
    assert_accounts(spans, assert_ended(worker, study))
    assert all(span.kept for span in spans), "nothing is trained twice"
    assert not list(tmp_path.glob("checkpoints/*")), "of trials that have ended"


def test_a_study_of_one_trial_completes_it(tmp_path: Path) -> None:
    study = bracket(trials=1)
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    [trial] = worker._study.get_trials()
    assert trial.state is TrialState.COMPLETE and list(trial.intermediate_values) == [1, 2, 4]


@pytest.mark.parametrize(
    ("rungs", "epochs"), others_slow([((2,), 4), ((2, 3), 4), ((1,), 2)], [((2, 3), 4), ((1,), 2)])
)
def test_trials_that_paused_at_a_rung_that_is_gone_train_on_to_the_next(
    rungs: tuple[int, ...], epochs: int, tmp_path: Path
) -> None:
    study = bracket(rungs=(1, 3) if rungs == (1,) else (1,), factor=2)
    worker = hire(study, tmp_path)
    with pytest.raises(StopRequested):
        work(study, worker, tmp_path, Ending(450))
    worker.stop()
    paused = [trial for trial in worker._study.get_trials() if is_paused(trial)]
    gone = [trial.number for trial in paused if trial.user_attrs[MILESTONE] not in rungs]
    assert gone
    again = bracket(rungs=rungs, factor=2)
    again.epochs = epochs
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path, Ending(5000))
    trials = successor._study.get_trials()
    assert all(trial.state.is_finished() for trial in trials)
    for number in gone:
        values = trials[number].intermediate_values
        assert any(rung in values for rung in (*rungs, epochs) if rung > 1), "it has reached the next"


def test_its_own_worker_takes_a_paused_trial_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(checkpoints, "load", lambda path: read.append(path) or load(path))
    monkeypatch.setattr(checkpoints.Checkpoints, "_read_back", lambda *_: None)  # the first file of all
    study = bracket(fused=16)
    work(study, hire(study, tmp_path), tmp_path)
    assert read == []


def test_more_trials_than_memory_keeps_go_on_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = bracket(trials=12, factor=2, fused=1)
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    assert_accounts(worker._claims.spans(), assert_ended(worker, study))


@pytest.mark.parametrize("at", others_slow(range(20, 800, 60), [320]))
def test_one_that_is_killed_is_taken_up_by_its_successor(at: int, tmp_path: Path) -> None:
    study = bracket()
    first = hire(study, tmp_path)
    try:
        work(study, first, tmp_path, Ending(at))
    except StopRequested:
        pass  # and nothing is released
    again = bracket()
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    assert_accounts(successor._claims.spans(), assert_ended(successor, again))


STORAGES = ["{}/study.journal", "sqlite:///{}/study.db"]


@pytest.mark.parametrize("storage", others_slow(STORAGES, STORAGES[:1]))
def test_two_workers_by_turns_end_the_study_together(storage: str, tmp_path: Path) -> None:
    for turn in range(60):
        study = bracket()
        worker = hire(study, tmp_path, f"worker {turn % 2}", storage)
        try:
            work(study, worker, tmp_path, Ending(180))
            break
        except StopRequested:
            if turn % 3:
                worker.stop()
            else:
                expire(worker, f"worker {turn % 2}")
    else:
        pytest.fail("it does not get on")
    assert turn >= 2
    assert_accounts(worker._claims.spans(), assert_ended(worker, study))


def test_paused_trials_wait_for_the_next_job(tmp_path: Path) -> None:
    study = bracket(trials=4, rungs=(1,))
    worker = hire(study, tmp_path)
    with pytest.raises(StopRequested):
        work(study, worker, tmp_path, Ending(170))
    worker.stop()
    left = worker._study.get_trials()
    assert {trial.state for trial in left} <= {TrialState.WAITING, TrialState.FAIL}
    assert any(map(is_paused, left))
    again = bracket(trials=4, rungs=(1,))
    other = hire(again, tmp_path, "another, in the next job")
    work(again, other, tmp_path)
    assert_accounts(other._claims.spans(), assert_ended(other, again))


class Dying(Direct):
    """The line to a search worker that dies between two writes of a trial that pauses."""

    def __init__(self, worker: SearchWorker, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
        super().__init__(worker)
        self._before, self._patch = before, monkeypatch

    def send(self, **request: Any) -> None:
        storage = self._search._storage
        wait = storage.set_trial_state_values

        def dies(*given: Any, **named: Any) -> None:
            if self._before == "the claim":
                wait(*given, **named)
            raise StopRequested

        if "report" in request and not request["final"]:
            if self._before == "the report":
                raise StopRequested
            self._patch.setattr(storage, "set_trial_state_values", dies)
        super().send(**request)


@pytest.mark.parametrize(
    ("before", "kept"),
    others_slow(
        product(["the report", "waiting", "the claim"], [True, False]),
        [("the report", False), ("waiting", True), ("the claim", True)],
    ),
)
def test_a_worker_that_dies_while_a_trial_pauses(
    before: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = bracket()
    first = hire(study, tmp_path)
    directory = tmp_path if kept else None
    with monkeypatch.context() as patch, pytest.raises(StopRequested):
        Scheduler(study, OpenGate(), Dying(first, patch, before), lambda status: None, directory=directory).run()
    again = bracket()
    successor = hire(again, tmp_path)
    work(again, successor, directory)
    spans = successor._claims.spans()
    assert_accounts(spans, assert_ended(successor, again))
    assert not kept or all(span.kept for span in spans), "nothing is trained twice"


def test_a_full_disk_costs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Iterator[None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    study = bracket(fused=2, trials=10, factor=2)
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    assert_accounts(worker._claims.spans(), assert_ended(worker, study))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {"torn": lambda b: b[: len(b) // 2], "empty": lambda b: b""}


@pytest.mark.parametrize("what", others_slow(DAMAGE, ["torn"]))
def test_a_damaged_checkpoint_costs_only_epochs(what: str, tmp_path: Path) -> None:
    study = bracket()
    worker = hire(study, tmp_path)
    with pytest.raises(StopRequested):
        work(study, worker, tmp_path, Ending(400))
    worker.stop()
    damaged = list(tmp_path.glob("checkpoints/*/*.pt"))
    assert damaged
    for file in damaged:
        file.write_bytes(DAMAGE[what](file.read_bytes()))
    again = bracket()
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    assert_accounts(successor._claims.spans(), assert_ended(successor, again))


def test_what_has_no_number_for_a_score_is_never_promoted(tmp_path: Path) -> None:
    study = bracket(trials=7, factor=2)
    scores = study.score
    study.score = lambda outputs, targets: scores(outputs, targets) * torch.tensor(nan)  # type: ignore[method-assign]
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    trials = worker._study.get_trials()
    assert {trial.state for trial in trials} == {TrialState.PRUNED, TrialState.FAIL}
    assert all(list(trial.intermediate_values) == [1] and trial.value is None for trial in trials if trial.number != 1)


def test_structures_that_differ_and_rungs_that_do_not_mix(tmp_path: Path) -> None:
    study = bracket(trials=10, factor=2)
    make = study.make
    study.make = lambda n: torch.nn.Sequential(make(n), torch.nn.Linear(2, 2 + n % 2).double())
    study.mix_epochs = False
    worker = hire(study, tmp_path)
    work(study, worker, tmp_path)
    assert_accounts(worker._claims.spans(), assert_ended(worker, study))


def test_other_rungs_in_a_later_run(tmp_path: Path) -> None:
    study = bracket(rungs=(1, 2))
    worker = hire(study, tmp_path)
    with pytest.raises(StopRequested):
        work(study, worker, tmp_path, Ending(400))
    worker.stop()
    again = bracket(rungs=(3,))
    successor = hire(again, tmp_path)
    work(again, successor, tmp_path)
    trials = successor._study.get_trials()
    assert len(trials) == again.trials and all(trial.state.is_finished() for trial in trials)
    assert_as_alone([trial for trial in trials if trial.number != 1], again)


@pytest.mark.parametrize("way", ["from the pruner", "to the pruner"])
def test_a_study_that_becomes_another_kind_of_search(way: str, tmp_path: Path) -> None:
    asha, plain = bracket(), bracket()
    plain.search = None
    first, then = (plain, asha) if way == "from the pruner" else (asha, plain)
    worker = hire(first, tmp_path)
    with pytest.raises(StopRequested):
        work(first, worker, tmp_path, Ending(400))
    worker.stop()
    successor = hire(then, tmp_path)
    work(then, successor, tmp_path)
    trials = successor._study.get_trials()
    assert len(trials) == then.trials and all(trial.state.is_finished() for trial in trials)
    assert_as_alone([trial for trial in trials if trial.number != 1], then)
