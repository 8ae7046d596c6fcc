"""Whole runs of a small study: the search worker answers at once, and the gate is open."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial
from torch import nn
from torch.optim import lr_scheduler as lrs

from ds_hooks.shared.statuses import Status
from tests.support.fused_and_solo import OPTIMIZERS, AtOnce, Batch, close
from tests.support.rich_study import RichSolo, RichStudy
from trials.gate.base import OpenGate, Starved
from trials.search.worker import SearchWorker, WorkerConfig
from trials.search.worker_process import answers_to
from trials.side_task.scheduler import Scheduler

MS = 1_000_000
EPOCHS = 3


class Direct:
    """The line to a search worker in this process."""

    def __init__(self, worker: SearchWorker) -> None:
        self._search = worker
        self._answers: list[dict[str, Any]] = []

    def send(self, **request: Any) -> None:
        self._answers += answers_to(self._search, request)

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        found, self._answers = self._answers, []
        return found


def expire(worker: SearchWorker, name: str) -> None:
    """The lease of the worker called `name` has run out, and `worker` notices."""
    worker._lock.alone(lambda held: worker._released(held, held.release(name, died=True)))


class Starving(OpenGate):
    """Open, but finds a unit too long when it is asked for the given times, counted from 1."""

    def __init__(self, times: Collection[int], needs_ms: Callable[[int], int] = lambda trials: 1 + trials) -> None:
        self._trials = 0
        self._times, self._needs_ms = times, needs_ms
        self.asked = 0
        self.sizes: list[int] = []

    def use(self, units: Sequence[str], trials: int) -> None:
        self._trials = trials
        self.sizes.append(trials)

    def take_starved(self) -> list[Starved]:
        self.asked += 1
        if self.asked not in self._times:
            return []
        needs_ns = self._needs_ms(self._trials) * MS
        short = Starved(unit="score", trials=self._trials, needs_ns=MS, longest_ns=MS // 2)
        return [short, Starved(unit="loss", trials=self._trials, needs_ns=needs_ns, longest_ns=3 * MS)]


class Seven(RichStudy):
    """Seven trials, four at once: number 1 diverges, number 2 is pruned. Every epoch has other batches."""

    trials, fused, epochs = 7, 4, EPOCHS
    rungs: tuple[int, ...] = (1, 2)
    length: Callable[[int], int]
    """Batches of an epoch."""

    def batches(self, epoch: int) -> list[Batch]:
        return data(epoch, self.length(epoch))

    def pruner(self) -> optuna.pruners.BasePruner:
        class Second(optuna.pruners.BasePruner):
            def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
                return trial.number == 2

        return Second()


def data(seed: int, length: int) -> list[Batch]:
    stream = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 3, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(length)]


def make_study(own: bool, length: Callable[[int], int] = lambda epoch: 3) -> Seven:
    def model(n: int) -> nn.Module:
        layers = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.1 * (n % 4)), nn.Linear(4, 2)
        return nn.Sequential(*layers).double()

    def optimizer(n: int, parameters: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS["adamw"](n % 5, parameters)
        if n == 1:
            made.param_groups[0]["lr"] = 1e300
        return made

    study = Seven(
        model,
        optimizer,
        data(0, 3),
        schedule=lambda n, o: [lrs.StepLR(o, 1), *([lrs.ReduceLROnPlateau(o, patience=0)] if n % 2 else [])],
        own=lambda n, epoch: data(100 * n + epoch, length(epoch)) if own else None,
    )
    study.length = length
    return study


class Widths(Seven):
    """Many trials of models whose width the trial's number decides."""

    trials, fused, epochs, rungs = 32, 16, 2, (1, 2)

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.NopPruner()


def of_widths(width: Callable[[int], int]) -> Widths:
    def model(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width(n)), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width(n), 2)).double()

    study = Widths(model, lambda n, parameters: OPTIMIZERS["adamw"](n % 5, parameters), data(0, 3))
    study.length = lambda epoch: 3
    return study


def run(own: bool, gate: Starving, study: Seven | None = None) -> tuple[list[FrozenTrial], list[Status]]:
    """The trials in the end, and the statuses that were sent."""
    study = study or make_study(own)
    config = WorkerConfig(storage="sqlite:///:memory:", study_name="s", worker="w")
    worker = SearchWorker(study, config, AtOnce())
    reported: list[Status] = []
    Scheduler(study, gate, Direct(worker), reported.append).run()
    return worker._study.get_trials(), reported


def assert_as_alone(trials: Sequence[FrozenTrial], study: Seven) -> None:
    """Each trial's scores are those of an ordinary loop over its batches."""
    assert any(trial.intermediate_values for trial in trials), "there is something to compare"
    for trial in trials:
        solo = RichSolo(study, trial.number)
        for epoch in range(1, max(trial.intermediate_values, default=0) + 1):
            solo.epoch()
            if epoch in study.rungs or epoch == study.epochs:
                close(trial.intermediate_values[epoch], solo.score(), f"trial {trial.number} epoch {epoch}")
