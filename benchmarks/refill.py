"""What it gains to give rows that pruning frees to new trials in the same group, at an epoch of their own.

    python -m benchmarks.refill [--quick] [--json FILE]

The example's study, pruned at its rungs, is trained to its end without a gate, over and over: mixed, as it is done, and
with trials at different epochs in groups of their own that take turns (`mix_epochs = False`). The two alternate with
every training step, so that both see the same machine. What counts is the work per CPU time of training.
"""

import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import thread_time
from typing import Any

import optuna
import torch

from benchmarks.common import ROOT, finish, parse, ratio_with_ci95
from trials.clerk import Clerk, ClerkPlace, _answer
from trials.gate import OpenGate
from trials.study import load_study
from trials.ungated import rehearse
from trials.work import Runner

STUDY = ROOT / "examples" / "digits.py"
TRIALS, PAIRS = 96, 6
SCENARIOS = ("mixed", "apart")
QUICK_TRIALS, QUICK_PAIRS = 64, 2


class Turns:
    """Two threads, of which one runs at a time, until one has ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._ended = False

    def wait(self, own: int) -> None:
        """Until it is `own` turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._turn == own)

    def pass_on(self, own: int, *, ended: bool = False) -> None:
        """Let the other one run."""
        with self._changed:
            self._turn, self._ended = 1 - own, self._ended or ended
            self._changed.notify_all()


class Ungated(OpenGate):
    """Counts the work, and passes on the turn after each training step."""

    def __init__(self, turns: Turns, own: int) -> None:
        self.trials = 0
        self.work = 0
        self._turns, self._own = turns, own

    def add_work(self, trial_samples: int) -> None:
        """See `Ledger`."""
        self.work += trial_samples
        self._turns.pass_on(self._own)
        self._turns.wait(self._own)

    def take_starved(self) -> list[Any]:
        """No unit is too long."""
        return []


class Inside:
    """The line to a clerk in this thread, whose time is not training's."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk
        self._answers: list[dict[str, Any]] = []
        self.cpu_s = 0.0

    def send(self, **request: Any) -> None:
        """Answer at once."""
        start_s = thread_time()
        answer = _answer(self._clerk, request)
        self._answers += [] if answer is None else [answer]
        self.cpu_s += thread_time() - start_s

    def answers(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """What was answered since the last call."""
        found, self._answers = self._answers, []
        return found


def main() -> int:
    """Measure."""
    options = parse("refill", "work per CPU time of a pruned study, with its rows refilled and not")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    rehearse(load_study(STUDY))
    runs: list[dict[str, Any]] = []
    for pair in range(QUICK_PAIRS if options.quick else PAIRS):
        turns, found = Turns(), dict[str, dict[str, Any]]()
        threads = [
            threading.Thread(target=_train, args=(name, own, turns, pair, options.quick, found))
            for own, name in enumerate(SCENARIOS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        runs += [{"scenario": name, "pair": pair, **found[name]} for name in SCENARIOS]
        print(*runs[-2:], sep="\n", flush=True)
    finish("refill", options, runs, _summary(runs))
    return 0


def _train(name: str, own: int, turns: Turns, seed: int, quick: bool, found: dict[str, dict[str, Any]]) -> None:
    turns.wait(own)
    study = load_study(STUDY)
    study.trials = QUICK_TRIALS if quick else TRIALS
    study.mix_epochs = name == "mixed"
    study.sampler = lambda: optuna.samplers.RandomSampler(seed=seed)  # type: ignore[method-assign]
    gate = Ungated(turns, own)
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder, ThreadPoolExecutor(1) as holder:
        place = ClerkPlace(
            storage=f"{folder}/study.journal", study_name="digits", worker="w", lock_file=Path(folder, "lock")
        )
        line = Inside(Clerk(study, place, holder))
        start_s = thread_time()
        Runner(study, gate, line, lambda **_: None).run()  # type: ignore[arg-type]
        cpu_s = thread_time() - start_s - line.cpu_s
    turns.pass_on(own, ended=True)
    found[name] = {"work": gate.work, "cpu_s": round(cpu_s, 3), "work_per_s": round(gate.work / cpu_s)}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mixed, apart = ([run["work_per_s"] for run in runs if run["scenario"] == name] for name in SCENARIOS)
    ratio, ci95 = ratio_with_ci95(list(zip(mixed, apart, strict=True)))
    return {
        "mixed_work_per_s": round(sum(mixed) / len(mixed)),
        "apart_work_per_s": round(sum(apart) / len(apart)),
        "mixed_over_apart": round(1 + ratio, 3),
        "mixed_over_apart_ci95": [round(1 + bound, 3) for bound in ci95],
    }


if __name__ == "__main__":
    sys.exit(main())
