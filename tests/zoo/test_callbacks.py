"""Callbacks of other packages log each trial of a study that real workers train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial

from trials.search.storage.optuna_storage import open_storage

STUDY = """
import torch
from torch import nn
from trials import Study

class Logged(Study):
    trials, epochs, fused = 6, 3, 3

    def suggest(self, trial): return {{"lr": trial.suggest_float("lr", 0.01, 0.1)}}
    def model(self, params): return nn.Linear(4, 1)
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"])
    def loss(self, outputs, targets): return (outputs - targets).square().mean()
    def score(self, outputs, targets): return -self.loss(outputs, targets)
    def batches(self, epoch):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(epoch))
        return [(inputs, inputs.sum(1, keepdim=True))]
    def validation(self): return self.batches(99)
    def callbacks(self):
{callbacks}
"""


def trained(folder: Path, callbacks: str) -> list[FrozenTrial]:
    """The trials of a study with these callbacks."""
    (folder / "logged.py").write_text(STUDY.format(callbacks=callbacks))
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "trials", "run", "logged.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Study.callbacks" not in done.stderr, done.stderr
    found = optuna.load_study(study_name="logged", storage=open_storage(str(folder / "studies/study.journal"))).trials
    assert len(found) == 6
    return list(found)


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trials = trained(
        tmp_path,
        "        from optuna_integration import MLflowCallback\n"
        f"        return [MLflowCallback({uri!r}, metric_name='score')]\n",
    )
    mlflow.set_tracking_uri(uri)
    runs = mlflow.search_runs(experiment_names=["logged"], output_format="list")
    logged = {int(run.info.run_name): (float(run.data.params["lr"]), run.data.metrics["score"]) for run in runs}
    assert logged == {trial.number: (trial.params["lr"], pytest.approx(trial.value)) for trial in trials}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trials = trained(  # Optuna's own callback is deprecated, and needs TensorFlow
        tmp_path,
        "        from torch.utils.tensorboard import SummaryWriter\n"
        "        board = SummaryWriter('board')\n"
        "        return [lambda study, trial: (board.add_scalar('score', trial.value, trial.number), board.flush())]\n",
    )
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("score")}
    assert logged == {trial.number: pytest.approx(trial.value) for trial in trials}


def test_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    trials = trained(
        tmp_path,
        "        from optuna_integration import WeightsAndBiasesCallback\n"
        "        return [WeightsAndBiasesCallback(metric_name='score', wandb_kwargs={'project': 'ours'})]\n",
    )
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert all(json.dumps(trial.value).encode()[:12] in content for trial in trials)
