"""Workers whose directories differ: no trial goes on without its checkpoints, and none is trained twice."""

import gc
import logging
import uuid
from pathlib import Path

import pytest

from ds_hooks.shared.processes import identity
from tests.support.fused_and_solo import AtOnce
from tests.support.simulated import Pretended
from trials.search.files import checkpoint_files
from trials.search.storage.database import StorageError
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study_error import StudyError

pytestmark = pytest.mark.integration


def hire(storage: str, directory: Path, name: str) -> SearchWorker:
    return SearchWorker(
        Pretended(4), WorkerConfig(storage=storage, study_name="s", worker=name, directory=directory), AtOnce()
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def save(worker: SearchWorker, directory: Path, number: int) -> None:
    written = checkpoint_files.temporary_path(directory, number, 2)
    written.write_bytes(b"of no matter")
    worker.checkpoint(number, written)


def numbers(worker: SearchWorker, most: int = 9) -> list[int]:
    return [trial["number"] for trial in worker.ask(most)["trials"]]


def test_a_trial_goes_on_only_where_its_checkpoints_can_be_seen(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, "one")
    assert numbers(one, 2) == [0, 1]
    save(one, here, 0)
    assert not warnings(caplog)
    other = hire(database, there, "other")
    assert f":{here} cannot be seen from" in caplog.text and "a study_directory that all workers share" in caplog.text
    one.stop()
    assert numbers(other) == [1, 2, 3], "what had not been saved begins anew"
    answer = other.ask(1)
    assert answer["exhausted"] and answer["over"], "there is nothing more that it could do"
    assert len(warnings(caplog)) == 1, "once"
    third = hire(database, here, "third")
    (left,) = third.ask(9)["trials"]
    assert (left["number"], left["epoch"]) == (0, 2)


def test_a_directory_that_is_reached_by_two_ways_is_one(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(database, here, "one")
    assert numbers(one, 1) == [0]
    save(one, here, 0)
    one.stop()
    there.symlink_to(here)
    other = hire(database, there, "other")
    assert other.ask(1)["trials"][0]["epoch"] == 2 and not warnings(caplog)


def test_workers_of_one_file_with_claims_in_two_directories_are_refused(storage: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one = hire(storage, here, "one")
    assert numbers(one, 2) == [0, 1]
    if storage.startswith("postgresql"):
        hire(storage, there, "other")
        return
    with pytest.raises(StudyError, match=rf"bound to the directory {here}.* this one is {there}.*same study_directory"):
        hire(storage, there, "other")
    assert numbers(one) == [2, 3]
    here.rename(tmp_path / "moved")
    assert numbers(hire(storage, tmp_path / "moved", "one")) == [0, 1, 2, 3]


def test_two_hosts_at_once_are_refused_where_claims_are_in_a_file(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_another_host() -> None:  # as far as can be seen: it has booted by itself
        monkeypatch.setattr(identity, "_BOOT_ID", tmp_path / "boot_id")
        (tmp_path / "boot_id").write_text(str(uuid.uuid4()))

    directory = tmp_path / "study"
    ones = [hire(storage, directory, name) for name in ("one", "same host")]
    assert numbers(ones[0], 1) == [0]
    on_another_host()
    if storage.startswith("postgresql"):
        assert numbers(hire(storage, directory, "other"), 1) == [1]
        return
    with pytest.raises(
        StorageError, match=rf"workers of another host, \S+, have the study in {directory}, .*PostgreSQL"
    ):
        hire(storage, directory, "other")
    ones.clear()
    gc.collect()  # as their ends do
    other = hire(storage, directory, "other")
    assert numbers(other, 1) == [1], "it succeeds the first"
    monkeypatch.undo()
    with pytest.raises(StorageError, match="have the study in"):
        hire(storage, directory, "one")


def test_a_study_whose_directory_is_gone_goes_on_in_another(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    one = hire(storage, tmp_path / "here", "one")
    assert numbers(one, 2) == [0, 1]
    (tmp_path / "here").rename(tmp_path / "gone")
    assert numbers(hire(storage, tmp_path / "there", "one")) == [0, 1, 2, 3]
