"""Which weights are the best. On a full disk they are not kept until there is room, and no result waits for them."""

import errno
import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.fused_and_solo import AtOnce
from tests.support.plain_study import Plain
from trials.search.files import best_weights, checkpoint_files
from trials.search.worker import SearchWorker, WorkerConfig


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
