"""Tunes a small convolutional network on 8 × 8 images of handwritten digits; its batch size and width are tuned too.

trials run examples/images.py
"""

from collections.abc import Iterable
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from trials import Study

TRAINING = 1400


class Images(Study):
    """Classifies images that are shifted at random by up to a pixel in each direction."""

    trials = 48
    fused = 12
    epochs = 8
    rungs = (2, 4)
    batch_params = ("batch_size",)

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {
            "lr": trial.suggest_float("lr", 1e-3, 3e-1, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.95),
            "smoothing": trial.suggest_float("smoothing", 0.0, 0.2),
            "channels": trial.suggest_categorical("channels", [8, 16]),
            "batch_size": trial.suggest_categorical("batch_size", [32, 64]),
        }

    def model(self, params: dict[str, Any]) -> nn.Module:
        channels = params["channels"]
        return nn.Sequential(
            *(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.GroupNorm(4, 2 * channels), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, 10)),
        )

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), params["lr"], params["momentum"], nesterov=params["momentum"] > 0)

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)

    def batches(self, epoch: int, params: dict[str, Any] | None = None) -> Iterable[tuple[Tensor, Tensor]]:
        assert params is not None
        stream = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(TRAINING, generator=stream).split(params["batch_size"]):
            down, right = (torch.randint(-1, 2, (2,), generator=stream)).tolist()
            yield self.images[rows].roll((down, right), (2, 3)), self.labels[rows]

    def loss(self, outputs: Tensor, targets: Tensor, params: dict[str, Any] | None = None) -> Tensor:
        assert params is not None
        logs = functional.log_softmax(outputs, -1)
        likely, even = functional.nll_loss(logs, targets), -logs.mean()
        smoothed: Tensor = likely + params["smoothing"] * (even - likely)
        return smoothed

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        yield self.images[TRAINING:], self.labels[TRAINING:]

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets).float().mean()
