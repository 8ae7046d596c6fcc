"""Workers whose hosts have an artifact store in common, and no directory; the store can be away."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import optuna
from optuna.artifacts import FileSystemArtifactStore

from tests.support.fused_and_solo import AtOnce
from tests.support.simulated import Pretended
from trials.search.files import checkpoint_files
from trials.search.worker import SearchWorker, WorkerConfig


class Store(FileSystemArtifactStore):
    """One that can be away."""

    def __init__(self, base_path: Path) -> None:
        super().__init__(base_path)
        base_path.mkdir(exist_ok=True)
        self.is_away = False

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        self._fail()
        super().write(artifact_id, content_body)

    def open_reader(self, artifact_id: str) -> BinaryIO:
        self._fail()
        reader: BinaryIO = super().open_reader(artifact_id)
        return reader

    def remove(self, artifact_id: str) -> None:
        self._fail()
        super().remove(artifact_id)

    def _fail(self) -> None:
        if self.is_away:
            raise ConnectionError("no route to host")


class Stored(Pretended):
    keep_best = 2

    def __init__(self, store: Any, trials: int = 4, search: str | None = None) -> None:
        super().__init__(trials)
        self._store, self.search = store, search

    def pruner(self) -> optuna.pruners.BasePruner | None:
        return None if self.promotes else super().pruner()

    def artifact_store(self) -> Any:
        return self._store


def hire(
    database: str, host: Path, store: Any, name: str | None = None, trials: int = 4, search: str | None = None
) -> SearchWorker:
    config = WorkerConfig(storage=database, study_name="s", worker=name or host.name, directory=host)
    return SearchWorker(Stored(store, trials, search), config, AtOnce())


def save(worker: SearchWorker, host: Path, number: int, epoch: int) -> dict[str, Any] | None:
    written = checkpoint_files.temporary_path(host, number, epoch)
    written.write_text(f"trial {number} after {epoch} epochs on {host.name}")
    return worker.checkpoint(number, written)


def saved(host: Path, number: int) -> list[str]:
    """The contents of a trial's checkpoints in a host's directory, the newest first."""
    return [file.read_text() for file in checkpoint_files.found(checkpoint_files.trial_directory(host, number))]


def stored(store: Store) -> list[str]:
    """What is in the store, but for its name."""
    return sorted(name.partition("-")[2] for name in os.listdir(store._base_path) if "-" in name)


def asked(worker: SearchWorker, most: int = 9) -> dict[int, int]:
    """The trials that a worker gets -> from which epoch on."""
    return {trial["number"]: trial.get("epoch", 0) for trial in worker.ask(most)["trials"]}
