"""Whole studies with Optuna's samplers and pruners, and with several objectives."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna import pruners, samplers
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor

from ds_hooks.shared import statuses
from ds_hooks.shared.trial_attributes import HISTORY, REASON
from tests.support.fused_and_solo import AtOnce, close
from tests.support.rich_study import RichSolo
from tests.support.side_task_runs import Direct, Seven, assert_as_alone, make_study
from tests.support.slow_cases import others_slow
from trials.best_trials import best_trials, describe
from trials.fusion.errors import FuseError
from trials.gate.base import OpenGate
from trials.search.files.checkpoint_files import weights_path
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.scheduler import Scheduler
from trials.study_error import StudyError
from trials.training.scores.objectives import scores_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def small(trials: int = 9) -> Seven:
    """Like `make_study`, but no trial diverges."""
    study = make_study(False)
    plain = study.make_optimizer
    study.make_optimizer = lambda n, parameters: plain(n + (n == 1), parameters)
    study.trials, study.epochs, study.rungs = trials, 4, (1, 2)
    study.pruner = lambda: None  # type: ignore[method-assign]
    return study


def searched(study: Seven, directory: Path) -> tuple[SearchWorker, list[FrozenTrial]]:
    """Run it to its end."""
    storage = f"{directory}/study.journal"
    config = WorkerConfig(storage=storage, study_name="s", worker="me", directory=directory)
    worker = SearchWorker(study, config, AtOnce())
    reported: list[statuses.Status] = []
    Scheduler(study, OpenGate(), Direct(worker), reported.append, directory=directory).run()
    assert isinstance(reported[-1], statuses.Finished)
    mismatches = [status for status in reported if isinstance(status, statuses.Mismatched)]
    assert not mismatches
    return worker, worker._study.get_trials()


PRUNERS: dict[str, Callable[[], pruners.BasePruner | None]] = {
    "the default": lambda: None,
    "median": lambda: pruners.MedianPruner(n_startup_trials=2),
    "successive halving": lambda: pruners.SuccessiveHalvingPruner(reduction_factor=2),
    "hyperband": lambda: pruners.HyperbandPruner(max_resource=4, reduction_factor=2),
    "none": pruners.NopPruner,
}


@pytest.mark.parametrize("pruner", others_slow(PRUNERS, ["the default", "hyperband", "none"]))
def test_pruners(pruner: str, tmp_path: Path) -> None:
    study = small(trials=16)
    study.pruner = PRUNERS[pruner]  # type: ignore[method-assign]
    _, trials = searched(study, tmp_path)
    assert_as_alone(trials, study)
    pruned = [trial for trial in trials if trial.state is TrialState.PRUNED]
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert bool(pruned) == (pruner != "none")
    assert all(trial.value == trial.intermediate_values[max(trial.intermediate_values)] for trial in pruned)


SAMPLERS: dict[str, Callable[[], samplers.BaseSampler]] = {
    "random": lambda: samplers.RandomSampler(seed=1),
    "TPE": lambda: samplers.TPESampler(seed=1, n_startup_trials=3),
    "GP": lambda: samplers.GPSampler(seed=1, n_startup_trials=3),
    "NSGA-II": lambda: samplers.NSGAIISampler(seed=1, population_size=3),
    "NSGA-III": lambda: samplers.NSGAIIISampler(seed=1, population_size=3),
    "quasi-random": lambda: samplers.QMCSampler(seed=1),
    "CMA-ES": lambda: samplers.CmaEsSampler(seed=1, n_startup_trials=2),
}


def choose(study: Seven, sampler: Callable[[], samplers.BaseSampler]) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1)
        return {"n": trial.number}

    study.suggest = suggest  # type: ignore[method-assign]
    study.sampler = sampler  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("sampler", "search"),
    others_slow(
        [(sampler, search) for sampler in SAMPLERS for search in (None, "asha")],
        [("random", None), ("TPE", "asha"), ("NSGA-II", "asha"), ("CMA-ES", "asha")],
    ),
)
def test_samplers(sampler: str, search: str | None, tmp_path: Path) -> None:
    if sampler == "CMA-ES" and importlib.util.find_spec("cmaes") is None:
        pytest.skip("needs the package cmaes")
    study = small()
    study.search = search
    choose(study, SAMPLERS[sampler])
    _, trials = searched(study, tmp_path)
    assert [trial.user_attrs.get(REASON) for trial in trials] == [None] * study.trials
    assert_as_alone(trials, study)
    drawn = {tuple(trial.params.values()) for trial in trials}
    assert len(drawn) >= study.trials - 2, "a child of NSGA's may be as its parent"


@pytest.mark.parametrize("search", others_slow([None, "asha"], ["asha"]))
def test_a_seeded_random_search_gives_the_same_bits_again(search: str | None, tmp_path: Path) -> None:
    found = []
    for place in (tmp_path / "first", tmp_path / "again"):
        place.mkdir()
        study = small()
        study.search = search
        choose(study, SAMPLERS["random"])
        _, trials = searched(study, place)
        found.append([(trial.params, trial.state, trial.values, trial.intermediate_values) for trial in trials])
    assert found[0] == found[1]


class Two(Seven):
    """Two objectives: the score, and a number of the trial's own."""

    def score(self, outputs: Tensor, targets: Tensor, params: dict[str, Any] | None = None) -> Any:
        number = 0 if params is None else params["n"]
        return outputs.mean(), (number % 3) * 0.5


