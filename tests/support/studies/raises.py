"""Every third trial's model raises, and every third trial's loss does; the others are fine."""

from typing import Any

import optuna
import torch
from tiny import Tiny
from torch import Tensor, nn


class Raises(Tiny):
    rungs = ()

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": 0.1, "raises": ("nowhere", "model", "loss")[trial.number % 3]}

    def model(self, params: dict[str, Any]) -> nn.Module:
        if params["raises"] == "model":
            raise ValueError("no such model")
        return nn.Sequential(nn.Linear(4, 2 if params["raises"] == "loss" else 1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[-1] == 2:
            raise torch.linalg.LinAlgError("no such loss")
        return super().loss(outputs, targets)
