"""Speedup of a pruned study when freed rows go to new trials in the same group, each at its own epoch.

    python -m benchmarks.refill [--quick] [--json FILE]

The example's study is pruned at its rungs and trained to its end without a gate, over and over: *mixed*, as usual, and
*apart*, with trials at different epochs in groups of their own (`mix_epochs = False`). The two alternate with every
training step, so that both meet the same machine. The figure is work per CPU time of training.

For each model of `benchmarks.fusion`: one step of 16 trials, half of them at another epoch, against two groups of 8.
"""

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import thread_time
from typing import Any

import optuna
import torch

from benchmarks.shared.fused_models import MODELS, QUICK_MODELS, Classes, Together
from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.paths import ROOT
from benchmarks.shared.results import finish, kept_runs, parse
from trials.gate.base import OpenGate
from trials.search.worker import SearchWorker, WorkerConfig
from trials.search.worker_process import answers_to
from trials.side_task.scheduler import Scheduler
from trials.study import load_study
from trials.training.inputs.batches import fuse_batches
from trials.training.rehearsal import rehearse

STUDY = ROOT / "examples" / "digits.py"
TRIALS, PAIRS = 96, 6
EPOCHS, RUNGS = 30, (4, 8, 16)
QUICK_TRIALS, QUICK_PAIRS = 64, 2
ROWS, STEPS, QUICK_STEPS, WARM_UP_STEPS = 16, 24, 8, 3


class Turns:
    """Makes two threads run one at a time, until one has ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._ended = False

    def wait(self, own: int) -> None:
        """Wait for the turn of `own`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._turn == own)

    def pass_on(self, own: int, *, ended: bool = False) -> None:
        """Let the other thread run."""
        with self._changed:
            self._turn, self._ended = 1 - own, self._ended or ended
            self._changed.notify_all()


NAMES = ("mixed", "apart")


class Ungated(OpenGate):
    """An open gate that counts the work, and passes the turn after each training step."""

    def __init__(self, turns: Turns, own: int) -> None:
        self.work = 0
        self._turns, self._own = turns, own

    def add_work(self, trial_samples: int) -> None:
        """See `Gate.add_work`."""
        self.work += trial_samples
        self._turns.pass_on(self._own)
        self._turns.wait(self._own)


class Inside:
    """The line to a search worker in this thread, whose time is not training's."""

    def __init__(self, worker: SearchWorker) -> None:
        self._search = worker
        self._answers: list[dict[str, Any]] = []
        self.cpu_s = 0.0

    def send(self, **request: Any) -> None:
        """Answer at once."""
        start_s = thread_time()
        self._answers += answers_to(self._search, request)
        self.cpu_s += thread_time() - start_s

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """The answers since the last call."""
        found, self._answers = self._answers, []
        return found


def main() -> int:
    """Measure, print, write."""
    options = parse("refill", "work per CPU time of a pruned study, with its rows refilled and not")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    runs = kept_runs(options)
    if options.only in (None, "study"):
        runs.append({"scenario": "study", "pairs": _study_pairs(options.quick)})
    for name in QUICK_MODELS if options.quick else MODELS:
        if options.only in (None, name):
            runs.append({"scenario": name, "pairs_ms": _step_pairs(name, options.quick)})
            print(name, runs[-1]["pairs_ms"][-1], flush=True)
    finish("refill", options, runs, _summary(runs))
    return 0


def _step_pairs(name: str, quick: bool) -> list[tuple[float, float]]:
    """CPU ms of (two groups of half the trials, one group with two epochs' batches) for a step of all trials."""
    study = Classes(name)
    inputs, targets = study.batch
    batches = [(inputs, targets), (inputs.clone(), targets.clone())]
    whole = Together(study, ROWS).group
    halves = [Together(study, ROWS // 2).group for _ in batches]

    def apart() -> None:
        for half, batch in zip(halves, batches, strict=True):
            half.train_step(*batch)

    def mixed() -> None:
        whole.train_step(*fuse_batches([batches[row % 2] for row in range(ROWS)]))

    for step in (apart, mixed) * WARM_UP_STEPS:
        step()
    return [(_cpu_ms(apart), _cpu_ms(mixed)) for _ in range(QUICK_STEPS if quick else STEPS)]


def _cpu_ms(step: Callable[[], None]) -> float:
    start_s = thread_time()
    step()
    return round((thread_time() - start_s) * 1e3, 3)


def _study_pairs(quick: bool) -> list[dict[str, dict[str, Any]]]:
    rehearse(load_study(STUDY))
    pairs = []
    for seed in range(QUICK_PAIRS if quick else PAIRS):
        turns = Turns()
        with ThreadPoolExecutor(2) as threads:
            both = {name: threads.submit(_train, name, own, turns, seed, quick) for own, name in enumerate(NAMES)}
        pairs.append({name: each.result() for name, each in both.items()})
        print(pairs[-1], flush=True)
    return pairs


def _train(name: str, own: int, turns: Turns, seed: int, quick: bool) -> dict[str, Any]:
    turns.wait(own)
    try:
        study = load_study(STUDY)
        study.trials = QUICK_TRIALS if quick else TRIALS
        study.epochs, study.rungs = EPOCHS, RUNGS
        study.mix_epochs = name == "mixed"
        study.sampler = lambda: optuna.samplers.RandomSampler(seed=seed)  # type: ignore[method-assign]
        gate = Ungated(turns, own)
        with tempfile.TemporaryDirectory(prefix="bsq-") as folder, ThreadPoolExecutor(1) as holder:
            storage, directory = f"{folder}/study.journal", Path(folder) / "digits"
            config = WorkerConfig(storage=storage, study_name="digits", worker="w", directory=directory)
            line = Inside(SearchWorker(study, config, holder))
            start_s = thread_time()
            Scheduler(study, gate, line, lambda _: None).run()
            cpu_s = thread_time() - start_s - line.cpu_s
    finally:
        turns.pass_on(own, ended=True)
    return {"work": gate.work, "cpu_s": round(cpu_s, 3), "work_per_s": round(gate.work / cpu_s)}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Work per CPU time, mixed ÷ apart."""
    summary: dict[str, Any] = {}
    for run in runs:
        if run["scenario"] == "study":
            pairs = [(pair["mixed"]["work_per_s"], pair["apart"]["work_per_s"]) for pair in run["pairs"]]
        else:
            pairs = run["pairs_ms"]
        ratio, ci95 = ratio_with_ci95(pairs)
        summary[f"{run['scenario']}_mixed_over_apart"] = round(1 + ratio, 3)
        summary[f"{run['scenario']}_mixed_over_apart_ci95"] = [round(1 + bound, 3) for bound in ci95]
    return summary


if __name__ == "__main__":
    sys.exit(main())
