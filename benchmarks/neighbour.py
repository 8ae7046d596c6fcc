"""How much slower a core computes while its neighbour is busy, by what the neighbour does.

A Transformer layer trains on one core, in units of some tenths of a second. The process on the other core is asleep, or
it spins, multiplies matrices that fit into the first cache, trains small fused models, or copies memory. Which one it
is, is random within rounds; each unit is compared with that beside a sleeping neighbour in the same round. What a
spinning neighbour costs is the machine's own doing: clock, power, or a core that two virtual ones share. A report
compares squeezed steps with steps in which other ranks' cores sleep through their bubbles, so it counts that too.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from benchmarks.shared.intervals import ratio_with_ci95
from benchmarks.shared.processes import child
from benchmarks.shared.results import finish, parse

NAME = "neighbour"
ASLEEP = "asleep"
TOKENS, WIDTH, SEQUENCES = 128, 256, 8
STEPS_PER_UNIT = 3
SETS_UP_S, SETTLES_S = 5.0, 0.02


def main() -> None:
    """Measure, print, write."""
    options = parse(NAME, __doc__ or "")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    torch.set_num_threads(1)
    with ExitStack() as ends:
        pids = {name: ends.enter_context(child(busy, core=cores[1])) for name, busy in NEIGHBOURS.items()}
        time.sleep(SETS_UP_S)  # as the neighbours do
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        os.sched_setaffinity(0, cores[:1])
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        inputs = torch.randn(SEQUENCES, TOKENS, WIDTH)
        _unit_s(layer, inputs)
        runs = [_round(layer, inputs, pids) for _ in range(5 if options.quick else 40)]
        os.sched_setaffinity(0, cores)
    finish(NAME, options, runs, _summary(runs))


def _round(layer: nn.Module, inputs: torch.Tensor, pids: dict[str, int]) -> dict[str, float]:
    """The seconds of a unit beside each neighbour."""
    seconds = {}
    for name in random.sample([ASLEEP, *pids], k=1 + len(pids)):
        if name in pids:
            os.kill(pids[name], signal.SIGCONT)
        time.sleep(SETTLES_S)
        seconds[name] = _unit_s(layer, inputs)
        if name in pids:
            os.kill(pids[name], signal.SIGSTOP)
    return seconds


def _unit_s(layer: nn.Module, inputs: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    for _ in range(STEPS_PER_UNIT):
        layer(inputs).sum().backward()
    return time.perf_counter() - begin_s


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"rounds": len(runs)}
    for name in NEIGHBOURS:
        slower, interval = ratio_with_ci95([(run[name], run[ASLEEP]) for run in runs])
        summary[f"{name}_slower"], summary[f"{name}_slower_ci95"] = slower, interval
    return summary


def _spin() -> None:
    while True:
        pass


def _multiply() -> None:
    torch.set_num_threads(1)
    matrix, product = torch.randn(48, 48), torch.empty(48, 48)
    while True:
        torch.mm(matrix, matrix, out=product)


def _train() -> None:
    """Sixteen small models, fused, as a study's."""
    torch.set_num_threads(1)
    weights = [torch.randn(16, 64, 64, requires_grad=True), torch.randn(16, 64, 10, requires_grad=True)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    inputs = torch.randn(16, 64, 64)
    while True:
        outputs = torch.bmm(torch.relu(torch.bmm(inputs, weights[0])), weights[1])
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _copy() -> None:
    torch.set_num_threads(1)
    source, target = torch.ones(8_000_000), torch.ones(8_000_000)
    while True:
        target.copy_(source)


NEIGHBOURS: dict[str, Callable[[], None]] = {"spins": _spin, "multiplies": _multiply, "trains": _train, "copies": _copy}


if __name__ == "__main__":
    main()
