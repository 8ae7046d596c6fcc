"""Small trials that note every epoch in the file `$COUNTED`, with the process and the worker that trained it.

A line has the trial, the epoch, the process, how often that has read batches, and the worker. Schedulers have twins
that step beside them, so it may come again. There is always another one, until the file `$TINY_HOLD` is gone.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import optuna
import torch
from tiny import HOLD, Tiny
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from trials.side_task import checkpoints

checkpoints.PERIOD_S = 0.5

READ = 0
EPOCH_S = float(os.environ.get("COUNTED_EPOCH_S", 0.2))


class Counted(Tiny):
    trials = int(os.environ.get("COUNTED_TRIALS", 1000))
    epochs = 8
    rungs = (2, 4)
    search = os.environ.get("COUNTED_SEARCH") or None
    audit = False

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        is_rehearsed = trial.study.study_name != "counted"
        if not is_rehearsed and not os.path.exists(HOLD):
            trial.study.stop()
        return {"lr": trial.suggest_float("lr", 0.0, 0.1), "number": None if is_rehearsed else trial.number}

    def pruner(self) -> optuna.pruners.BasePruner | None:
        return None if self.search else optuna.pruners.MedianPruner(n_startup_trials=2)

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, noting(params["number"]))

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        global READ
        READ += 1
        time.sleep(EPOCH_S)
        stream = torch.Generator().manual_seed(epoch)
        for _ in range(3):
            inputs = torch.randn(8, 4, generator=stream)
            yield inputs, inputs.sum(1, keepdim=True)


def noting(number: int | None) -> Callable[[int], float]:
    """A rate that does not change; whoever asks for it after an epoch has trained that epoch."""

    def rate(epoch: int) -> float:
        if epoch and number is not None:
            worker = sys.argv[sys.argv.index("--worker") + 1].rpartition(":")[2]
            with open(os.environ["COUNTED"], "a") as file:
                file.write(f"{number} {epoch} {os.getpid()} {READ} {worker}\n")
        return 1.0

    return rate
