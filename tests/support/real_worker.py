"""A worker that trains fused trials of a small study, until the study is over: `python -m tests.support.real_worker`.

It is a side task and its search worker, with a gate that is always open, and a lease that a test can wait for.
"""

import argparse
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn

from ds_hooks.shared.processes.parent import die_with_parent
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from tests.support.fused_and_solo import Batch, ToyStudy
from trials.gate.base import OpenGate
from trials.search.client import SearchClient
from trials.search.worker import WorkerConfig
from trials.search.worker_process import serve
from trials.side_task import checkpoints, scheduler

STUDY_NAME = "real"


class Small(ToyStudy):
    """Trials of a small network; every epoch has other batches, and takes a while."""

    fused, epochs, rungs, keep_best = 4, 6, (2, 4), 2

    def __init__(self, trials: int, batch_s: float = 0.0) -> None:
        super().__init__(network, "adamw")
        self.trials, self._batch_s = trials, batch_s
        self.data = self.batches(-1)

    def sampler(self) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler()

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.NopPruner()

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True), "n": trial.number}

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=params["lr"])

    def batches(self, epoch: int) -> list[Batch]:
        stream = torch.Generator().manual_seed(epoch + 1)
        time.sleep(self._batch_s)
        return [(torch.randn(5, 3, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(3)]

    def validation(self) -> Iterable[Batch]:
        return self.data


def network(n: int) -> nn.Module:
    """The same for all. Each trial's dropout draws its own random numbers."""
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)).double()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--lease", type=float, required=True, metavar="S")
    parser.add_argument("--epoch", type=float, required=True, metavar="S", help="how long an epoch takes, at least")
    options = parser.parse_args()
    die_with_parent()
    checkpoints.PERIOD_S = 0.0
    scheduler.ASK_AGAIN_S = 0.2
    study = Small(options.trials, options.epoch)
    config = WorkerConfig(
        storage=os.environ[STORAGE_VARIABLE],
        study_name=STUDY_NAME,
        worker=options.worker,
        directory=options.directory,
        lease_s=options.lease,
        exclusive_rows=study.rows,
    )
    search = SearchClient(partial(serve, study, config, attached=lambda: False))
    scheduler.Scheduler(study, OpenGate(), search, lambda _: None, directory=options.directory).run()
    assert search.close()


if __name__ == "__main__":
    main()
