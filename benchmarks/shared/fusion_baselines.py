"""What fused trials compete with: other ways to train K trials on one core, and rounds that time all of them in turn.

Each arm is asked for the time of one training step of all K trials. Rounds visit the arms in random order, so that all
meet the same machine.
"""

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state

from benchmarks.shared.fused_models import Alone, Classes, time_of_steps_s
from benchmarks.shared.processes import child
from ds_hooks.shared.processes.parent import die_with_parent
from trials import build_member

FUSED, ALONE, FUSED_ADAMW, VMAP, PROCESSES = "fused", "alone", "fused_adamw", "vmap", "processes"
BASELINES = {
    ALONE: "one trial after another in plain PyTorch",
    FUSED_ADAMW: "the same with `AdamW(fused=True)`",
    VMAP: "`torch.func.vmap` over stacked parameters, with `AdamW(fused=True)` for all",
    PROCESSES: "K processes on the same core",
}
"""Arm -> what it is."""

MOST_PROCESSES = 4
"""More would only share the core, too."""
BLOCK_S, PROCESSES_BLOCK_S = 0.02, 0.1
"""The least time of a block."""
LEAST_ROUNDS, MOST_ROUNDS = 8, 40

Timed = Callable[[], float]
"""Returns the time of one step of all K trials, in seconds."""


class Stacked:
    """K trials under one `vmap`, as one writes it by hand: stacked parameters, and the gradients of one trial mapped.

    No optimizer of PyTorch takes a rate for each trial, so all have the same: no search could use it, but it is the
    fastest that there is.

    Raises:
        RuntimeError: the model cannot be mapped.
    """

    def __init__(self, study: Classes, size: int) -> None:
        models = [build_member(study, row, {"lr": 1e-3}).model for row in range(size)]
        self.parameters, self._buffers = stack_module_state(models)
        self._batch = study.batch
        self._optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-3, fused=True)

        def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs_B: Tensor, targets_B: Tensor) -> Any:
            return study.loss(functional_call(models[0], (parameters, buffers), (inputs_B,)), targets_B)

        self._gradients = torch.vmap(grad(loss), in_dims=(0, 0, None, None))
        self.step()

    def step(self) -> None:
        """Train on the batch."""
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        gradients = self._gradients(weights, self._buffers, *self._batch)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        self._optimizer.step()


class Processes:
    """Processes on this one's core, each of which trains one trial in plain PyTorch, and is stopped between blocks."""

    def __init__(self, study: Classes, count: int, ends: ExitStack) -> None:
        self._steps = mmap.mmap(-1, 8 * count)
        (core,) = os.sched_getaffinity(0)
        self._pids = [ends.enter_context(child(self._train, study, index, core=core)) for index in range(count)]
        for pid in self._pids:
            os.waitpid(pid, os.WUNTRACED)

    def rate_per_s(self, seconds: float) -> float:
        """Let them train for so long; return their steps per second, all together."""
        before, began_s = self.done(), time.perf_counter()
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(seconds)
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        return (self.done() - before) / (time.perf_counter() - began_s)

    def done(self) -> int:
        """Return how many steps they have trained so far."""
        return sum(memoryview(self._steps).cast("q"))

    def _train(self, study: Classes, index: int) -> None:
        die_with_parent()
        trainer, steps = Alone(study), memoryview(self._steps).cast("q")
        trainer.step()
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            trainer.step()
            steps[index] += 1


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process, and those that it forks, on one core and one thread."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(before)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def timed_steps(step: Callable[[], None], times: int = 1) -> Timed:
    """An arm whose blocks are as many steps as fill `BLOCK_S`; a step is done `times` times for all trials."""
    for _ in range(2):
        step()
    count = max(1, int(BLOCK_S / time_of_steps_s(step, 1)))
    return lambda: time_of_steps_s(step, count) * times


def timed_processes(processes: Processes, step_s: float, size: int) -> Timed:
    """An arm in whose blocks all processes train, for at least ten steps of `step_s` each."""
    block_s = max(PROCESSES_BLOCK_S, 10 * step_s * min(size, MOST_PROCESSES))
    return lambda: size / processes.rate_per_s(block_s)


def rounds(arms: Mapping[str, Timed], seconds: float) -> list[dict[str, float]]:
    """Time all arms in turn for about `seconds`: arm -> seconds, for each round."""
    draw, end_s = random.Random(0), time.monotonic() + seconds
    found: list[dict[str, float]] = []
    while len(found) < LEAST_ROUNDS or (time.monotonic() < end_s and len(found) < MOST_ROUNDS):
        times_s = {name: arms[name]() for name in draw.sample(list(arms), len(arms))}
        found.append({name: round(times_s[name], 7) for name in arms})
    return found
