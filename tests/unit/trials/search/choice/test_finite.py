"""Samplers of finitely many points end a study when they have begun all; errors of samplers and pruners end none."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler, PartialFixedSampler, RandomSampler
from optuna.trial import TrialState
from torch import nn

from ds_hooks.shared import statuses
from ds_hooks.shared.trial_attributes import REASON
from tests.support.fused_and_solo import OPTIMIZERS, AtOnce, ToyStudy
from tests.support.logged import logged
from tests.support.side_task_runs import Direct
from trials.gate.base import OpenGate
from trials.search.choice.finite import innermost
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.scheduler import Scheduler

pytestmark = pytest.mark.filterwarnings("ignore:.*Sampler is experimental")

GRID: dict[str, list[Any]] = {"a": [0, 1, 2], "b": ["x", "y"]}


class Points(ToyStudy):
    """Chooses one of six points, at most three at once, of which far more trials are wanted."""

    trials, fused, epochs, rungs = 40, 3, 2, (1,)

    def __init__(self, sampler: Callable[[], BaseSampler]) -> None:
        super().__init__(lambda n: nn.Linear(2, 1), OPTIMIZERS["sgd"], [(torch.ones(2, 2), torch.zeros(2))])
        self.make_sampler = sampler

    def sampler(self) -> BaseSampler:
        return self.make_sampler()

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.NopPruner()

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        a, b = trial.suggest_int("a", 0, 2), trial.suggest_categorical("b", ["x", "y"])
        return {"n": a, "b": b}


SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "grid": lambda: GridSampler(GRID, seed=1),
    "brute force": lambda: BruteForceSampler(seed=1),
    "grid in others": lambda: PartialFixedSampler({}, PartialFixedSampler({}, GridSampler(GRID, seed=1))),
}

Hire = Callable[..., SearchWorker]


@pytest.fixture
def hire(tmp_path: Path) -> Hire:
    """A search worker of that name for a study of the test's only storage."""

    def worker(study: Points, name: str = "me", holder: Executor | None = None) -> SearchWorker:
        storage = str(tmp_path / "study.journal")
        config = WorkerConfig(storage=storage, study_name="s", worker=name, directory=tmp_path)
        return SearchWorker(study, config, holder or AtOnce())

    return worker


@pytest.fixture(params=SAMPLERS)
def study(request: pytest.FixtureRequest) -> Points:
    return Points(SAMPLERS[request.param])


def points(worker: SearchWorker) -> list[tuple[Any, ...]]:
    return sorted(tuple(trial.params.values()) for trial in worker._study.get_trials())


ALL = sorted((a, b) for a in GRID["a"] for b in GRID["b"])


def train(study: Points, worker: SearchWorker) -> list[statuses.Status]:
    told: list[statuses.Status] = []
    Scheduler(study, OpenGate(), Direct(worker), told.append).run()
    return told


def test_each_point_is_trained_once_though_more_trials_are_wanted(study: Points, hire: Hire) -> None:
    worker = hire(study)
    assert isinstance(train(study, worker)[-1], statuses.Finished)
    assert points(worker) == ALL
    assert {trial.state for trial in worker._study.get_trials()} == {TrialState.COMPLETE}
    again = hire(study)
    answer = again.ask(3)
    assert not answer["trials"] and answer["exhausted"] and answer["over"], "also when it is done and started again"


def test_fewer_trials_than_points_are_as_many_as_wanted(study: Points, hire: Hire) -> None:
    study.trials = 4
    worker = hire(study)
    train(study, worker)
    assert len(set(points(worker))) == 4


def test_two_workers_share_the_points(study: Points, hire: Hire) -> None:
    one, other = hire(study, "one"), hire(study, "other")
    assert [len(worker.ask(2)["trials"]) for worker in (one, other)] == [2, 2]
    last = one.ask(9)
    assert len(last["trials"]) == 2 and last["exhausted"]
    assert other.ask(1) == {"trials": [], "exhausted": True, "over": False, "bar": None}
    assert points(one) == ALL


