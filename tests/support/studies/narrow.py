"""A study that trains surrogates."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials import Study


class Narrow(Study):
    """Whether the numbers of a vector sum to more than zero."""

    trials, fused, epochs, shrink = 6, 6, 2, 4

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}

    def model(self, params: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        stream = torch.Generator().manual_seed(epoch)
        for _ in range(20):
            inputs = torch.randn(32, 20, generator=stream)
            yield inputs, (inputs.sum(1) > 0).long()

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches(-1)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets).float().mean()
