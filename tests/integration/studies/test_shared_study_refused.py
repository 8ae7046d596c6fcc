"""Storages and studies that cannot be used: an error names what is wrong, and nothing is lost."""

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import BaseSampler, CmaEsSampler, PartialFixedSampler
from optuna.trial import TrialState

from benchmarks.shared.postgres import Server
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from tests.support.fused_and_solo import AtOnce
from tests.support.sandbox import wait_for
from tests.support.simulated import Pretended
from trials.search import worker as worker_module
from trials.search.client import SearchClient, SearchError
from trials.search.storage import claim_tables
from trials.search.storage.database import StorageError, naming
from trials.search.storage.optuna_storage import open_storage
from trials.search.worker import SearchWorker, WorkerConfig
from trials.search.worker_process import serve
from trials.study_error import StudyError

pytestmark = pytest.mark.integration


class Other(Pretended):
    """A study of other parameters; they have the same names."""

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"y": trial.suggest_int("y", 0, 9), "x": trial.suggest_categorical("x", ["a", "b"])}


def configured(storage: str, directory: Path, name: str) -> WorkerConfig:
    return WorkerConfig(storage=storage, study_name="s", worker=name, directory=directory)


def hire(storage: str, directory: Path, study: Pretended | None = None, name: str = "w") -> SearchWorker:
    config = configured(storage, directory, name)
    with naming(storage):
        return SearchWorker(study or Pretended(6), config, AtOnce())


