"""An artifact store that takes no checkpoint and gives no answer ends no search."""

import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.accounts import assert_accounts
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

pytestmark = pytest.mark.integration

STUDY = """
import threading
import time
import torch
from optuna.artifacts import FileSystemArtifactStore
from torch import nn
from trials import Study
from trials.search.files import bounded_store

bounded_store.PATIENCE_S = 0.5

class Mute(FileSystemArtifactStore):
    def write(self, artifact_id, content_body):
        if "-" in artifact_id:  # all but its name
            threading.Event().wait()
        super().write(artifact_id, content_body)

class Stored(Study):
    trials, epochs, fused, rungs = 4, 6, 2, (1, 2, 3, 4, 5)

    def suggest(self, trial): return {"lr": 0.01 * (1 + trial.number)}
    def model(self, params): return nn.Linear(4, 1)
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"])
    def loss(self, outputs, targets): return (outputs - targets).square().mean()
    def score(self, outputs, targets): return -self.loss(outputs, targets)
    def pruner(self):
        import optuna
        return optuna.pruners.NopPruner()
    def artifact_store(self): return Mute("store")
    def batches(self, epoch):
        time.sleep(0.3)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(epoch))
        return [(inputs, inputs.sum(1, keepdim=True))]
    def validation(self): return self.batches(99)
"""


@pytest.mark.slow
def test_a_study_ends_though_its_store_hangs(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERE", database)
    Path("store").mkdir()
    Path("stored.py").write_text(STUDY)
    command = [sys.executable, "-m", "trials", "run", "stored.py", "--storage", "env:WHERE"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = "are on this host alone while the artifact store fails: TimeoutError: Mute has not answered for 0.5"
    assert done.stderr.count(said) == 1
    trials = optuna.load_study(study_name="stored", storage=open_storage(database)).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 4
    claims = Claims(connect(database, None), "stored", "")
    assert_accounts(claims.spans(), trials)
    claims.close()
    assert len(list(Path("studies/stored/best").glob("trial-*.pt"))) == 1
