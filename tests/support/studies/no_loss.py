"""A study without a loss."""

from typing import Any

from torch import nn

from trials import Study


class NoLoss(Study):
    trials = 1
    epochs = 1

    def model(self, params: dict[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)
