"""One kernel that draws the dropout masks of K trials on a CUDA device, each as PyTorch's own kernel draws it alone.

PyTorch launches one for each trial, and a CUDA graph sets each random stream by two more. Ours is written in Triton;
where that is not installed, or does not draw what PyTorch does, PyTorch's are used.
"""

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trials.fusion.own_code.streams import lent
from trials.own_logger import own_logger
from trials.pinned_memory import copied_to

_THREADS = 256
"""In a block of PyTorch's kernel."""
_VECTORS = 4, 1, 2, 8, 16
"""How many neighbours a thread of PyTorch's kernel may take at once."""
_COMPARED = 128
"""Compare at least so many elements before an order is believed."""
_SEED, _OFFSET = 0x9E3779B97F4A7C15, 4 * (2**32 - 1)
"""Of the comparison: neither fits 32 bits."""

log = own_logger(__name__)


class Layout(NamedTuple):
    """In which order PyTorch's kernel draws for a tensor.

    Each of its threads has a sequence of its own, and draws four numbers at a time. It takes so many neighbouring
    elements at once, then those that are a grid further, and so on.

    Attributes:
        vector: how many neighbours.
        threads: of the grid.
        increment: how far the stream's offset moves, which is how many numbers a thread draws.
    """

    vector: int
    threads: int
    increment: int


@dataclass
class Recording:
    """The random streams of the trials in a CUDA graph that is being recorded.

    Attributes:
        generators: the streams.
        states: their seeds and offsets, ``[2, K]``, on the device, as of the last kernel that was recorded.
        drawn: per trial, how far a replay moves its stream.
    """

    generators: Sequence[torch.Generator]
    states: Tensor
    drawn: list[int]

    def __post_init__(self) -> None:
        """Remember where a replay begins to read."""
        self._first = self.states

    def before_replay(self) -> None:
        """Give the streams' states to the graph."""
        if any(self.drawn):
            self._first.copy_(_states(self.generators, self._first.device))

    def after_replay(self) -> None:
        """Move the streams as the graph has."""
        for generator, increment in zip(self.generators, self.drawn, strict=True):
            if increment:
                generator.set_offset(generator.get_offset() + increment)


_recording: Recording | None = None


@contextmanager
def recorded(generators: Sequence[torch.Generator]) -> Iterator[Recording]:
    """While entered, a CUDA graph is recorded. The masks of these trials are drawn from what is yielded."""
    global _recording
    _recording = made = Recording(generators, _states(generators, generators[0].device), [0] * len(generators))
    try:
        yield made
    finally:
        _recording = None


def noise(
    x_K: Tensor, generators: Sequence[torch.Generator], rates_K: Sequence[float], numbers: Tensor
) -> Tensor | None:
    """Draw the masks of K trials, and scale them.

    Args:
        x_K: what they are for, ``[K, ...]``, each trial's in the order of its memory, on a CUDA device.
        generators: the trials' random streams; they move on.
        rates_K: per trial, the probability that an element is zeroed.
        numbers: per trial, whether it draws at all, the probability that an element stays, and what the mask then is:
            ``[3, K]``, of the masks' type.

    Returns:
        The masks. None: this device or this PyTorch draws in an order that is not known, or a graph is being recorded
        with other streams.
    """
    recording = _recording
    if not x_K.numel() or (recording is not None and list(recording.generators) != list(generators)):
        return None
    layout = _layout(x_K.device, x_K.dtype, numbers.dtype, x_K[0].numel())
    if layout is None:
        return None
    states = _states(generators, x_K.device) if recording is None else recording.states
    noise_K, after = _launch(x_K.shape, layout, states, numbers)
    if recording is not None:
        recording.states = after
    for row, (generator, rate) in enumerate(zip(generators, rates_K, strict=True)):
        if not 0 < rate < 1:
            continue
        if recording is not None:
            recording.drawn[row] += layout.increment
        else:
            generator.set_offset(generator.get_offset() + layout.increment)
    return noise_K


def _states(generators: Sequence[torch.Generator], device: torch.device) -> Tensor:
    """Seeds and offsets on the device, ``[2, K]``."""
    seeds = [seed - 2**64 if (seed := each.initial_seed()) >= 2**63 else seed for each in generators]
    states = torch.tensor([seeds, [each.get_offset() for each in generators]])
    return copied_to(device, states)


def _launch(shape: Sequence[int], layout: Layout, states: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of this shape, ``[K, ...]``, and the states afterwards."""
    kernel = _kernel()
    noise_K = torch.empty(shape, dtype=numbers.dtype, device=states.device)
    after = torch.empty_like(states)
    quads = layout.increment // 4 * layout.threads
    kernel.masks[(-(-quads // kernel.BLOCK), len(noise_K))](
        *(noise_K, after, states, numbers, noise_K[0].numel(), layout.threads, layout.increment),
        vector=layout.vector,
        block=kernel.BLOCK,
    )
    return noise_K, after


_layouts: dict[tuple[torch.device, torch.dtype, int], Layout | None] = {}


def _layout(device: torch.device, kind: torch.dtype, wide: torch.dtype, n: int) -> Layout | None:
    """How PyTorch draws for `n` elements of type `kind`; None: that is not known."""
    key = device, kind, n
    if key not in _layouts:
        if torch.cuda.is_current_stream_capturing():
            return None
        _layouts[key] = _compared(device, kind, wide, n)
    return _layouts[key]


def _compared(device: torch.device, kind: torch.dtype, wide: torch.dtype, n: int) -> Layout | None:
    """Find the order by comparison with what PyTorch draws."""
    if importlib.util.find_spec("triton") is None:
        return None
    count = 2 + _COMPARED // n
    streams = [torch.Generator(device).manual_seed(_SEED * (row + 1) % 2**64) for row in range(count)]
    for stream in streams:
        stream.set_offset(_OFFSET)
    states = _states(streams, device)
    like = torch.empty(n, dtype=kind, device=device)
    drawn = []
    for stream in streams:
        with lent(stream):
            drawn.append(torch.native_dropout(like, 0.5, True)[1])
    expected = torch.stack(drawn)
    properties = torch.cuda.get_device_properties(device)
    most = properties.multi_processor_count * (properties.max_threads_per_multi_processor // _THREADS)
    threads = min(most, -(-n // _THREADS)) * _THREADS
    numbers = torch.ones(3, count, dtype=wide, device=device)
    numbers[1] = 0.5
    for vector in _VECTORS:
        layout = Layout(vector, threads, streams[0].get_offset() - _OFFSET)
        try:
            found, _ = _launch(expected.shape, layout, states, numbers)
        except Exception as error:  # Triton wants a compiler, and more
            log.info("dropout draws trial by trial: Triton fails (%s: %s)", type(error).__name__, error)
            return None
        if torch.equal(found.bool(), expected):
            return layout
    log.info("dropout draws trial by trial: how PyTorch draws %d elements of %s is not known", n, kind)
    return None


@functools.cache
def _kernel() -> Any:
    from trials.fusion.layers import philox_kernel

    return philox_kernel