def several(trials: int = 9) -> Seven:
    study = small(trials)
    study.__class__ = Two
    study.directions, study.rungs = ("maximize", "minimize"), ()
    return study


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is better in a first number that is high, a second that is low, or both, and nowhere worse."""
    return one[0] >= other[0] and one[1] <= other[1] and list(one) != list(other)


FRONTS = ["TPE", "GP", "NSGA-II", "NSGA-III", "random"]


@pytest.mark.parametrize("sampler", FRONTS)
def test_several_objectives(sampler: str, tmp_path: Path) -> None:
    study = several()
    choose(study, SAMPLERS[sampler])
    worker, trials = searched(study, tmp_path)
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    for trial in trials:
        solo = RichSolo(small(), trial.number)  # its schedulers act on the first objective
        for _ in range(study.epochs):
            solo.epoch()
        first, second = trial.values
        close(first, solo.score(), f"trial {trial.number}")
        assert second == (trial.number % 3) * 0.5
        assert trial.user_attrs[HISTORY]["score"] == {"4": trial.values}
    front = {t.number for t in trials if not any(dominates(other.values, t.values) for other in trials)}
    assert {trial.number for trial in worker._study.best_trials} == front
    kept = json.loads((tmp_path / "best" / "best.json").read_text())
    assert {entry["number"]: entry["score"] for entry in kept} == {number: trials[number].values for number in front}
    assert {file.name for file in tmp_path.glob("best/*.pt")} == {f"trial-{number}.pt" for number in front}
    shown = best_trials(f"{tmp_path}/study.journal", "s", tmp_path)
    assert {each.number: (each.score, each.epochs) for each in shown} == {n: (trials[n].values, 4) for n in front}
    first = trials[shown[0].number]
    assert describe(shown[0])[0].startswith(f"trial {first.number}: scores {first.values[0]:.6g}, ")


def test_no_weights_are_kept_of_a_front_that_nobody_wants(tmp_path: Path) -> None:
    study = several()
    study.keep_best, study.directions = 0, ("maximize", "maximize")
    worker, _ = searched(study, tmp_path)
    assert len(worker._study.best_trials) > 1
    assert not list(tmp_path.glob("best/*"))
    shown = best_trials(f"{tmp_path}/study.journal", "s", tmp_path)
    assert {each.number for each in shown} == {trial.number for trial in worker._study.best_trials}


def test_the_best_trial_is_shown_though_its_weights_are_gone(tmp_path: Path) -> None:
    study = small(trials=4)
    study.keep_best = 2
    _, trials = searched(study, tmp_path)
    completed = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    first, second, *_ = sorted(completed, key=lambda trial: trial.value or 0.0, reverse=True)
    weights_path(tmp_path, first.number).unlink()
    shown = best_trials(f"{tmp_path}/study.journal", "s", tmp_path)
    assert [each.number for each in shown] == [first.number, second.number]
    assert shown[0].weights is None and shown[1].weights == weights_path(tmp_path, second.number)


def test_metrics_may_be_the_objectives(tmp_path: Path) -> None:
    class Measured(Seven):
        def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
            return {"high": outputs.max(), "size": outputs.numel(), "low": outputs.min()}

    study = small(trials=4)
    study.__class__ = Measured
    study.directions, study.rungs, study.metric = ("maximize", "maximize"), (), ("low", "high")
    _, trials = searched(study, tmp_path)
    assert len(trials) == study.trials
    for trial in trials:
        metrics = trial.user_attrs[HISTORY]["metrics"]["4"]
        assert trial.values == [metrics["low"], metrics["high"]]


@pytest.mark.parametrize("given", [1.0, (1.0,), (1.0, 2.0, 3.0), torch.zeros(2)])
def test_a_score_of_another_number_of_objectives_is_named(given: Any) -> None:
    with pytest.raises(Exception, match=r"Study\.score returned .*; allowed: a tuple of 2, one for each"):
        scores_of(several(), given)


@pytest.mark.parametrize("given", [(1.0, None), (torch.ones(()), "much")])
def test_a_score_that_is_no_number_is_named(given: Any) -> None:
    with pytest.raises(
        FuseError, match=rf"Study\.score returned {given[1]!r} as objective 1; allowed: a scalar tensor"
    ):
        scores_of(several(), given)


def test_constraints_on_hyperparameters_are_set_in_suggest(tmp_path: Path) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        trial.set_constraint("small", trial.suggest_float("x", 0, 1) - 0.5)
        return {"n": trial.number}

    study = several(trials=12)
    choose(study, SAMPLERS["TPE"])
    study.suggest = suggest  # type: ignore[method-assign]
    worker, trials = searched(study, tmp_path)
    assert {trial.params["x"] <= 0.5 for trial in trials} == {True, False}
    assert all(trial.params["x"] <= 0.5 for trial in worker._study.best_trials), "the front is of feasible ones"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_constraints_see_what_a_trial_has_measured(tmp_path: Path) -> None:
    def limit(trial: FrozenTrial) -> Sequence[float]:
        return (trial.user_attrs[HISTORY]["score"]["4"][1] - 0.6,)

    study = several()
    choose(study, lambda: samplers.TPESampler(constraints_func=limit, n_startup_trials=3))
    _, trials = searched(study, tmp_path)
    assert [trial.system_attrs["constraints"] for trial in trials] == [
        pytest.approx([(trial.number % 3) * 0.5 - 0.6]) for trial in trials
    ]


def test_cma_es_is_refused_on_a_database_that_others_write_to() -> None:
    study = small()
    study.sampler = samplers.CmaEsSampler  # type: ignore[method-assign]
    config = WorkerConfig(storage="postgresql://nobody@localhost/none", study_name="s", worker="me")
    with pytest.raises(StudyError, match="CmaEsSampler unpickles what is in a database"):
        SearchWorker(study, config, AtOnce())