@pytest.fixture(params=["journal", pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def storage_kind(request: pytest.FixtureRequest) -> str:
    """The kinds of storage that a configuration can name; both databases are read by the same code."""
    return str(request.param)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "START_PATIENCE_S", 0.0)
    monkeypatch.setattr(claim_tables, "AGAIN_S", 0.0)


def test_the_same_name_with_another_space_is_refused_before_a_trial_is_created(storage: str, tmp_path: Path) -> None:
    first = hire(storage, tmp_path)
    first.ask(2)
    with pytest.raises(StudyError, match=r"study 's' .* parameter 'x' is FloatDistribution.* Categorical.*study_name"):
        hire(storage, tmp_path, Other(6), "other")
    assert len(first._study.get_trials()) == 2
    assert len(first.ask(9)["trials"]) == 4


@pytest.mark.parametrize("directions", [("minimize",), ("maximize", "minimize")])
def test_the_same_name_with_another_direction_is_refused(
    directions: tuple[str, ...], storage: str, tmp_path: Path
) -> None:
    hire(storage, tmp_path).ask(1)
    other: Any = Pretended(6)
    other.rungs = ()
    if len(directions) == 1:
        other.direction = directions[0]
    else:
        other.directions = directions
    here = ", ".join(directions)
    with pytest.raises(
        StudyError,
        match=f"study 's' has another direction in this storage: maximize there and {here} here; .*study_name",
    ):
        hire(storage, tmp_path, other, "other")


def test_of_two_spaces_that_begin_at_once_one_loses_a_trial_and_ends(storage: str, tmp_path: Path) -> None:
    first, other = hire(storage, tmp_path), hire(storage, tmp_path, Other(6), "other")
    first.ask(1)
    with pytest.raises(StudyError, match="parameter 'x'"):
        other.ask(5)
    other.stop()
    assert sum(trial.state is TrialState.FAIL for trial in first._study.get_trials()) == 1
    assert len(first.ask(9)["trials"]) == 4, "the others are as good as new"


def test_a_range_may_change(storage: str, tmp_path: Path) -> None:
    class Wider(Pretended):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            return {"x": trial.suggest_float("x", -5.0, 5.0)}

    hire(storage, tmp_path).ask(2)
    assert len(hire(storage, tmp_path, Wider(6), "wider").ask(9)["trials"]) == 4


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sampler_that_unpickles_is_refused_where_others_write(wrapped: bool, database: str, tmp_path: Path) -> None:
    class Evolving(Pretended):
        def sampler(self) -> BaseSampler:
            plain = CmaEsSampler(warn_independent_sampling=False)
            return PartialFixedSampler({}, plain) if wrapped else plain

    with pytest.raises(StudyError, match="CmaEsSampler unpickles"):
        hire(database, tmp_path, Evolving(6))
    with pytest.raises(KeyError):
        optuna.load_study(study_name="s", storage=open_storage(database))
    assert hire(str(tmp_path / "journal"), tmp_path, Evolving(6)).ask(1)["trials"]


@pytest.mark.usefixtures("impatient")
def test_a_database_that_does_not_answer_is_named_without_its_password(postgres: Server, tmp_path: Path) -> None:
    url = postgres.url("nothing_of_this_name")
    with pytest.raises(StorageError, match=r'\*\*\*@.*database "nothing_of_this_name" does not exist') as caught:
        hire(url, tmp_path)
    assert postgres.password not in str(caught.value)
    closed = url.replace(str(postgres.port), "1")
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1/.*Connection refused") as caught:
        hire(closed, tmp_path)
    wrong = url.replace(postgres.password, "wrong-secret")
    with pytest.raises(StorageError, match="password authentication failed") as caught:
        hire(wrong, tmp_path)
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.usefixtures("impatient")
def test_a_search_worker_says_so_and_ends(postgres: Server, tmp_path: Path) -> None:
    closed = f"postgresql://me:{postgres.password}@127.0.0.1:{postgres.port}/none"
    client = SearchClient(partial(serve, Pretended(2), configured(closed, tmp_path, "w"), attached=lambda: False))
    with pytest.raises(SearchError, match=r"^the study's storage .* cannot be used") as caught:
        wait_for(lambda: client.answers(1.0), "its end")
    assert not client.close() and postgres.password not in str(caught.value)


def test_its_last_word_is_heard_after_its_end(tmp_path: Path) -> None:
    (tmp_path / "no.journal").write_text("some text\nand more")
    config = configured(str(tmp_path / "no.journal"), tmp_path, "w")
    for say in (lambda client: client.answers(), lambda client: client.send(ask=1)):
        client = SearchClient(partial(serve, Pretended(2), config, attached=lambda: False))
        os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(SearchError, match=r"no\.journal is not Optuna's journal; allowed: .*sqlite:///") as caught:
            say(client)
        assert caught.value.status == 1 and not client.close()
    assert (tmp_path / "no.journal").read_text() == "some text\nand more", "it is someone's"


FOREIGN: dict[str, list[str]] = {
    "our table with other columns": ["CREATE TABLE squeezer_claim (study varchar PRIMARY KEY)"],
    "another's table of Optuna's name": ["CREATE TABLE trials (id integer PRIMARY KEY)"],
    "no rights": ["REVOKE CREATE ON SCHEMA public FROM PUBLIC", "CREATE ROLE reader LOGIN PASSWORD 'reader-secret'"],
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_database_is_named_and_left_alone(kind: str, postgres: Server, tmp_path: Path) -> None:
    with postgres.database() as name:
        for statement in FOREIGN[kind]:
            postgres.execute(statement, name)
        url = postgres.url(name)
        if kind == "no rights":
            url = f"postgresql://reader:reader-secret@127.0.0.1:{postgres.port}/{name}"
        try:
            with pytest.raises(StorageError, match=rf"storage postgresql://\w+:\*\*\*@.*/{name} cannot be used"):
                hire(url, tmp_path)
        finally:
            if kind == "no rights":
                postgres.execute("DROP OWNED BY reader", name)
                postgres.execute("DROP ROLE reader", name)


UNHOLDABLE: dict[str, Callable[[], Any]] = {
    "a set": lambda: {1, 2},
    "a type": lambda: int,
    "bytes": lambda: b"\0",
    "a tensor": lambda: torch.ones(2),
}


def test_a_value_that_json_cannot_hold_is_named(storage: str, tmp_path: Path) -> None:
    odd = dict(zip(range(0, 8, 2), UNHOLDABLE.values(), strict=True))

    class Odd(Pretended):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            params = super().suggest(trial)
            return {**params, "odd": odd[trial.number]()} if trial.number in odd else params

    worker = hire(storage, tmp_path, Odd(8))
    assert [trial["number"] for trial in worker.ask(4)["trials"]] == [1, 3, 5, 7]
    failed = [trial for trial in worker._study.get_trials() if trial.state is TrialState.FAIL]
    assert [trial.number for trial in failed] == [*odd]
    for trial in failed:
        assert "parameter 'odd' = " in trial.user_attrs["squeezer_reason"]
        assert "allowed: numbers, texts" in trial.user_attrs["squeezer_reason"]


def test_a_choice_that_storages_change_is_named_before_anything_is_kept(storage: str, tmp_path: Path) -> None:
    class Pairs(Pretended):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            return {**super().suggest(trial), "betas": trial.suggest_categorical("betas", [None, (0.9, 0.99)])}

    class Names(Pretended):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            return {**super().suggest(trial), "betas": trial.suggest_categorical("betas", ["slow", "fast", None, 1])}

    worker = hire(storage, tmp_path, Pairs(3))
    with pytest.raises(StudyError, match=r"parameter 'betas' has the choice \(0.9, 0.99\), .*; allowed: "):
        worker.ask(2)
    worker.stop()
    assert len(hire(storage, tmp_path, Names(3)).ask(9)["trials"]) == 3


VALUES: tuple[Any, ...] = (float("nan"), float("inf"), -0.0, 2**70, "\0 ü \ud800", None, [], {"a": [1, None]})


def test_other_values_come_back_as_they_were(storage: str, tmp_path: Path) -> None:
    class Odd(Pretended):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            return {"odd": VALUES[trial.number]}

    many = len(VALUES)
    begun = hire(storage, tmp_path, Odd(many)).ask(many)["trials"]
    taken = sorted(hire(storage, tmp_path, Odd(many), "w").ask(many)["trials"], key=lambda trial: trial["number"])
    for value, first, again in zip(VALUES, begun, taken, strict=True):
        assert pickle.dumps(first["params"]) == pickle.dumps({"odd": value})
        assert repr(again["params"]) == repr({"odd": value})


def test_a_study_that_is_deleted_while_it_is_trained_is_named(storage: str, tmp_path: Path) -> None:
    client = SearchClient(partial(serve, Pretended(6), configured(storage, tmp_path, "w"), attached=lambda: False))
    client.send(ask=2)
    (begun,) = wait_for(lambda: client.answers(1.0), "trials")
    optuna.delete_study(study_name="s", storage=open_storage(storage))
    with pytest.raises(SearchError, match=r"^study 's' is no longer in its storage .*; allowed: ") as caught:
        for epoch in range(1, 4):
            client.send(report=begun["trials"][0]["number"], epoch=epoch, value=0.5, final=False)
            client.send(ask=1)
            client.answers(1.0)
        wait_for(lambda: client.answers(1.0), "its end")
    assert caught.value.status == USER_ERROR_STATUS, "to begin again would not help"
    assert not client.close()


def test_a_journal_of_a_later_optuna_is_named_and_left_alone(tmp_path: Path) -> None:
    storage = f"{tmp_path}/study.journal"
    hire(storage, tmp_path).ask(2)
    with open(storage, "a") as file:
        file.write(json.dumps({"op_code": 99, "worker_id": "later", "study_id": 0}) + "\n")
    before = Path(storage).read_bytes()
    with pytest.raises(StorageError, match=r"study\.journal is of another version of Optuna: op_code 99 in line \d+"):
        hire(storage, tmp_path)
    assert Path(storage).read_bytes() == before


def test_a_database_of_a_later_optuna_is_named(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    hire(storage, tmp_path).ask(2)
    with closing(sqlite3.connect(tmp_path / "study.db")) as c:
        c.execute("UPDATE alembic_version SET version_num = 'v9.9.9.a'")
        c.commit()
    with pytest.raises(StorageError, match=r"study\.db is another version of Optuna's: .*upgrade|updating") as caught:
        hire(storage, tmp_path)
    assert "\n" not in str(caught.value)
