"""Which of several ways to compute the same is the fastest: measured at the first use, and kept for the process.

Ways may differ in the order of their sums, hence in the last bits; as the choice is kept, a layer's bits do not change
from step to step.
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
"""A way that takes longer is run twice only, as measuring happens within a unit of work: not once, for the first run
finds its memory cold, and would be held against the way that happens to be tried first."""

_chosen: dict[Hashable, str] = {}
_pinned: list[str] = []


def choose(situation: Hashable, ways: Ways, *inputs: Any) -> str:
    """The name of the fastest of `ways`, which all compute the same from `inputs`.

    Measured is the forward, and the backward where there will be one, on the tensors without their history: no gradient
    of the caller's is touched.

    Args:
        situation: what else than the tensors' shapes, types, device and the number of threads tells cases apart.
        ways: name -> way; the first is taken where there is nothing to choose from.
        inputs: tensors, and other values that the ways take.
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
    """Within this, a choice that has one of the ways `names` takes it unmeasured: results repeat to the bit."""
    _pinned[:0] = names
    try:
        yield
    finally:
        del _pinned[: len(names)]


def _time_ns(way: Callable[..., Tensor], inputs: tuple[Any, ...]) -> int:
    """The shortest of a few runs; the first one also warms up."""
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
