"""Checkpoints from the middle of epochs, in an artifact store that hosts share."""

from pathlib import Path
from typing import Any

import pytest
from optuna.artifacts import FileSystemArtifactStore

from trials.search.files.bounded_store import BoundedStore
from trials.search.files.checkpoint_files import commit, found, remove_others, temporary_path, trial_directory
from trials.search.files.shared_store import SharedStore


class Store(FileSystemArtifactStore):
    is_away = False

    def open_reader(self, artifact_id: str) -> Any:
        if self.is_away:
            raise ConnectionError("reset by peer")
        return super().open_reader(artifact_id)


@pytest.fixture
def service(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


def host(service: Store, directory: Path) -> SharedStore:
    return SharedStore(BoundedStore(service), "s", directory)


def save(shared: SharedStore, directory: Path, epoch: int, place: int, fence: int = 1) -> list[str]:
    written = temporary_path(directory, 7, epoch, place)
    written.write_text(f"{epoch} {place}")
    file = commit(written, fence)
    assert file is not None
    names = shared.upload(7, file)
    assert names is not None
    remove_others(file)
    shared.keep(7, names)
    return names


def files(directory: Path) -> list[str]:
    return [file.name for file in found(trial_directory(directory, 7))]


def test_store_and_directory_keep_the_same(service: Store, tmp_path: Path) -> None:
    shared, here = host(service, tmp_path / "here"), tmp_path / "here"
    for epoch, place, kept in (
        (0, 9, ["0_9-1.pt"]),
        (1, 0, ["1-1.pt", "0_9-1.pt"]),
        (1, 5, ["1_5-1.pt", "1-1.pt"]),
        (1, 10, ["1_10-1.pt", "1_5-1.pt", "1-1.pt"]),
        (1, 15, ["1_15-1.pt", "1_10-1.pt", "1-1.pt"]),
        (1, 3, ["1_3-1.pt", "1-1.pt"]),  # it went back
        (2, 0, ["2-1.pt", "1_3-1.pt"]),
    ):
        assert save(shared, here, epoch, place)[::-1] == kept == files(here)
        assert {file.name for file in (tmp_path / "store").iterdir()} == {f"s-7-{name}" for name in kept}


def test_who_has_an_earlier_place_waits_for_the_later_one(service: Store, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    names = save(host(service, here), here, 1, 5)
    other = host(service, there)
    assert other.bring(7, 1, names) and files(there) == ["1_5-1.pt"]
    names = save(other, there, 1, 12, fence=2)
    service.is_away = True
    late = host(service, here)
    assert not late.bring(7, 1, names) and list(late.failed()) == [7]
    service.is_away = False
    assert late.bring(7, 1, names) and files(here)[0] == "1_12-2.pt"
    service.is_away = True
    assert host(service, here).bring(7, 1, names), "all is here"
