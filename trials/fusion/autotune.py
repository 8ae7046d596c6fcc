"""Chooses the fastest of several ways to compute the same. The first use measures, and the process keeps the choice.

Ways may sum in different orders, so their last bits may differ. The choice is kept, so a layer's bits do not
change from step to step.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Ways = Mapping[str, Callable[..., Tensor]]

_RUNS = 3
_LONG_NS = 20_000_000
"""A slower way runs only twice, because measuring happens within a unit of work. One run would be unfair: the memory is
cold for the way that is tried first."""

_chosen: dict[Hashable, str] = {}
_pinned: list[str] = []


def choose(situation: Hashable, ways: Ways, *inputs: Any) -> str:
    """Return the name of the fastest of `ways`, which all compute the same from `inputs`.

    Measures the forward, and the backward where there will be one, on detached tensors. The caller's gradients stay.

    Args:
        situation: what distinguishes cases besides the tensors' shapes, types and device, and the number of threads.
        ways: name -> way. The first is taken where there is no choice.
        inputs: the ways' arguments, tensors and others.
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
        times_ns = {name: _time_ns(way, inputs) for name, way in ways.items()}
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


def _time_ns(way: Callable[..., Tensor], inputs: tuple[Any, ...]) -> int:
    """Return the shortest time of a few runs; the first one also warms up."""
    own = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    trained = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
    backward = bool(trained) and torch.is_grad_enabled()
    wait = torch.cuda.synchronize if any(isinstance(x, Tensor) and x.is_cuda for x in own) else _nothing
    shortest_ns = 0
    for run in range(_RUNS):
        wait()
        start_ns = time.perf_counter_ns()
        y = way(*own)
        if backward:
            torch.autograd.grad(y, trained, torch.ones_like(y))
        wait()
        took_ns = time.perf_counter_ns() - start_ns
        shortest_ns = min(shortest_ns or took_ns, took_ns)
        if run and took_ns > _LONG_NS:
            break
    return shortest_ns


def _nothing() -> None:
    return None
