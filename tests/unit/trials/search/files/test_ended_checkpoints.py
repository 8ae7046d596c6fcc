"""Checkpoints of trials that have ended do not stay, whoever ended them."""

import os
from pathlib import Path

from tests.support.fused_and_solo import AtOnce
from tests.support.plain_study import Plain
from trials.search.files.checkpoint_files import trial_directory
from trials.search.worker import SearchWorker, WorkerConfig


def hire(name: str, directory: Path) -> SearchWorker:
    config = WorkerConfig(storage=f"{directory}/study.journal", study_name="s", worker=name, directory=directory)
    return SearchWorker(Plain(), config, AtOnce())


def left_by_a_death(directory: Path, number: int) -> None:
    """What a worker leaves that is killed when the score is written and the checkpoints are not yet removed."""
    trial_directory(directory, number).mkdir(parents=True)
    (trial_directory(directory, number) / "1-1.pt").write_bytes(b"")


def test_a_worker_removes_those_that_another_has_left(tmp_path: Path) -> None:
    first = hire("first", tmp_path)
    first.ask(2)
    first.report(0, 1, 0.5, True)
    left_by_a_death(tmp_path, 0)
    left_by_a_death(tmp_path, 1)  # this trial goes on
    left_by_a_death(tmp_path, 9)  # the study has no such trial
    second = hire("second", tmp_path)
    second.ask(1)
    second.report(2, 1, 0.5, True)
    second.stop()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "9"]
