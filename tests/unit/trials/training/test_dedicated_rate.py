"""The rate of a dedicated device: it does not suffer from what else the machine runs, and needs no whole epoch."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from tests.support.fused_and_solo import ToyStudy
from tests.support.paths import ROOT
from trials.fusion import FuseError
from trials.training import rehearsal
from trials.training.rehearsal import _own_s, _trained, measure_dedicated, rehearse, train_ungated

NICENESS = 10  # beside niceness 0: about a tenth of the core


def steps(cpu_s: float) -> Iterator[tuple[int, float]]:
    """Each takes `cpu_s` of CPU time, and is a work of 1."""
    while True:
        began_s, start_s = _own_s(), time.thread_time()
        while time.thread_time() < start_s + cpu_s:
            pass
        yield 1, _own_s() - began_s


def test_time_in_which_others_had_the_core_does_not_count() -> None:
    command = [sys.executable, "-m", "tests.unit.trials.training.test_dedicated_rate"]
    measured = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, timeout=120)
    rate, by_clock = map(float, measured.stdout.split())
    assert rate > 50  # of the 100 that a core of its own would give
    assert rate > 2 * by_clock


class Endless(ToyStudy):
    """Its epochs never end."""

    trials, fused = 4, "auto"

    def batches(self, epoch: int) -> Any:
        return itertools.cycle(self.data)


class OneCycle(ToyStudy):
    """Its schedulers refuse a step after the last."""

    epochs, scheduler_every = 2, "step"

    def scheduler(self, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        return lrs.OneCycleLR(optimizer, 0.1, total_steps=self.epochs * len(self.data))


def test_a_machine_that_changes_its_speed_counts_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has slow moments, too: measured against the fastest only, it would seem to train slowly."""
    slow_and_fast = {4: [0.3, 0.1], 1: [0.2, 0.1]}

    def scripted(study: Any, trials: int) -> Iterator[tuple[int, float]]:
        return ((trials, took_s) for took_s in itertools.cycle(slow_and_fast[trials]))

    monkeypatch.setattr(rehearsal, "train_ungated", scripted)
    measured = measure_dedicated(study_of(ToyStudy, 1), 4, seconds=8 * 0.1)
    assert measured["work_per_s"] == pytest.approx(4 / 0.2)
    assert measured["few_work_per_s"] == pytest.approx(1 / 0.15)


def study_of(kind: type[ToyStudy], batches: int) -> ToyStudy:
    return kind(lambda n: nn.Linear(3, 2), "adamw", [(torch.ones(5, 3), torch.zeros(5))] * batches)


def test_an_epoch_need_not_end(caplog: pytest.LogCaptureFixture) -> None:
    study = study_of(Endless, 1)
    assert rehearse(study).gain is not None and "failed" not in caplog.text
    measured = measure_dedicated(study, 4, 0.1)
    assert (measured["trials"], measured["few_trials"]) == (4, 1)
    assert measured["work_per_s"] > 0 and measured["few_work_per_s"] > 0


def test_schedulers_take_no_more_steps_than_a_trial_has() -> None:
    steps = list(itertools.islice(train_ungated(study_of(OneCycle, 3), 2), 20))
    assert {work for work, _ in steps} == {10}


def test_a_study_without_batches_is_refused() -> None:
    with pytest.raises(FuseError, match="gave no batches in epoch 0"):
        next(train_ungated(study_of(ToyStudy, 0), 2))


def _print_rates() -> None:
    """Measure on a core that a busy process has most of; print the rate, and that by the clock."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            os.nice(NICENESS)
            done: list[int] = []
            start_s = time.monotonic()
            work, took_s = _trained((done.append(step[0]) or step for step in steps(cpu_s=0.01)), seconds=0.2)
            print(work / took_s, sum(done) / (time.monotonic() - start_s))
        finally:
            busy.kill()


if __name__ == "__main__":
    _print_rates()
