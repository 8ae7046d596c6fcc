"""Which weights are the best. On a full disk they are not kept until there is room, and no result waits for them."""

import errno
import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from torch import nn

from tests.support.fused_and_solo import AtOnce, ToyStudy, members
from tests.support.plain_study import Plain
from tests.support.side_task_runs import Direct
from tests.support.stranger import needs_second_user, without_rights
from trials import TrialGroup
from trials.best_trials import best_trials
from trials.gate.base import OpenGate
from trials.search.files import best_weights, checkpoint_files
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.checkpoints import Checkpoints


def complete(worker: SearchWorker, directory: Path) -> None:
    """A trial, which scores its number."""
    (trial,) = worker.ask(1)["trials"]
    weights = checkpoint_files.temporary_weights_path(directory, trial["number"])
    weights.write_text(f"of {trial['number']}")
    worker.report(trial["number"], 1, trial["number"], True, weights=str(weights))


def test_a_full_disk_delays_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="w", directory=tmp_path)
    worker = SearchWorker(Plain(), config, AtOnce())
    complete(worker, tmp_path)
    monkeypatch.setattr(best_weights, "publish", full)
    for _ in range(2):
        complete(worker, tmp_path)
    assert [trial.state for trial in worker._study.get_trials()] == [TrialState.COMPLETE] * 3
    assert caplog.text.count("the best weights are not kept: [Errno 28] No space left on device") == 1
    monkeypatch.undo()
    worker.stop()
    (entry,) = json.loads((tmp_path / "best" / "best.json").read_text())
    assert (entry["number"], (tmp_path / "best" / entry["weights"]).read_text()) == (2, "of 2")
    assert sorted(file.name for file in (tmp_path / "best").iterdir()) == ["best.json", "trial-2.pt"]


def test_a_trial_that_breaks_a_constraint_is_not_the_best(tmp_path: Path) -> None:
    class Constrained(Plain):
        def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
            trial.set_constraint("even", trial.number % 2)
            return super().suggest(trial)

    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="w", directory=tmp_path)
    worker = SearchWorker(Constrained(), config, AtOnce())
    for _ in range(2):
        complete(worker, tmp_path)
    (entry,) = json.loads((tmp_path / "best" / "best.json").read_text())
    assert entry["number"] == worker._study.best_trial.number == 0, "the other one scores more"
    assert worker.ask(0)["bar"] is None, "a lower score may be better than what breaks a constraint"


@pytest.mark.parametrize("first", [0, 1])
def test_of_those_that_tie_the_lower_number_is_kept_whichever_ends_first(first: int, tmp_path: Path) -> None:
    """It is the best for Optuna, too."""
    study, storage = ToyStudy(lambda n: nn.Linear(1, 1)), f"{tmp_path}/study.journal"
    worker = SearchWorker(
        study, WorkerConfig(storage=storage, study_name="s", worker="w", directory=tmp_path), AtOnce()
    )
    assert len(worker.ask(2)["trials"]) == 2
    group = TrialGroup(study, members(study, [0, 1]), OpenGate())
    kept = Checkpoints(study, tmp_path, OpenGate(), Direct(worker))
    for row in (first, 1 - first):
        kept.take(worker.ask(0))
        worker.report(row, 1, 0.5, True, weights=kept.ended(group, row, 0.5))
    kept.take(worker.ask(0))
    assert kept.ended(group, 0, 0.4) is None
    (shown,) = best_trials(storage, "s", tmp_path)
    assert shown.number == worker._study.best_trial.number == 0 and shown.weights is not None


@needs_second_user
def test_a_directory_that_becomes_read_only_fails_no_trial(tmp_path: Path) -> None:
    """Before the first trial ends, there is no directory of the best."""
    study, directory = ToyStudy(lambda n: nn.Linear(1, 1)), tmp_path / "study"
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="w", directory=directory)
    worker = SearchWorker(study, config, AtOnce())
    group = TrialGroup(study, members(study, [0]), OpenGate())
    written = checkpoint_files.temporary_path(directory, 0, 1)
    written.write_bytes(b"a checkpoint")

    def ends() -> bool:
        kept = Checkpoints(study, directory, OpenGate(), Direct(worker))
        return kept.ended(group, 0, 0.5) is None and checkpoint_files.commit(written, 1) is None

    for each in (written.parent, directory):
        each.chmod(0o500)
    try:
        assert without_rights(ends)
    finally:
        directory.chmod(0o700)
