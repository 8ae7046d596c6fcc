"""Trains many rates and seeds of a model at some width, fused."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.transfer.models import MODELS, Batch, batches, cross_entropy, held_out
from trials import Study, TrialGroup, build_member
from trials.gate.base import OpenGate
from trials.shrinking.errors import ShrinkWarning
from trials.shrinking.settings import Shrink
from trials.training.scores.objectives import first_of

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "muon": torch.optim.Muon,
}

LAST = 20
"""A training loss is the mean over so many last steps."""


class Sweep(Study):
    """Trials of one model that differ in settings of the optimizer and in seeds.

    Args:
        model: the model's name.
        width: of the target.
        by: the surrogates' factor; 1: the target itself; None: plain PyTorch.
        optimizer: its name.
        steps: of each trial.
    """

    trials, fused, epochs, direction, audit = 1, 64, 1, "minimize", False

    def __init__(self, model: str, width: int, by: int | None, optimizer: str, steps: int) -> None:
        self.name, self.width, self.kind = model, width, optimizer
        self.data = batches(model, steps)
        if by is not None:
            self.shrink = Shrink(2 if by == 1 else by, is_target=by == 1)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Only the rate."""
        return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}

    def seed(self, params: dict[str, Any], number: int) -> int:
        """Each trial has its own."""
        return int(params.get("seed", number))

    def model(self, params: dict[str, Any]) -> nn.Module:
        """The target."""
        return MODELS[self.name](self.width)

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """All but the seed are the optimizer's settings."""
        given = {name: value for name, value in params.items() if name != "seed"}
        return OPTIMIZERS[self.kind](model.parameters(), **given)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return cross_entropy(outputs, targets)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The same for all trials."""
        return iter(self.data)

    def validation(self) -> Iterator[Batch]:
        """Held-out examples."""
        yield held_out(self.name)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The held-out loss."""
        return cross_entropy(outputs, targets)


def trained(study: Study, chosen: Sequence[dict[str, Any]], together: int = 64) -> list[tuple[float, float]]:
    """Train trials of these settings, and return each one's training loss at the end and its held-out loss.

    What diverges has the losses infinity.
    """
    found: list[tuple[float, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        for begin in range(0, len(chosen), together):
            own = chosen[begin : begin + together]
            group = TrialGroup(study, [build_member(study, n, p) for n, p in enumerate(own)], OpenGate())
            last: list[Tensor] = []
            for batch in group.batches(0):
                group.train_step(*batch)
                last = [*last[-LAST + 1 :], group.losses_K().double().clone()]
            means = torch.stack(last).mean(0).tolist()
            scores = [first_of(score) for score in group.evaluate()]
            found += [(_finite(mean), _finite(score)) for mean, score in zip(means, scores, strict=True)]
    return found


def _finite(loss: float) -> float:
    return loss if loss == loss and loss < 1e6 else float("inf")
