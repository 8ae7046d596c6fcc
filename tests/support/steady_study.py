"""A study that `trials` commands train in the working directory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from tests.support.accounts import assert_accounts
from trials.cli import main
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect
from trials.search.storage.optuna_storage import open_storage

STUDY = """
import time
import torch
from torch import nn
from trials import Study

class Steady(Study):
    trials, epochs, fused, rungs = 12, 20, 4, (5, 10)
    slow_s = float({slow_s})

    def suggest(self, trial): return {{"lr": trial.suggest_float("lr", 0.01, 0.1), "wide": 3}}
    def model(self, params): return nn.Sequential(nn.Linear(4, params["wide"]), nn.Tanh(), nn.Linear(params["wide"], 1))
    def optimizer(self, params, model): return torch.optim.SGD(model.parameters(), params["lr"])
    def loss(self, outputs, targets): return (outputs - targets).square().mean()
    def score(self, outputs, targets): return -self.loss(outputs, targets)
    def batches(self, epoch):
        time.sleep(self.slow_s)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(epoch))
        return [(inputs, inputs.sum(1, keepdim=True))]
    def validation(self): return self.batches(99)
"""


def write(slow_s: float = 0.0) -> None:
    Path("steady.py").write_text(STUDY.format(slow_s=slow_s))


@contextmanager
def started(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """A `trials` command that runs meanwhile, and no longer."""
    command = [sys.executable, "-m", "trials", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ran(*words: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([sys.executable, "-m", "trials", *words], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def told(*words: str, status: int = 0) -> tuple[str, str]:
    """What a `trials` command prints and says; only its workers are processes of their own."""
    printed, said = StringIO(), StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        try:
            ended: int | str | None = main(words)
        except SystemExit as end:
            ended = end.code
    assert ended == status, said.getvalue()
    return printed.getvalue(), said.getvalue()


def trials(name: str = "steady", storage: str = "studies/study.journal") -> list[FrozenTrial]:
    try:
        return optuna.load_study(study_name=name, storage=open_storage(storage)).trials
    except KeyError:
        return []


def has_trained() -> bool:
    return Path("studies/study.journal").exists() and any(trial.intermediate_values for trial in trials())


def assert_all_ended_once(name: str = "steady", storage: str = "studies/study.journal") -> None:
    found = trials(name, storage)
    assert len(found) == 12 and {trial.state for trial in found} <= {TrialState.COMPLETE, TrialState.PRUNED}
    claims = Claims(connect(storage, Path("studies", name)), name, "")
    spans = claims.spans()
    claims.close()
    assert_accounts(spans, found)
