"""Someone deletes or edits rows of a study's database while its trials train: its worker says which, and ends."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from tests.support.sandbox import wait_for
from tests.support.simulated import Pretended
from trials.search.client import SearchClient, SearchError
from trials.search.config import WorkerConfig
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker_process import serve

pytestmark = pytest.mark.integration

FIRST = "trial_id = (SELECT min(trial_id) FROM trials)"


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(storage=f"sqlite:///{tmp_path}/study.db", study_name="s", worker="w", directory=tmp_path)


def begin(config: WorkerConfig) -> tuple[SearchClient, list[dict[str, Any]]]:
    """A search worker, and two trials of its."""
    client = SearchClient(partial(serve, Pretended(6), config, attached=lambda: False))
    try:
        client.send(ask=2)
        return client, wait_for(lambda: client.answers(1.0), "trials")[0]["trials"]
    except SearchError:
        client.close()
        raise


@pytest.fixture
def begun(config: WorkerConfig) -> Iterator[SearchClient]:
    client, _ = begin(config)
    yield client
    client.close()


def change(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / "study.db", timeout=60)) as c, c:
        for statement in statements:
            assert c.execute(statement).rowcount != 0, statement


def reports(client: SearchClient, number: int) -> None:
    """Scores of a trial, and a request for another one, until the search worker ends."""
    for epoch in range(1, 4):
        client.send(report=number, epoch=epoch, value=0.5, final=epoch == 3)
        client.send(ask=1)
        client.answers(1.0)
    wait_for(lambda: client.answers(1.0), "its end")


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (f"DELETE FROM trials WHERE {FIRST}", r"^trial 0 of study 's' is no longer in its storage: .*Allowed: "),
        (
            "DELETE FROM trials WHERE trial_id = (SELECT max(trial_id) FROM trials)",
            r"^trial 1 of study 's' is no longer",
        ),
        (f"UPDATE trials SET state = 'ODD' WHERE {FIRST}", r"^trial 0 of study 's' .* no longer be read .*'ODD'"),
        (f"UPDATE trial_user_attributes SET value_json = '{{oops' WHERE {FIRST}", r"^trial 0 .* JSONDecodeError"),
        (f"UPDATE trial_params SET distribution_json = 'oops' WHERE {FIRST}", r"^trial 0 .* JSONDecodeError"),
    ],
)
def test_what_is_wrong_is_said(statement: str, named: str, begun: SearchClient, tmp_path: Path) -> None:
    change(tmp_path, statement)
    with pytest.raises(SearchError, match=named) as caught:
        reports(begun, 0)
    assert caught.value.status == USER_ERROR_STATUS, "to begin again would not help"


def test_a_file_that_is_removed_is_not_waited_for(begun: SearchClient, tmp_path: Path) -> None:
    (tmp_path / "study.db").unlink()
    with pytest.raises(
        SearchError, match=r"^study 's' is no longer in its storage .*: someone has deleted it"
    ) as caught:
        reports(begun, 0)
    assert caught.value.status == USER_ERROR_STATUS


def test_a_missing_table_is_not_waited_for(begun: SearchClient, tmp_path: Path) -> None:
    change(tmp_path, "DROP TABLE trial_intermediate_values")
    with pytest.raises(SearchError, match=r"study\.db cannot be used: .*no such table: trial_intermediate_values"):
        reports(begun, 0)


def test_a_study_without_one_of_its_trials_does_not_begin_again(config: WorkerConfig, tmp_path: Path) -> None:
    """Numbers are places: the second trial's scores would be the third one's."""
    client, _ = begin(config)
    assert client.close()
    change(tmp_path, f"DELETE FROM trials WHERE {FIRST}")
    with pytest.raises(SearchError, match=r"^trial 0 of study 's' is no longer in its storage"):
        client, _ = begin(config)


@pytest.mark.parametrize("storage", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_what_fails_before_there_is_a_study_is_not_taken_for_its_removal(storage: str, tmp_path: Path) -> None:
    def sampler() -> optuna.samplers.BaseSampler:
        raise ImportError("no module named cmaes")

    study = Pretended(6)
    study.sampler = sampler  # type: ignore[method-assign]
    config = WorkerConfig(storage=storage.format(tmp_path), study_name="s", worker="w", directory=tmp_path)
    client = SearchClient(partial(serve, study, config, attached=lambda: False))
    with pytest.raises(SearchError, match="no module named cmaes"):
        wait_for(lambda: client.answers(1.0), "its end")
    client.close()


def test_once_it_is_mended_the_study_goes_on(config: WorkerConfig, begun: SearchClient, tmp_path: Path) -> None:
    change(tmp_path, f"UPDATE trials SET state = 'ODD' WHERE {FIRST}")
    with pytest.raises(SearchError):
        reports(begun, 0)
    change(tmp_path, f"UPDATE trials SET state = 'RUNNING' WHERE {FIRST}")
    client, trials = begin(config)
    assert client.close() and {0, 1} == {trial["number"] for trial in trials}


def test_a_trial_that_someone_lets_wait_ends_all_the_same(config: WorkerConfig, tmp_path: Path) -> None:
    begun, _ = begin(config)
    change(tmp_path, f"UPDATE trials SET state = 'WAITING' WHERE {FIRST}")
    begun.send(report=0, epoch=4, value=0.5, final=True)
    assert begun.close()
    trial = optuna.load_study(study_name="s", storage=open_storage(config.storage)).trials[0]
    assert trial.state is TrialState.COMPLETE and trial.value == 0.5


def test_trials_whose_claims_are_deleted_are_claimed_again(begun: SearchClient, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "claims.db", timeout=60)) as c, c:
        assert c.execute("DELETE FROM squeezer_claim").rowcount == 2
    for number in (0, 1):
        begun.send(report=number, epoch=1, value=0.5, final=False)
    found: set[int] = set()
    while len(found) < 6:
        begun.send(ask=6, here=[])
        for answer in wait_for(lambda: begun.answers(1.0), "an answer"):
            found |= {trial["number"] for trial in answer.get("trials", ())}
    assert found == set(range(6))
