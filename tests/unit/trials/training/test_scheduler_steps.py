"""Schedulers that a checkpoint would not give back as they are: refused. Those of PyTorch are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import members
from tests.support.own_optimizers import Adapting
from tests.support.rich_study import RichStudy, Schedule
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate

DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(6))] * 5
EPOCHS = 7


def model(n: int) -> nn.Module:
    return nn.Linear(4, 3).double()


def train(schedule: Schedule, every: str, optimizer: Any = "sgd") -> int:
    """How many epochs pass before one is refused."""
    study = RichStudy(model, optimizer, DATA, schedule, every)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    for epoch in range(EPOCHS):
        for batch in group.batches(epoch):
            group.train_step(*batch)
        group.end_epoch()
    return EPOCHS


def counting_late(n: int, o: torch.optim.Optimizer) -> Any:
    calls = 0

    def factor(epoch: int) -> float:
        nonlocal calls
        calls += epoch > 2
        return 0.9**calls

    return lrs.LambdaLR(o, factor)


class Partial(lrs.LRScheduler):
    """Counts its steps, but its `state_dict` does not say so."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> None:
        self.rate, self.steps = rate, -1
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.steps += 1
        return [base * self.rate(self.steps) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": self.base_lrs}


class Forgetful(lrs.ReduceLROnPlateau):
    """Its `state_dict` lacks how long the score has been bad."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "num_bad_epochs"}


LACKING: dict[str, tuple[Schedule, str]] = {
    "a count that begins late": (counting_late, "step"),
    "the same by epochs": (counting_late, "epoch"),
    "own state": (lambda n, o: Partial(o, lambda step: 0.9**step), "step"),
    "own state that matters late": (lambda n, o: Partial(o, lambda step: 1.0 if step < 20 else 0.1), "step"),
    "inside another": (lambda n, o: lrs.ChainedScheduler([Partial(o, lambda step: 0.9**step)]), "epoch"),
    "patience": (lambda n, o: Forgetful(o, "max", patience=2, threshold=10.0), "epoch"),
}


@pytest.mark.parametrize("name", LACKING)
def test_rates_that_a_checkpoint_would_change_are_refused(name: str) -> None:
    with pytest.raises(FuseError, match=r"from Study\.scheduler, given back by a checkpoint, sets lr = .* in place of"):
        train(*LACKING[name])


class Factor:
    """Its attributes are saved."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def chain(o: torch.optim.Optimizer) -> Any:
    return lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 9)], [3])


WHOLE: dict[str, Schedule] = {
    "an object": lambda n, o: lrs.LambdaLR(o, Factor()),
    "a function": lambda n, o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "of factors": lambda n, o: lrs.MultiplicativeLR(o, lambda epoch: 0.9 + 0.01 * n),
    "steps": lambda n, o: lrs.StepLR(o, 3, 0.5),
    "milestones": lambda n, o: lrs.MultiStepLR(o, [2, 9, 20], 0.3),
    "exponential": lambda n, o: lrs.ExponentialLR(o, 0.9),
    "cosine": lambda n, o: lrs.CosineAnnealingLR(o, 6),
    "restarts": lambda n, o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "one cycle": lambda n, o: lrs.OneCycleLR(o, 0.1, total_steps=40),
    "cycles": lambda n, o: lrs.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.99),
    "cycles by a function": lambda n, o: lrs.CyclicLR(o, 0.01, 0.1, 4, scale_fn=lambda x: 0.5**x),
    "sequence": lambda n, o: chain(o),
    "chain": lambda n, o: lrs.ChainedScheduler([lrs.StepLR(o, 2, 0.9), lrs.ExponentialLR(o, 0.99)]),
    "two": lambda n, o: [lrs.ExponentialLR(o, 0.9), lrs.ReduceLROnPlateau(o, "max", patience=1, threshold=9.0)],
    "some have none": lambda n, o: None if n == 1 else lrs.ExponentialLR(o, 0.9),
    "to the end": lambda n, o: lrs.PolynomialLR(o, 12, 2.0),
    "averaging": lambda n, o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", WHOLE)
def test_those_of_pytorch_are_not(name: str, every: str) -> None:
    assert train(WHOLE[name], every, lambda n, ps: torch.optim.SGD(ps, 0.05, 0.5)) == EPOCHS


def test_an_optimizers_own_numbers_do_not_count() -> None:
    assert train(WHOLE["restarts"], "step", lambda n, ps: Adapting(ps, 0.01 * (n + 1))) == EPOCHS
