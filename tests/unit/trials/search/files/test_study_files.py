"""A study's directory that is removed while its trials train."""

import shutil
from pathlib import Path

import pytest

from tests.support.fused_and_solo import AtOnce
from tests.support.simulated import Pretended
from trials.search.storage.directory_identity import NAME
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study_error import StudyError


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_directory_that_was_removed_is_not_taken_for_another(comes_again: bool, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    storage = f"{tmp_path}/study.journal"

    def hire() -> SearchWorker:
        config = WorkerConfig(storage=storage, study_name="s", worker="w", directory=directory)
        return SearchWorker(Pretended(4), config, AtOnce())

    worker = hire()
    worker.ask(1)
    shutil.rmtree(directory)
    if comes_again:
        directory.mkdir()
        (directory / NAME).write_text("of another one")
    with pytest.raises(StudyError, match=r"study was removed while its trials train.*; allowed: to begin again"):
        worker.ask(1)
    worker.stop()
    shutil.rmtree(directory, ignore_errors=True)
    assert [trial["number"] for trial in hire().ask(1)["trials"]] == [0]
