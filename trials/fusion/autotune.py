"""Chooses the fastest of several ways to compute the same. The first use measures, and the process keeps the choice.

Ways may sum in different orders, so their last bits may differ. The choice is kept, so a layer's bits do not
change from step to step.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trials.fusion.rows import ask_no_gate

Ways = Mapping[str, Callable[..., Tensor]]

_RUNS = 3
_LONG_NS = 20_000_000
"""A slower way runs only twice, because measuring happens within a unit of work. One run would be unfair: the memory is
cold for the way that is tried first."""

_chosen: dict[Hashable, str] = {}
_pinned: list[str] = []


@dataclass(frozen=True, slots=True)
class Turns:
    """How measuring on a CUDA device asks the gate: each run is a unit of its own, since a unit's first kernel waits.

    Attributes:
        again: asks for the unit under way.
        settle: waits until all that was queued has ended. It sleeps; a wait in the driver would hang at a shut gate.
    """

    again: Callable[[], None] = ask_no_gate
    settle: Callable[[], None] = ask_no_gate


ANY_TIME = Turns()
"""Without a gate."""


def choose(situation: Hashable, ways: Ways, *inputs: Any, turns: Turns = ANY_TIME) -> str:
    """Return the name of the fastest of `ways`, which all compute the same from `inputs`.

    Measures the forward, and the backward where there will be one, on detached tensors. The caller's gradients stay.

    Args:
        situation: what distinguishes cases besides the tensors' shapes, types and device, and the number of threads.
        ways: name -> way. The first is taken where there is no choice.
        inputs: the ways' arguments, tensors and others.
        turns: how to ask the gate.
    """
    names = list(ways)
    if len(names) == 1:
        return names[0]
    for name in _pinned:
        if name in ways:
            return name
    tensors = tuple((x.shape, x.dtype, x.device, x.requires_grad) for x in inputs if isinstance(x, Tensor))
    key = (situation, *names, tensors, torch.get_num_threads(), torch.is_grad_enabled())
    found = _chosen.get(key)
    if found is None:
        times_ns = {name: _time_ns(way, inputs, turns) for name, way in ways.items()}
        found = _chosen[key] = min(times_ns, key=times_ns.__getitem__)
    return found


@contextmanager
def pinned(*names: str) -> Iterator[None]:
    """While entered, a choice among ways that include one of `names` takes that one, so results repeat to the bit."""
    _pinned[:0] = names
    try:
        yield
    finally:
        del _pinned[: len(names)]


def _time_ns(way: Callable[..., Tensor], inputs: tuple[Any, ...], turns: Turns) -> int:
    """Return the shortest time of a few runs; the first one also warms up."""
    own = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    trained = [x for x in own if isinstance(x, Tensor) and x.requires_grad]

    def run() -> None:
        y = way(*own)
        if trained and torch.is_grad_enabled():
            torch.autograd.grad(y, trained, torch.ones_like(y))

    if any(_is_on_cuda(x) for x in own if isinstance(x, Tensor)):
        return min(_device_times_ns(run, turns))
    shortest_ns = 0
    for number in range(_RUNS):
        start_ns = time.perf_counter_ns()
        run()
        took_ns = time.perf_counter_ns() - start_ns
        shortest_ns = min(shortest_ns or took_ns, took_ns)
        if number and took_ns > _LONG_NS:
            break
    return shortest_ns


def _device_times_ns(run: Callable[[], None], turns: Turns) -> Iterator[int]:
    """Yield the device's times of some runs, each in a bubble."""
    for _ in range(_RUNS):
        turns.again()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        turns.settle()
        end.synchronize()  # returns at once, but where no gate is asked
        yield round(start.elapsed_time(end) * 1e6)
    turns.again()  # what follows in the unit under way waits for a bubble, too


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda
