"""Trials of two structures, by turns. The environment says how long an epoch of each takes here."""

import os
import time
from collections.abc import Iterable
from typing import Any

import optuna
import torch
from torch import Tensor, nn

from trials import Study

WIDTHS = (8, 32)
EPOCH_S = [float(seconds) for seconds in os.environ.get("TWO_KINDS_EPOCH_S", "0 0").split()]


class TwoKinds(Study):
    trials, epochs, audit = 72, 3, False
    fused = int(os.environ.get("TWO_KINDS_FUSED", "2"))
    batch_params = ("width",)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"width": WIDTHS[trial.number % 2]}

    def model(self, params: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(4, params["width"]), nn.Linear(params["width"], 1))

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square().mean()

    def batches(  # type: ignore[override]
        self, epoch: int, params: dict[str, Any]
    ) -> Iterable[tuple[Tensor, Tensor]]:
        time.sleep(EPOCH_S[WIDTHS.index(params["width"])])
        return [(torch.eye(4), torch.ones(4))]

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        return [(torch.eye(4), torch.ones(4))]

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self.loss(outputs, targets)
