"""A study of handwritten digits (8 × 8 pixels, from scikit-learn): rate, weight decay and dropout of an MLP."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from torch import Tensor, nn
from torch.nn import functional

from trials import Study

WIDTH = 64
BATCH = 32
VALIDATION = 397


def read_digits() -> Tensor:
    """Each example's 64 pixels and its digit: ``x_N65``.

    Bubbles are short, so a study should begin soon: importing scikit-learn takes nearly as long as importing PyTorch.
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "scikit-learn, which has these digits, is not installed"
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(np.loadtxt(file, delimiter=","))


class Digits(Study):
    """512 trials, of which 16 train at once on each device. The width is fixed, so all trials can be fused.

    More than end in the bubbles of the demo's 300 steps, so that these are used to the job's last step, however fast
    the machine is. The next job would go on with the rest.
    """

    trials = 512
    fused = 16
    epochs = 10
    rungs: tuple[int, ...] = (2, 4, 7)

    def __init__(self) -> None:
        """Read the data, and split it in the same way for every trial."""
        digits = read_digits()
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        inputs = digits[order, :-1].float() / 16
        targets = digits[order, -1].long()
        self.inputs, self.targets = inputs[VALIDATION:], targets[VALIDATION:]
        self.held_out = inputs[:VALIDATION], targets[:VALIDATION]

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Ask for the three hyperparameters."""
        return {
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.6),
        }

    def model(self, params: dict[str, Any]) -> nn.Module:
        """Two hidden layers."""
        return nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.ReLU(),
            nn.Dropout(params["dropout"]),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.ReLU(),
            nn.Dropout(params["dropout"]),
            nn.Linear(WIDTH, 10),
        )

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with the trial's own rate and decay."""
        return torch.optim.AdamW(model.parameters(), lr=params["lr"], weight_decay=params["weight_decay"])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(outputs, targets)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All training examples, in an order that depends only on the epoch."""
        order = torch.randperm(len(self.targets), generator=torch.Generator().manual_seed(1 + epoch))
        for rows in order.split(BATCH):
            yield self.inputs[rows], self.targets[rows]

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The held-out examples, as one batch."""
        yield self.held_out

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of digits that are recognised."""
        return (outputs.argmax(-1) == targets).float().mean()
