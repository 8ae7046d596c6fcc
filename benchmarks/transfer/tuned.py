"""The study whose search is timed: six hyperparameters of a wide MLP, as users search them.

It was fixed before it was measured, by what is usual:

- The model is for rows of features, where MLPs are used most, and where their papers search with 100 iterations of
  Optuna's TPE (Gorishniy et al. 2021, arXiv 2106.11959). At width 1024, one core trains it in seconds, so that five
  repeats of three searches take minutes. Surrogates have an eighth of it, the most that the documents recommend.
- The learning rate has the range of Optuna's own example for PyTorch, decay that of the paper above, widened, because
  AdamW's has to be larger. Beside them: momentum, warm-up before a cosine, label smoothing, the initial scale.
- Decay and smoothing are not expected to transfer. Users search them nevertheless, so they are among the six.
"""

from collections.abc import Callable, Iterator, Mapping
from math import cos, pi
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.transfer.models import Batch, batches, cross_entropy, held_out, mlp
from trials import Study
from trials.shrinking.settings import Shrink

WIDTH, SCALE, REPORTS = 1024, 8, 5


class Tuned(Study):
    """Trials of an MLP for digits.

    Args:
        width: the target's.
        by: the surrogates' factor; 1: the target itself, as plain PyTorch.
        steps: of each trial.
    """

    trials, fused, epochs, direction, audit, scheduler_every = 1, 64, 1, "minimize", False, "step"

    def __init__(self, width: int, by: int, steps: int) -> None:
        self.width, self.steps, self.data = width, steps, batches("mlp", steps)
        self.shrink = None if by == 1 else Shrink(by, regularizers=True)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Six hyperparameters."""
        return {
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
            "momentum": trial.suggest_float("momentum", 0.8, 0.98),
            "warm_up": trial.suggest_float("warm_up", 0.0, 0.3),
            "smoothing": trial.suggest_float("smoothing", 0.0, 0.2),
            "scale": trial.suggest_float("scale", 0.25, 4.0, log=True),
        }

    def seed(self, params: dict[str, Any], number: int) -> int:
        """Each trial has its own."""
        return int(params.get("seed", number))

    def model(self, params: dict[str, Any]) -> nn.Module:
        """The target, whose last layer begins at zero, as that of surrogates does."""
        made = mlp(self.width)
        with torch.no_grad():
            weights = [p for p in made.parameters() if p.ndim == 2]
            for weight in weights[:-1]:
                weight.mul_(params["scale"])
            weights[-1].zero_()
        return made

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(
            model.parameters(),
            lr=params["lr"],
            betas=(params["momentum"], 0.999),
            weight_decay=params["weight_decay"],
        )

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
        """Linear warm-up, then a cosine to zero."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, Schedule(self.steps, params["warm_up"]))

    def loss(self, outputs: Tensor, targets: Tensor, params: Mapping[str, Any] = MappingProxyType({})) -> Tensor:
        """Cross entropy with smoothed labels."""
        logs, smooth = functional.log_softmax(outputs, -1), params["smoothing"]
        smoothed: Tensor = (1 - smooth) * functional.nll_loss(logs, targets) - smooth * logs.mean()
        return smoothed

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The same for all trials."""
        return iter(self.data)

    def validation(self) -> Iterator[Batch]:
        """Held-out examples."""
        yield held_out("mlp")

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The held-out loss."""
        return cross_entropy(outputs, targets)


class Schedule:
    """The rate's factor after so many steps."""

    def __init__(self, steps: int, warm_up: float) -> None:
        self.steps, self.warm = steps, max(1, round(warm_up * steps))

    def __call__(self, step: int) -> float:
        """Of the step that comes."""
        if step < self.warm:
            return (step + 1) / self.warm
        return 0.5 * (1 + cos(pi * (step - self.warm) / max(1, self.steps - self.warm)))


def train_alone(
    study: Tuned, params: dict[str, Any], seed: int, report: Callable[[float, int], None] = lambda loss, step: None
) -> float:
    """Train a target as any script would, and return its held-out loss.

    Args:
        study: of the target.
        params: its hyperparameters.
        seed: of its initial values.
        report: is told the held-out loss and the step, from time to time.
    """
    torch.manual_seed(seed)
    model = study.model(params)
    optimizer = study.optimizer(params, model)
    schedule = study.scheduler(params, optimizer)
    inputs, targets = held_out("mlp")
    every = max(1, study.steps // REPORTS)
    for step, (x, y) in enumerate(study.data, 1):
        optimizer.zero_grad()
        study.loss(model(x), y, params).backward()
        optimizer.step()
        schedule.step()
        if step % every == 0 and step < study.steps:
            report(_held_out(model, inputs, targets), step)
    return _held_out(model, inputs, targets)


@torch.no_grad()
def _held_out(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    loss = float(cross_entropy(model(inputs), targets))
    return loss if loss < 1e6 else 1e6  # NaN, too
