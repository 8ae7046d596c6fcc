"""Seeded searches have the same points in any process, for any number of workers, and after a restart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import BaseSampler, GridSampler, NSGAIISampler, PartialFixedSampler, RandomSampler, TPESampler
from torch import nn

from tests.support.fused_and_solo import AtOnce, ToyStudy
from tests.support.side_task_runs import expire
from trials.search.choice.draws import Draws
from trials.search.worker import SearchWorker, WorkerConfig

GRID: dict[str, list[Any]] = {"x": [0.0, 0.25, 0.5, 0.75, 1.0], "k": [1, 2]}

SEEDED: dict[str, Callable[[], BaseSampler]] = {
    "random": lambda: RandomSampler(seed=3),
    "grid": lambda: GridSampler(GRID, seed=3),
    "random within another": lambda: PartialFixedSampler({"k": 1}, RandomSampler(seed=3)),
}


class Drawn(ToyStudy):
    trials = 8

    def __init__(self, sampler: Callable[[], BaseSampler]) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)
        self.make_sampler = sampler

    def sampler(self) -> BaseSampler:
        return self.make_sampler()

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0, 1), "k": trial.suggest_int("k", 1, 2)}


def hire(study: Drawn, directory: Path, name: str = "me") -> SearchWorker:
    directory.mkdir(exist_ok=True)
    config = WorkerConfig(storage=f"{directory}/study.journal", study_name="s", worker=name, directory=directory)
    return SearchWorker(study, config, AtOnce())


def points(worker: SearchWorker) -> list[dict[str, Any]]:
    return [trial.params for trial in worker._study.get_trials()]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("kind", SEEDED)
def test_points_depend_on_the_seed_and_the_number_alone(kind: str, tmp_path: Path) -> None:
    study = Drawn(SEEDED[kind])
    one = hire(study, tmp_path / "alone")
    one.ask(8)
    expected = points(one)
    assert len({tuple(point.items()) for point in expected}) == 8

    shared = [hire(study, tmp_path / "shared", name) for name in ("a", "b", "c")]
    for _ in range(3):
        for worker in shared:
            worker.ask(1)
    assert points(shared[0]) == expected

    stopped = hire(study, tmp_path / "restarted")
    stopped.ask(3)
    stopped.stop()
    again = hire(study, tmp_path / "restarted")
    again._lock.alone(lambda held: again._next.claim(held, 4, may_begin=True))  # killed before the fourth was suggested
    expire(again, "me")
    last = hire(study, tmp_path / "restarted")
    last.ask(9)
    assert points(last) == expected


def test_another_seed_gives_other_points(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1, 2**32 - 1):
        worker = hire(Drawn(lambda seed=seed: RandomSampler(seed=seed)), tmp_path / str(seed))
        worker.ask(2)
        found.append(points(worker))
    assert found[0] != found[1] != found[2] != found[0]


def test_without_a_seed_workers_draw_differently(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        worker = hire(Drawn(RandomSampler), tmp_path / name)
        worker.ask(2)
        found.append(points(worker))
    assert found[0] != found[1]


@pytest.mark.parametrize("sampler", [TPESampler(seed=1), NSGAIISampler(seed=1)])
def test_all_streams_of_a_sampler_are_found(sampler: BaseSampler) -> None:
    draws = Draws(sampler)
    first, second = sampler._rng, sampler._random_sampler._rng
    drawn = []
    for number in (5, 6, 5):
        draws.begin(number)
        drawn.append((first.rng.random(), second.rng.random()))
    assert drawn[0] == drawn[2] != drawn[1]
    assert drawn[0][0] != drawn[0][1]
