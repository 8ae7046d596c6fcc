"""What a pause costs a side task: the CPU time of its steps after one, against steps without pauses.

    python -m benchmarks.pauses [--quick] [--json FILE]

16 fused trials of the example's study train on one core in bursts of six steps, as in bubbles of some 20 ms. Before
each burst they pause for 30 ms, in which the core idles (`asleep`) or another process computes convolutions on it (`in
turn`). Bursts of these kinds, and steps without a pause, follow in random order, a round of all three at a time. The
figures: how much longer a step takes by its place after the pause, how many steps' time a pause costs in all, and how
far the machine's own speed, in steps without a pause, drifts from the fastest tenth of rounds to the slowest.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, quantiles
from typing import Any

import torch

from benchmarks.shared.intervals import mean_and_ci95, ratio_with_ci95
from benchmarks.shared.results import finish, kept_runs, parse
from benchmarks.studies import MANY_DIGITS
from trials.gate.base import OpenGate
from trials.study import load_study
from trials.training.group import TrialGroup
from trials.training.member import build_member

NAME = "pauses"
TRIALS, BURST, BURSTS, PAUSE_S = 16, 6, 4, 0.03
ROUNDS, QUICK_ROUNDS = 150, 15
ASLEEP, IN_TURN = "asleep", "in turn"
MAIN = """
import torch
torch.set_num_threads(1)
layers = [torch.nn.Conv2d(n, m, 3, padding=1) for n, m in ((3, 32), (32, 64), (64, 64), (64, 3))]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters())
images = torch.randn(16, 3, 64, 64)
while True:
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(flush=True)  # a byte each, which the pipe has room for
"""


def main() -> int:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs = [*kept_runs(options), _measure(QUICK_ROUNDS if options.quick else ROUNDS)]
    finish(NAME, options, runs, summary(runs))
    return 0


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By kind of pause: each step's ratio to steps without a pause, and what a pause costs in such steps; intervals."""
    figures: dict[str, Any] = {}
    rounds = [round_ for run in runs for round_ in run["rounds_ms"]]
    for kind in (ASLEEP, IN_TURN):
        label = kind.replace(" ", "_")
        for place in range(BURST):
            ratio, interval = ratio_with_ci95([(found[kind][place], found["without"][0]) for found in rounds])
            figures[f"{label}_step_{place + 1}"] = round(ratio, 3)
            figures[f"{label}_step_{place + 1}_ci95"] = [round(bound, 3) for bound in interval]
        cost, bounds = mean_and_ci95([sum(ms / found["without"][0] - 1 for ms in found[kind]) for found in rounds])
        figures |= {f"{label}_steps": round(cost, 3), f"{label}_steps_ci95": bounds and [round(b, 3) for b in bounds]}
    alone_ms = [found["without"][0] for found in rounds]
    tenths_ms = quantiles(alone_ms, n=10)
    figures["slow_to_fast"] = round(tenths_ms[-1] / tenths_ms[0], 3)
    figures["rounds"] = len(rounds)
    return figures


def _measure(rounds: int) -> dict[str, Any]:
    with subprocess.Popen([sys.executable, "-c", MAIN], stdout=subprocess.PIPE) as other:  # on the same core
        try:
            assert other.stdout is not None
            other.stdout.readline()
            other.send_signal(signal.SIGSTOP)
            step, order = _stepper(), random.Random(0)
            for _ in range(5 * BURST):
                step()
            pauses: dict[str, Callable[[], None]] = {
                "without": lambda: None,
                ASLEEP: lambda: time.sleep(PAUSE_S),
                IN_TURN: lambda: _let_run(other),
            }
            found = []
            for _ in range(rounds):
                kinds = order.sample(list(pauses), len(pauses))
                found.append({kind: _bursts(step, pauses[kind]) for kind in kinds})
            for each in found:
                each["without"] = [round(fmean(each["without"]), 4)]
            return {"scenario": "digits", "rounds_ms": found}
        finally:
            other.kill()


def _let_run(other: "subprocess.Popen[bytes]") -> None:
    """Let it have the core."""
    other.send_signal(signal.SIGCONT)
    time.sleep(PAUSE_S)
    other.send_signal(signal.SIGSTOP)


def _bursts(step: Callable[[], None], pause: Callable[[], None]) -> list[float]:
    """The mean CPU time of the steps of a burst in ms, by their place in it."""
    step()  # of another kind than those before
    took_ms: list[list[float]] = [[] for _ in range(BURST)]
    for _ in range(BURSTS):
        pause()
        for place in took_ms:
            began_ns = time.thread_time_ns()
            step()
            place.append((time.thread_time_ns() - began_ns) / 1e6)
    return [round(fmean(place), 4) for place in took_ms]


def _stepper() -> Callable[[], None]:
    study = load_study(MANY_DIGITS)
    params = [{"lr": 1e-3, "weight_decay": 1e-4, "dropout": 0.03 * row} for row in range(TRIALS)]
    group = TrialGroup(study, [build_member(study, row, each) for row, each in enumerate(params)], OpenGate())

    def batches() -> Iterator[tuple[Any, Any, bool]]:
        while True:
            yield from group.batches(0)

    found = batches()
    return lambda: group.train_step(*next(found))


if __name__ == "__main__":
    sys.exit(main())
