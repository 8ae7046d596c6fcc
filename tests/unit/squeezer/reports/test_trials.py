"""Trials are found wherever a storage is."""

from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from squeezer.records.reader import RankRun
from squeezer.records.units import UNIT_DTYPE
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
