"""A search worker whose trainer only pretends: it reports at once what a trial would score."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import optuna

from benchmarks.search_cost.filled import history, score
from benchmarks.shared.paths import ROOT
from trials.search.worker import SearchWorker, WorkerConfig
from trials.study import Study, load_study

NAME, FUSED = "digits", 16
DEFAULT, RANDOM, ASHA = "default", "random", "asha"
"""Searches: Optuna's default sampler and pruner, which look at all trials; two that look at none; and promotion."""


def searched(search: str, trials: int) -> Study:
    """The example's study, with three rungs, under one of the searches."""
    study = load_study(ROOT / "examples" / "digits.py")
    study.trials, study.fused = trials, FUSED
    if search == ASHA:
        study.search = "asha"
    if search != DEFAULT:
        vars(study).update(sampler=optuna.samplers.RandomSampler, pruner=optuna.pruners.NopPruner)
    return study


@contextmanager
def search_worker(study: Study, storage: str, directory: Path, name: str) -> Iterator[SearchWorker]:
    """A search worker as the side task has it, in this process."""
    config = WorkerConfig(storage=storage, study_name=NAME, worker=name, directory=directory)
    with ThreadPoolExecutor(1) as holder:
        worker = SearchWorker(study, config, holder)
        yield worker
        worker.stop()


def train_one(study: Study, worker: SearchWorker) -> int:
    """Ask for one trial, and report its scores until it ends or pauses. Returns how many there were."""
    (trial,) = worker.ask(1)["trials"]
    number, begun, last = trial["number"], trial.get("epoch", 0), trial.get("milestone", study.epochs)
    scores: dict[int, float] = {}
    for epoch in (*study.rungs, study.epochs):
        if begun < epoch <= last:
            scores[epoch] = score(number, epoch / study.epochs)
            worker.note({number: epoch})
            said = worker.report(number, epoch, scores[epoch], epoch == study.epochs, history=history(scores))
            if said not in (None, {"kept": number}):
                break
    return len(scores)
