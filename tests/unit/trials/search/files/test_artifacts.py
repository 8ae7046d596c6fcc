"""The best weights in an artifact store: once, when the study is over, and whatever the store does."""

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.artifacts import FileSystemArtifactStore, download_artifact, get_all_artifact_meta
from torch import nn

from tests.support.fused_and_solo import AtOnce, ToyStudy
from trials.search.files import checkpoint_files
from trials.search.files.artifacts import ARTIFACTS
from trials.search.worker import SearchWorker, WorkerConfig


class Stored(ToyStudy):
    trials, epochs, keep_best = 3, 1, 2

    def __init__(self, store: Any) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)
        self._store = store

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0, 1)}

    def artifact_store(self) -> Any:
        return self._store


def hire(study: Stored, folder: Path, name: str = "w") -> SearchWorker:
    config = WorkerConfig(storage=f"{folder}/study.journal", study_name="s", worker=name, directory=folder)
    return SearchWorker(study, config, AtOnce())


def train(worker: SearchWorker, folder: Path, trials: int) -> None:
    """Complete so many trials, which score their numbers."""
    for trial in worker.ask(trials)["trials"]:
        number = trial["number"]
        weights = checkpoint_files.temporary_weights_path(folder, number)
        weights.write_text(f"of {number}")
        worker.report(number, 1, float(number), True, weights=str(weights))


def uploaded(worker: SearchWorker, store: FileSystemArtifactStore, folder: Path) -> dict[str, str]:
    """The contents of the artifacts of the study, by file name."""
    found = {}
    for meta in get_all_artifact_meta(worker._study):
        file = folder / meta.artifact_id
        download_artifact(artifact_store=store, file_path=str(file), artifact_id=meta.artifact_id)
        found[meta.filename] = file.read_text()
    return found


def test_the_best_are_uploaded_once_when_the_study_is_over(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = FileSystemArtifactStore(tmp_path / "store")
    study = Stored(store)
    worker = hire(study, tmp_path)
    train(worker, tmp_path, 2)
    worker.stop()
    assert uploaded(worker, store, tmp_path) == {}, "a trial is left"
    worker, other = hire(study, tmp_path), hire(study, tmp_path, "other")
    train(worker, tmp_path, 1)
    for each in (worker, other):
        assert each.ask(1)["over"]
        each.stop()
    found = uploaded(worker, store, tmp_path)
    assert found.pop("best.json").count("number") == 2
    assert found == {"trial-2.pt": "of 2", "trial-1.pt": "of 1"}
    assert len(list((tmp_path / "store").iterdir())) == 3, "the other worker uploads nothing"
    assert set(worker._study.user_attrs[ARTIFACTS]["files"]) == {"best.json", "trial-1.pt", "trial-2.pt"}


def test_a_store_that_fails_is_named_and_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = Stored(FileSystemArtifactStore(tmp_path / "missing"))
    worker = hire(study, tmp_path)
    train(worker, tmp_path, 3)
    assert worker.ask(1)["over"]
    worker.stop()
    assert "the best weights are not in the artifact store: FileNotFoundError" in caplog.text
    assert ARTIFACTS not in worker._study.user_attrs
    assert (tmp_path / "best" / "trial-2.pt").exists()
