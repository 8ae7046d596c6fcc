"""Training without a gate: the rehearsal before a study, and what a device of the study's own would do."""

import sys
import time
from collections.abc import Iterator
from itertools import count

import optuna

from trials.gate import OpenGate
from trials.group import TrialGroup
from trials.member import build_member
from trials.study import Study


def train_ungated(study: Study, trials: int) -> Iterator[int]:
    """Train `trials` fused trials with hyperparameters drawn at random, as long as the caller asks.

    Yields:
        The trial-samples of each epoch.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    members = [build_member(study, k, study.suggest(draws.ask())) for k in range(trials)]
    group = TrialGroup(study, members, OpenGate())
    for epoch in count():
        work = 0
        for inputs, targets, per_trial in group.batches(epoch % study.epochs):
            group.train_step(inputs, targets, per_trial)
            work += targets.shape[0] * targets.shape[1] if per_trial else trials * len(targets)
        group.end_epoch()
        yield work


def rehearse(study: Study) -> None:
    """Train two throw-away trials for an epoch: what is imported, compiled or wrong shows before the gate counts."""
    try:
        next(train_ungated(study, trials=2))
    except Exception as error:
        print(
            f"[trials] a rehearsal of {type(study).__name__} failed: {type(error).__name__}: {error}", file=sys.stderr
        )


SLICES = 4


def measure_dedicated(study: Study, trials: int, seconds: float) -> dict[str, float]:
    """Train `trials` fused trials ungated for `seconds`: what this core would do if it were the study's own.

    Whatever else the machine does in that time can only slow it down, so the fastest of four slices counts.

    Returns:
        ``{"trials": K, "work_per_s": trial-samples per second}``, without the first epoch.
    """
    epochs = train_ungated(study, trials)
    next(epochs)
    return {"trials": trials, "work_per_s": max(_rate(epochs, seconds / SLICES) for _ in range(SLICES))}


def _rate(epochs: Iterator[int], seconds: float) -> float:
    work = 0
    start_s = time.monotonic()
    while not work or time.monotonic() < start_s + seconds:
        work += next(epochs)
    return work / (time.monotonic() - start_s)
