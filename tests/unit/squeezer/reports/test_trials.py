"""Trials are found wherever a storage is."""

import socket
from pathlib import Path
from threading import Timer
from typing import NoReturn

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from ds_hooks.shared.secrets import STORAGE_VARIABLE, hide_password
from squeezer.records.reader import RankRun
from squeezer.records.units import UNIT_DTYPE
from squeezer.reports import trials
from squeezer.reports.trials import trial_figures


@pytest.mark.parametrize("storage", ["sqlite:///{}/my%20%3Fstudies.db", "{}/my%20?study.journal"])
def test_a_path_may_have_signs_that_urls_write_otherwise(storage: str, tmp_path: Path) -> None:
    named = storage.format(tmp_path)
    opened = named if "://" in named else JournalStorage(JournalFileBackend(named))
    optuna.create_study(study_name="s", storage=opened).enqueue_trial({"x": 1})
    records = {"run": [{"config": {"side": {"storage": named, "study_name": "s"}}}]}
    rank = RankRun(rank=0, records=records, units=np.empty(0, UNIT_DTYPE), groups=())
    assert trial_figures(tmp_path, [rank])["waiting"] == 1


def test_without_a_trial_that_keeps_the_constraints_there_is_no_best(tmp_path: Path) -> None:
    named = f"{tmp_path}/study.journal"
    study = optuna.create_study(study_name="s", storage=JournalStorage(JournalFileBackend(named)))
    study.add_trial(optuna.trial.create_trial(value=1.0, system_attrs={"constraints:size": 1.0}))
    records = {"run": [{"config": {"side": {"storage": named, "study_name": "s"}}}]}
    rank = RankRun(rank=0, records=records, units=np.empty(0, UNIT_DTYPE), groups=())
    figures = trial_figures(tmp_path, [rank])
    assert (figures["completed"], figures["best"], figures["problem"]) == (1, None, None)
    study.add_trial(optuna.trial.create_trial(value=2.0, system_attrs={"constraints:size": -1.0}))
    assert trial_figures(tmp_path, [rank])["best"]["number"] == 1


def test_a_server_that_says_nothing_does_not_keep_up_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "ANSWERS_WITHIN_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gives_up = Timer(60.0, silent.close)
        gives_up.start()
        named = f"postgresql+psycopg://user@127.0.0.1:{silent.getsockname()[1]}/studies?sslmode=disable"
        records = {"run": [{"config": {"side": {"storage": named, "study_name": "s"}}}]}
        rank = RankRun(rank=0, records=records, units=np.empty(0, UNIT_DTYPE), groups=())
        assert "no answer within 1 s" in trial_figures(tmp_path, [rank])["problem"]
        gives_up.cancel()


def test_a_problem_is_told_without_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:s3cr3t@host/studies"

    def fails(storage: object) -> NoReturn:
        raise OSError(f"no {storage}")

    monkeypatch.setattr(optuna, "get_all_study_names", fails)
    monkeypatch.setenv(STORAGE_VARIABLE, url)
    records = {"run": [{"config": {"side": {"storage": hide_password(url), "study_name": "s"}}}]}
    rank = RankRun(rank=0, records=records, units=np.empty(0, UNIT_DTYPE), groups=())
    problem = trial_figures(tmp_path, [rank])["problem"]
    assert problem.count("postgresql://me:***@host") == 2 and "s3cr3t" not in problem
