"""The target of a study is trained with the hyperparameters of its best surrogates, by real workers."""

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import torch

from tests.support.paths import ROOT
from trials import load_study
from trials.search.best_weights import params_of
from trials.search.storage.optuna_storage import open_storage
from trials.transfer import SOURCE

NARROW = ROOT / "tests" / "support" / "studies" / "narrow.py"

pytestmark = pytest.mark.integration


def trials(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trials", *arguments, "--directory", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


def test_surrogates_then_the_target(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    searched = trials("run", str(NARROW), directory=studies)
    assert searched.returncode == 0, searched.stderr
    moved = trials("transfer", str(NARROW), "--top", "2", "--save", str(tmp_path / "best"), directory=studies)
    assert moved.returncode == 0, moved.stderr
    assert "torch.nn.init.zeros_(model.get_parameter('4.weight'))" in moved.stdout
    storage = open_storage(str(studies / "study.journal"))
    surrogates = optuna.load_study(study_name="narrow", storage=storage)
    targets = optuna.load_study(study_name="narrow-target", storage=storage).get_trials()
    best = sorted(surrogates.get_trials(), key=lambda trial: -(trial.value or 0))[:2]
    assert [trial.user_attrs[SOURCE] for trial in targets] == [f"narrow#{trial.number}" for trial in best]
    assert [params_of(trial) for trial in targets] == [params_of(trial) for trial in best]
    assert all(trial.state.name == "COMPLETE" for trial in targets)
    saved = json.loads(next((tmp_path / "best").glob("trial-*.json")).read_text())
    model = load_study(NARROW).model(saved["params"])
    model.load_state_dict(torch.load(saved["weights"], weights_only=True))  # the target's own size
    again = trials("transfer", str(NARROW), "--top", "2", directory=studies)
    assert again.returncode == 0, again.stderr
    assert len(optuna.load_study(study_name="narrow-target", storage=storage).get_trials()) == 2


def test_nothing_to_transfer(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    tiny = ROOT / "tests" / "support" / "studies" / "tiny.py"
    assert trials("run", str(tiny), directory=studies).returncode == 0
    refused = trials("transfer", str(tiny), directory=studies)
    assert refused.returncode == 2
    assert "the study has no attribute shrink" in refused.stderr
