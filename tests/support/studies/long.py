"""Three trials of two epochs, each of many batches.

A batch takes `$LONG_BATCH_S`. Trials are saved every `$LONG_PERIOD_S`. The file `$LONG_BEGUN` comes with batch 40.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import torch
from tiny import Tiny
from torch import Tensor, nn

from trials.side_task import checkpoints

checkpoints.PERIOD_S = float(os.environ.get("LONG_PERIOD_S", checkpoints.PERIOD_S))

BATCHES = 300


class Long(Tiny):
    trials = 3
    epochs = 2
    rungs = ()
    keep_best = 3

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": 0.01 * (1 + trial.number)}

    def model(self, params: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=params["lr"])

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        stream = torch.Generator().manual_seed(epoch)
        for number in range(BATCHES):
            if number == 40 and (begun := os.environ.get("LONG_BEGUN")):
                Path(begun).touch()
            time.sleep(float(os.environ.get("LONG_BATCH_S", "0")))
            inputs = torch.randn(8, 4, generator=stream)
            yield inputs, inputs.sum(1, keepdim=True)

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.NopPruner()
