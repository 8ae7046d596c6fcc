"""Schedulers, limits and scalers that would do to fused trials what they do not do alone are refused, at the start."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import members
from tests.support.rich_study import RichStudy
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(6)) for _ in range(2)]


def train(study: RichStudy) -> None:
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    for batch in group.batches(0):
        group.train_step(*batch)
    group.end_epoch()


class By(lrs.LRScheduler):
    """The learning rate times a factor that it finds in its optimizer once training has begun."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[torch.optim.Optimizer], float]) -> None:
        self.factor, self.begun = factor, False
        super().__init__(optimizer)
        self.begun = True

    def get_lr(self) -> Any:
        factor = self.factor(self.optimizer) if self.begun else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


class Holding(lrs.LRScheduler):
    """The same, from parameters that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.held = [p for group in optimizer.param_groups for p in group["params"]]
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] / (1 + self.held[0].norm().item()) for group in self.optimizer.param_groups]


READING: dict[str, Callable[[torch.optim.Optimizer], float]] = {
    "first": lambda o: float(o.param_groups[0]["params"][0].detach().norm()),
    "all": lambda o: sum(float(p.detach().norm()) for group in o.param_groups for p in group["params"]),
    "number": lambda o: 1 / (1 + len(o.param_groups[0]["params"])),
    "any": lambda o: 0.5 if o.param_groups[0]["params"] else 1.0,
    "state": lambda o: 1 / (1 + len(o.state)),
    "moments": lambda o: 1 / (1 + sum(float(s["exp_avg_sq"].sum()) for s in o.state.values())),
}


@pytest.mark.parametrize("name", READING)
def test_a_scheduler_that_reads_what_all_trials_have_as_one(name: str) -> None:
    study = RichStudy(model, "adam", DATA, lambda n, o: By(o, READING[name]))
    with pytest.raises(FuseError, match=r"Study\.scheduler reads the (parameters|state) of its optimizer"):
        train(study)


def test_a_scheduler_that_holds_parameters() -> None:
    for optimizer in ("adam", lambda n, ps: torch.optim.Rprop(ps, 0.01)):
        with pytest.raises(FuseError, match=r"Study\.scheduler: .* holds a Parameter at '.*held\[0\]'"):
            train(RichStudy(model, optimizer, DATA, lambda n, o: Holding(o)))


def test_a_trial_is_put_back_with_its_scheduler() -> None:
    study = RichStudy(model, "adam", DATA, lambda n, o: lrs.StepLR(o, 1, 0.5), "step")
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    put_back = group.saved()
    group.train_step(*DATA[0])
    after = group.extract(0)[1]["param_groups"][0]["lr"]
    put_back()
    group.train_step(*DATA[0])
    assert group.extract(0)[1]["param_groups"][0]["lr"] == after


DRAWING: dict[str, tuple[Callable[[], float], str]] = {
    "torch": (lambda: torch.rand(()).item(), "draws PyTorch's random numbers"),
    "python": (random.random, "draws from Python's random"),
}


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", DRAWING)
def test_a_scheduler_that_draws(name: str, every: str) -> None:
    draw, message = DRAWING[name]
    study = RichStudy(model, "adam", DATA, lambda n, o: By(o, lambda _: draw()), every)
    with pytest.raises(FuseError, match=message):
        train(study)


class Falling:
    """Another limit at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, n: int) -> float:
        self.calls += 1
        return 1.0 / self.calls


class Adapting:
    """A limit that is a number only when it is asked."""

    def __float__(self) -> float:
        return 0.5

    def __gt__(self, other: float) -> bool:
        return True


@pytest.mark.parametrize("which", ["norm", "value"])
def test_a_limit_with_a_state(which: str) -> None:
    limits: Any = {which: Falling()}
    with pytest.raises(FuseError, match=rf"Study\.clip_{which} returned 1\.0 and then 0\.5 for one trial"):
        train(RichStudy(model, "adam", DATA, **limits))
    limits = {which: lambda n: Adapting()}
    with pytest.raises(FuseError, match=rf"Study\.clip_{which} returned .*Adapting.*; allowed: a positive number"):
        train(RichStudy(model, "adam", DATA, **limits))


class OwnScaler(torch.amp.GradScaler):
    """Has a rule of its own."""

    def update(self, new_scale: Any = None) -> None:
        super().update(2.0)


def test_a_scaler_of_ones_own() -> None:
    with pytest.raises(FuseError, match=r"Study\.scaler returned OwnScaler; allowed: torch\.amp\.GradScaler"):
        train(RichStudy(model, "adam", DATA, scale=lambda n: OwnScaler("cpu", init_scale=4.0)))
