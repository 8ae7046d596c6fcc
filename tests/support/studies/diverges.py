"""Three small trials, of which one is lost in its first epoch: its rate is much too high."""

from collections.abc import Iterator
from typing import Any

import optuna
import torch
from torch import Tensor, nn
from torch.nn import functional

from trials import Study


class Diverges(Study):
    trials = fused = 3
    epochs = 2

    def __init__(self) -> None:
        self.inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        self.targets = self.inputs.sum(1, keepdim=True)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": 1e30 if trial.number == 1 else 0.1 / (1 + trial.number)}

    def model(self, params: dict[str, Any]) -> nn.Module:
        return nn.Linear(4, 1)

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=params["lr"])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(20):
            yield self.inputs, self.targets

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.inputs, self.targets

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -functional.mse_loss(outputs, targets)
