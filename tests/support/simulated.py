"""Search workers whose trainers only pretend: a trial's score depends on its parameters and the epoch alone."""

import math
import os
import random
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from tests.support.fused_and_solo import ToyStudy
from trials.search.client import Search, SearchClient
from trials.search.files import checkpoint_files
from trials.search.storage.claims import Span
from trials.search.worker import WorkerConfig
from trials.search.worker_process import serve

EPOCHS = 4


class Pretended(ToyStudy):
    """Trials with one number each, of which the pruner ends some at the second epoch."""

    epochs, rungs, keep_best = EPOCHS, (1, 2, 3), 0

    def __init__(self, trials: int, fused: int = 2) -> None:
        super().__init__(lambda n: nn.Linear(1, 1), torch.optim.SGD)
        self.trials, self.fused = trials, fused

    def sampler(self) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler()

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.ThresholdPruner(lower=-0.9, n_warmup_steps=2)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0.0, 1.0)}


def score(params: dict[str, Any], epoch: int) -> float:
    """What a trial scores after so many epochs."""
    return math.sin(100 * params["x"]) * epoch / EPOCHS


@dataclass
class Trainer:
    """Trains what its search worker finds, one epoch of each trial at a time.

    Args:
        study: which one.
        search: the line to the search worker.
        directory: the study's.

    Attributes:
        trained: number -> how many epochs this trainer has trained of it, those that are lost included.
    """

    study: Pretended
    search: Search
    directory: Path
    trained: dict[int, int] = field(default_factory=dict)
    _trials: dict[int, tuple[dict[str, Any], int]] = field(default_factory=dict)
    _asked: bool = False
    _over: bool = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to train, here or elsewhere."""
        return self._over and not self._trials

    def turn(self, wait_s: float = 0.0) -> None:
        """Take the answers, train an epoch of each trial, and ask for what is missing."""
        for answer in self.search.answers(wait_s):
            for gone in ("pruned", "lost"):
                if gone in answer:
                    self._trials.pop(answer[gone], None)
            if "trials" in answer:
                self._asked, self._over = False, answer["over"]
                for each in answer["trials"]:
                    self._begin(each["number"], each["params"], each.get("epoch", 0))
        for number in tuple(self._trials):
            self._train(number)
        if len(self._trials) < self.study.rows and not self._asked and not self._over:
            self._asked = True
            self.search.send(ask=self.study.rows - len(self._trials), here=list(self._trials))

    def _begin(self, number: int, params: dict[str, Any], epoch: int) -> None:
        self._trials[number] = params, epoch
        if epoch:
            self.search.send(began=number, epoch=epoch, score=score(params, epoch))

    def _train(self, number: int) -> None:
        params, epoch = self._trials[number]
        epoch += 1
        self._trials[number] = params, epoch
        self.trained[number] = self.trained.get(number, 0) + 1
        self.search.send(trained={number: epoch})
        is_last = epoch == self.study.epochs
        if epoch == 2:
            written = checkpoint_files.temporary_path(self.directory, number, epoch)
            written.write_bytes(b"of no matter")
            self.search.send(checkpoint=number, file=str(written))
        weights = None
        if is_last and self.study.keep_best:
            weights = checkpoint_files.temporary_weights_path(self.directory, number)
            weights.write_text(f"of trial {number}")
        self.search.send(
            report=number,
            epoch=epoch,
            value=score(params, epoch),
            final=is_last,
            weights=None if weights is None else str(weights),
        )
        if is_last:
            del self._trials[number]


class Process(Trainer):
    """A trainer whose search worker is a process of its own."""

    def __init__(self, study: Pretended, config: WorkerConfig) -> None:
        assert config.directory is not None
        self.client = SearchClient(partial(serve, study, config, attached=lambda: False))
        super().__init__(study, self.client, config.directory)

    def kill(self) -> None:
        """End the search worker in the middle of whatever it does. Its trainer does nothing more either."""
        os.kill(self.client.pid, signal.SIGKILL)
        self.client.close()


def assert_ended(trials: Collection[FrozenTrial], spans: Collection[Span]) -> None:
    """Each trial has ended once, with the scores of a run alone, and what is kept covers its epochs once."""
    for trial in trials:
        assert trial.state in (TrialState.COMPLETE, TrialState.PRUNED), trial
        last = max(trial.intermediate_values)
        alone = {epoch: score(trial.params, epoch) for epoch in range(1, last + 1)}
        assert trial.intermediate_values == alone, trial
        if trial.state is TrialState.COMPLETE:
            assert last == EPOCHS and trial.value == score(trial.params, EPOCHS)
        kept = sorted(
            epoch
            for span in spans
            if span.trial == trial.number and span.kept
            for epoch in range(span.from_epoch, span.to_epoch)
        )
        assert kept == list(range(last)), f"trial {trial.number}: {kept}, {trial.state}"


def total(spans: Collection[Span], *, kept: bool) -> int:
    """How many epochs are in the accounts."""
    return sum(span.to_epoch - span.from_epoch for span in spans if span.kept is kept)


def run_until_over(workers: list[Process], hire: Callable[[], Process], kill: Callable[[], bool]) -> list[Process]:
    """Let all workers train until the study is over, and a random one die whenever `kill` says so.

    Args:
        workers: those that have begun.
        hire: begins another, in place of a dead one.
        kill: asked again and again.

    Returns:
        All workers there have been. None lives.
    """
    everyone = list(workers)
    living = list(workers)
    while not all(worker.is_over for worker in living):
        for worker in living:
            worker.turn(wait_s=0.01)
        if kill():
            dead = living.pop(random.randrange(len(living)))
            dead.kill()
            living.append(hire())
            everyone.append(living[-1])
    for worker in living:
        assert worker.client.close()
    return everyone
