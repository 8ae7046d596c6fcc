"""A study whose side task is ended in the middle of an epoch, and what comes out in the end."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial
from torch import nn
from torch.optim import lr_scheduler as lrs

from ds_hooks.shared import statuses
from tests.support.accounts import assert_accounts
from tests.support.fused_and_solo import OPTIMIZERS, AtOnce, Batch
from tests.support.rich_study import RichStudy
from tests.support.side_task_runs import Direct, data
from trials.gate.base import OpenGate, StopRequested
from trials.search.files import checkpoint_files
from trials.search.worker import SearchWorker, WorkerConfig
from trials.side_task.scheduler import Scheduler

BATCHES, SAMPLES = 5, 5


class Killed(BaseException):
    """What a SIGKILL is to this process."""


class Asked(OpenGate):
    """Asks to end from the given time on that it is asked, counted from 1, but lets finish what goes on."""

    def __init__(self, at: int = 10**9) -> None:
        self.asked, self._at = 0, at

    def enter(self, unit: int) -> None:
        self.asked += 1
        if self.asked >= self._at and not self.finishes:
            raise StopRequested


class Killing(Asked):
    """Kills there."""

    def enter(self, unit: int) -> None:
        self.asked += 1
        if self.asked == self._at:
            raise Killed


class Long(RichStudy):
    """Trials with all that a step can have, which train as one group to their ends."""

    trials, epochs, keep_best = 3, 3, 3
    rungs: tuple[int, ...] = (2,)
    length: Callable[[int], int] = staticmethod(lambda epoch: BATCHES)

    def batches(self, epoch: int) -> Iterable[Batch]:
        return data(epoch, self.length(epoch))

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.NopPruner()


def make_study(fused: int = 3, accumulate: int = 1, own: bool = False, every: str = "step") -> Long:
    def model(n: int) -> nn.Module:
        layers = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.1 + 0.1 * n), nn.Linear(4, 2)
        return nn.Sequential(*layers)

    study = Long(
        model,
        lambda n, parameters: OPTIMIZERS["adamw"](n, parameters),
        [(x.float(), y) for x, y in data(0, 2)],
        schedule=lambda n, o: [lrs.StepLR(o, 2), lrs.ReduceLROnPlateau(o, patience=0)][: 2 if n == 1 else 1],
        every=every,
        norm=lambda n: 0.5 if n else None,
        scale=lambda n: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if n == 2 else None,
        own=lambda n, epoch: [(x.float(), y) for x, y in data(100 * n + epoch, BATCHES)] if own else None,
    )
    study.fused, study.accumulate = fused, accumulate
    study.batches = lambda epoch: [(x.float(), y) for x, y in data(epoch, study.length(epoch))]  # type: ignore[method-assign]
    return study


def work(
    study: Long, directory: Path, gate: OpenGate | None = None, line: type[Direct] = Direct, name: str = "w"
) -> tuple[SearchWorker, list[statuses.Status], BaseException | None]:
    """Run a side task to its end. Returns its search worker, what it reported, and how it was ended."""
    config = WorkerConfig(storage=str(directory / "study.journal"), study_name="s", worker=name, directory=directory)
    worker = SearchWorker(study, config, AtOnce())
    reported: list[statuses.Status] = []
    search = line(worker)
    scheduler = Scheduler(study, gate or OpenGate(), search, reported.append, directory=directory)
    try:
        scheduler.run()
    except (StopRequested, Killed) as ended:
        if isinstance(ended, StopRequested):
            worker.stop()
            scheduler.hear_out(search.answers())
        return worker, reported, ended
    return worker, reported, None


Result = tuple[list[tuple[dict[int, float], dict[str, Any]]], dict[str, dict[str, torch.Tensor]]]


def result(worker: SearchWorker, directory: Path) -> Result:
    """Each trial's scores and losses, and the weights of all."""
    trials = worker._study.get_trials()
    weights = {file.name: torch.load(file, weights_only=True) for file in directory.glob("best/*.pt")}
    return [(trial.intermediate_values, trial.user_attrs["squeezer_history"]) for trial in trials], weights


def assert_same(found: Result, wanted: Result) -> None:
    """Bit for bit."""
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys() and len(wanted[1]) == Long.trials
    for name, weights in wanted[1].items():
        assert all(torch.equal(found[1][name][key], value) for key, value in weights.items()), name


def trained(reported: list[statuses.Status]) -> int:
    return [each for each in reported if isinstance(each, statuses.Progress)][-1].work


def assert_all_accounted(worker: SearchWorker) -> list[FrozenTrial]:
    trials = worker._study.get_trials()
    assert len(trials) == Long.trials and all(trial.state.name == "COMPLETE" for trial in trials)
    assert_accounts(worker._claims.spans(), trials)
    return trials


def batches_of(study: Long, give: Callable[[int], Iterable[Batch]]) -> Long:
    study.batches = give  # type: ignore[method-assign,assignment]
    return study


def saved(directory: Path) -> dict[int, list[str]]:
    """The checkpoints of each trial, the newest first."""
    folders = (directory / "checkpoints").glob("[0-9]*")
    return {int(each.name): [file.name for file in checkpoint_files.found(each)] for each in folders}
