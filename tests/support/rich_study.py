"""A study with schedulers, clipping and loss scaling, and the ordinary loop that one of its trials would be."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tests.support.fused_and_solo import Batch, Solo, ToyStudy, called, given_params, only_optimizer
from trials import Study
from trials.training.member import build

Schedule = Callable[[int, torch.optim.Optimizer], Any]


class RichStudy(ToyStudy):
    """Settings are functions of the trial's number."""

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        optimizer: Any = "sgd",
        batches: Sequence[Batch] = (),
        schedule: Schedule | None = None,
        every: str = "epoch",
        norm: Callable[[int], float | None] = lambda n: None,
        value: Callable[[int], float | None] = lambda n: None,
        scale: Callable[[int], torch.amp.GradScaler | None] = lambda n: None,
        own: Callable[[int, int], Iterable[Batch] | None] = lambda n, epoch: None,
    ) -> None:
        super().__init__(make, optimizer, batches)
        self.schedule, self.scheduler_every = schedule, every
        self.norm, self.value, self.scale, self.own = norm, value, scale, own

    def scheduler(self, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        return None if self.schedule is None else self.schedule(params["n"], optimizer)

    def clip_norm(self, params: dict[str, Any]) -> float | None:
        return self.norm(params["n"])

    def clip_value(self, params: dict[str, Any]) -> float | None:
        return self.value(params["n"])

    def scaler(self, params: dict[str, Any]) -> torch.amp.GradScaler | None:
        return self.scale(params["n"])

    def trial_batches(self, params: dict[str, Any], number: int, epoch: int) -> Iterable[Batch] | None:
        return self.own(params["n"], epoch)


class RichSolo(Solo):
    """One trial of any study in an ordinary loop, with PyTorch's own schedulers, clipping and `GradScaler`."""

    def __init__(self, study: Study, number: int) -> None:
        self.study, self.number, self.params = study, number, {"n": number}
        built = build(study, number, self.params)
        self.model, self.optimizer, self.rng_state = built.model, only_optimizer(built), built.rng_state
        self.schedulers: Sequence[LRScheduler] = built.schedulers
        self.scaler = study.scaler(self.params) or torch.amp.GradScaler("cpu", enabled=False)
        self.epochs = 0
        self.losses: list[float] = []
        """The mean of each epoch."""

    def step(self, *batches: Any) -> None:
        """One optimizer step: of inputs and targets, or of several pairs whose losses are averaged."""
        pairs: Any = batches if isinstance(batches[0], tuple) and len(batches[0]) == 2 else [batches]
        with torch.random.fork_rng():
            torch.set_rng_state(self.rng_state)
            self.model.train()
            self.model.zero_grad()
            losses = []
            for inputs, targets in pairs:
                loss = given_params(self.study.loss, self.params, called(self.model, inputs), targets)
                self.scaler.scale(loss / len(pairs)).backward()
                losses.append(loss.item())
            self.scaler.unscale_(self.optimizer)
            value, norm = self.study.clip_value(self.params), self.study.clip_norm(self.params)
            if value is not None:
                nn.utils.clip_grad_value_(self.model.parameters(), value)
            if norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.study.scheduler_every == "step":
                self.step_schedulers()
            self.rng_state = torch.get_rng_state()
        self.loss = sum(losses) / len(losses)

    def step_schedulers(self) -> None:
        for scheduler in self.schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def epoch(self) -> None:
        own = self.study.trial_batches(self.params, self.number, self.epochs)
        waiting = list(self.study.batches(self.epochs) if own is None else own)
        total, count = 0.0, len(waiting)
        while waiting:
            taken, waiting = waiting[: self.study.accumulate], waiting[self.study.accumulate :]
            if self.study.accumulate > 1:
                self.step(*((inputs, targets) for inputs, targets in taken))
            else:
                self.step(*taken[0])
            total += self.loss * len(taken)
        self.losses.append(total / count)
        self.end_epoch()

    def end_epoch(self) -> None:
        self.epochs += 1
        if self.study.scheduler_every == "epoch":
            self.step_schedulers()
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(self.score())