def test_a_restart_in_the_middle_takes_up_what_was_left(study: Points, hire: Hire) -> None:
    first = hire(study)
    number = first.ask(4)["trials"][0]["number"]
    first.report(number, 2, 0.5, True)
    again = hire(study)
    answer = again.ask(9)
    assert len(answer["trials"]) == 5 and answer["exhausted"]
    assert points(again) == ALL


def test_a_restart_while_a_trial_was_suggested_repeats_no_point(study: Points, hire: Hire) -> None:
    first = hire(study)
    first.ask(2)
    first._lock.alone(lambda held: first._next.claim(held, 1, may_begin=True))  # killed before it was suggested
    again = hire(study)
    assert len(again.ask(9)["trials"]) == 6
    assert points(again) == ALL


def test_enqueued_trials_are_trained_too(study: Points, hire: Hire) -> None:
    worker = hire(study)
    worker._study.enqueue_trial({"a": 2, "b": "y"})
    assert isinstance(train(study, worker)[-1], statuses.Finished)
    assert set(points(worker)) == set(ALL)
    assert {trial.state for trial in worker._study.get_trials()} == {TrialState.COMPLETE}


def test_an_enqueued_point_may_have_a_part_of_the_parameters(study: Points, hire: Hire) -> None:
    """Optuna's grid gives it none of the others, so it fails, and that costs no point."""
    worker = hire(study)
    for point in ({"a": 2}, {"b": "y"}):
        worker._study.enqueue_trial(point)
    assert isinstance(train(study, worker)[-1], statuses.Finished)
    whole = [tuple(trial.params.values()) for trial in worker._study.get_trials(states=(TrialState.COMPLETE,))]
    assert set(whole) == set(ALL)
    is_grid = isinstance(innermost(study.make_sampler()), GridSampler)
    refused = [reason for reason in reasons(worker) if reason is not None]
    assert len(refused) == 2 * is_grid and all("All parameters must be specified" in reason for reason in refused)


def test_another_grid_in_the_same_storage_is_begun_anew(hire: Hire) -> None:
    study = Points(lambda: GridSampler({"a": [0, 1], "b": ["x"]}))
    train(study, hire(study))
    study = Points(SAMPLERS["grid"])
    worker = hire(study)
    train(study, worker)
    assert set(points(worker)) == set(ALL)


def test_a_space_that_depends_on_its_own_choices(hire: Hire) -> None:
    class Nested(Points):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            n = trial.suggest_int("n", 0, 2)
            return {"n": n, "m": trial.suggest_int(f"m{n}", 0, n)}

    study = Nested(SAMPLERS["brute force"])
    worker = hire(study)
    train(study, worker)
    assert points(worker) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("caller", ["suggest", "pruner", "sampler"])
def test_whoever_stops_optunas_study_ends_the_search(caller: str, hire: Hire) -> None:
    class Stops(RandomSampler):
        def after_trial(self, study: optuna.Study, trial: Any, *rest: Any) -> None:
            if caller == "sampler" and trial.number == 1:
                study.stop()

    class Pruner(optuna.pruners.NopPruner):
        def prune(self, study: optuna.Study, trial: Any) -> bool:
            if caller == "pruner":
                study.stop()
            return False

    class Ends(Points):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            if caller == "suggest":
                trial.study.stop()
            return super().suggest(trial)

        def pruner(self) -> optuna.pruners.BasePruner:
            return Pruner()

    study = Ends(Stops)
    worker = hire(study)
    assert isinstance(train(study, worker)[-1], statuses.Finished)
    states = [trial.state for trial in worker._study.get_trials()]
    assert set(states) == {TrialState.COMPLETE} and 3 <= len(states) < 12


