"""The studies in which the search's cost is measured: as search workers leave them, in every storage."""

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from benchmarks.search_cost.__main__ import median_with_ci95
from benchmarks.search_cost.ceiling import ceiling
from benchmarks.search_cost.filled import fill
from benchmarks.search_cost.simulated import ASHA, NAME, RANDOM, search_worker, searched, train_one
from benchmarks.search_cost.statements import Statements
from benchmarks.shared.postgres import Server
from trials.search.choice.paused import is_paused
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect

STORAGES = ["{}/study.journal", "sqlite:///{}/study.db"]


def told(trial: FrozenTrial) -> tuple[Any, ...]:
    return trial.state, trial.values, trial.params, trial.intermediate_values, trial.user_attrs


@pytest.mark.parametrize("search", [RANDOM, ASHA])
def test_a_filled_study_is_the_same_in_every_storage_and_can_go_on(search: str, tmp_path: Path) -> None:
    study, filled = searched(search, 100), []
    for index, storage in enumerate(STORAGES):
        directory = tmp_path / str(index)
        directory.mkdir(mode=0o700)
        named = storage.format(directory)
        with search_worker(study, named, directory / "study", "w") as worker:
            for trials in (7, 40):
                fill(study, worker._study, named, directory / "study", trials)
            filled.append([told(trial) for trial in worker._study.get_trials()])
            assert len(worker._claims.spans()) == len(filled[-1]) == 40
            with Statements() as statements:
                assert train_one(study, worker) > 0
            assert 0 < statements.of_claims <= statements.count
            ended = worker._study.get_trials()
            assert all(trial.state.is_finished() or is_paused(trial) for trial in ended)
    assert filled[0] == filled[1]
    states = [state for state, *_ in filled[0]]
    assert states.count(TrialState.COMPLETE) == (20 if search == RANDOM else 2)


def test_the_interval_of_a_median_is_of_its_own_values() -> None:
    assert median_with_ci95([3.0, 1.0, 2.0]) == (2.0, [1.0, 3.0])
    middle, (low, high) = median_with_ci95([float(value) for value in range(101)])
    assert (middle, low, high) == (50.0, 40.0, 61.0)


def test_a_server_takes_the_claims_statements_from_its_own_benchmark(
    postgres: Server, database: str, tmp_path: Path
) -> None:
    if postgres.pgbench is None:
        pytest.skip("there is no pgbench beside the server")
    found = ceiling(postgres.pgbench, database, tmp_path / "study", 2, 1.0)
    claims = Claims(connect(database, tmp_path / "study"), NAME, "reader")
    spans = claims.spans()
    claims.close()
    assert {(span.from_epoch, span.to_epoch, span.kept) for span in spans} == {(0, 10, True)}
    assert len({span.trial for span in spans}) == len(spans) > 1, "each ends once, none fails"
    assert len(spans) == pytest.approx(found["trials_per_s"], rel=0.3), "in about a second"
    assert found["statements_per_s"] == pytest.approx(9 * found["trials_per_s"], rel=0.01)
