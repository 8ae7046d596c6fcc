"""A study of three trials without hyperparameters, for what only its files show."""

from typing import Any

import optuna
import torch
from torch import nn

from tests.support.fused_and_solo import ToyStudy


class Plain(ToyStudy):
    trials = 3

    def __init__(self) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {}
