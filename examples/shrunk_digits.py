"""A study of handwritten digits that tunes surrogates of an eighth of the width: rate and momentum of a wide MLP.

trials run examples/shrunk_digits.py, then trials transfer examples/shrunk_digits.py
"""

from typing import Any

import optuna
import torch
from digits import Digits
from torch import nn

WIDTH = 512


class ShrunkDigits(Digits):
    """Its trials train layers of 64 units. `trials transfer` trains the model itself, with 512."""

    trials = 200
    epochs = 20
    rungs = (3, 7, 13)
    shrink = 8

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Ask for what transfers between widths."""
        return {
            "lr": trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            "beta1": trial.suggest_float("beta1", 0.5, 0.95),
        }

    def model(self, params: dict[str, Any]) -> nn.Module:
        """The target: two hidden layers."""
        return nn.Sequential(
            *(nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 10),
        )

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with the trial's own rate."""
        return torch.optim.AdamW(model.parameters(), lr=params["lr"], betas=(params["beta1"], 0.999))