def test_a_point_that_cannot_be_suggested_fails_and_blocks_nobody(study: Points, hire: Hire) -> None:
    class Picky(Points):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            if super().suggest(trial) == {"n": 1, "b": "x"}:
                raise ValueError("no")
            return {}

    worker = hire(Picky(study.make_sampler), holder=OneAtATime())
    answer = worker.ask(9)
    assert len(answer["trials"]) == 5 and answer["exhausted"]
    assert [reason.startswith("suggest: ValueError: no") for reason in reasons(worker) if reason] == [True]


class OneAtATime(AtOnce):
    """As the search worker's one thread for work under a lock: what it does cannot wait for more of its own work."""

    busy = False

    def submit(self, do: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        assert not self.busy, "it would wait for itself"
        self.busy = True
        try:
            return super().submit(do, *args, **kwargs)
        finally:
            self.busy = False


def reasons(worker: SearchWorker) -> list[str | None]:
    return [trial.user_attrs.get(REASON) for trial in worker._study.get_trials()]


@pytest.mark.parametrize("method", ["before_trial", "infer_relative_search_space", "sample_independent"])
def test_a_sampler_that_raises_fails_that_trial(method: str, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Points(lambda: RandomSampler(seed=0))
    study.trials = 4
    plain = getattr(RandomSampler, method)

    def sometimes(self: RandomSampler, study: optuna.Study, trial: Any, *rest: Any) -> Any:
        if trial.number == 1:
            raise KeyError("no")
        return plain(self, study, trial, *rest)

    monkeypatch.setattr(RandomSampler, method, sometimes)
    worker = hire(study)
    train(study, worker)
    line = sometimes.__code__.co_firstlineno + 2
    assert reasons(worker) == [None, f"suggest: KeyError: 'no' (test_finite.py, line {line})", None, None]
    states = [trial.state for trial in worker._study.get_trials()]
    assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_a_sampler_that_raises_after_a_trial_is_logged(
    kind: type[BaseException], hire: Hire, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise kind("no")

    monkeypatch.setattr(RandomSampler, "after_trial", broken)
    study = Points(RandomSampler)
    study.trials = 2
    worker = hire(study)
    with logged():
        train(study, worker)
    assert {trial.state for trial in worker._study.get_trials()} == {TrialState.COMPLETE}
    assert capsys.readouterr().err.count("the sampler failed after trial") == 2


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_pruner_that_raises_fails_that_trial(kind: type[BaseException], hire: Hire) -> None:
    class Broken(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: Any) -> bool:
            if trial.number == 1:
                raise kind("no")
            return False

    study = Points(RandomSampler)
    study.trials, study.pruner = 3, Broken  # type: ignore[method-assign]
    worker = hire(study)
    train(study, worker)
    assert reasons(worker) == [None, f"pruner: {kind.__name__}: no", None]


def test_a_point_that_cannot_be_suggested_fails(study: Points, hire: Hire) -> None:
    class Refuses(Points):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            found = super().suggest(trial)
            if found == {"n": 1, "b": "x"}:
                raise ValueError("no")
            if found == {"n": 2, "b": "y"}:
                raise optuna.TrialPruned
            return found

    worker = hire(Refuses(study.make_sampler))
    train(study, worker)
    assert points(worker) == ALL
    states = {tuple(trial.params.values()): trial.state for trial in worker._study.get_trials()}
    assert states.pop((1, "x")) is TrialState.FAIL and states.pop((2, "y")) is TrialState.PRUNED
    assert set(states.values()) == {TrialState.COMPLETE}


def test_a_trial_that_suggest_prunes_is_pruned(hire: Hire) -> None:
    class Picky(Points):
        trials = 3

        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            if trial.number == 1:
                raise optuna.TrialPruned
            return super().suggest(trial)

    study = Picky(RandomSampler)
    worker = hire(study)
    train(study, worker)
    states = [trial.state for trial in worker._study.get_trials()]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
