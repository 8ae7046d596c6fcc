"""Gives device memory back when the main job needs it, and takes it again when it can.

State moves to the host's memory storage by storage, in place: every tensor object stays the same, and so does all that
refers to it. Meanwhile it is a tensor of the host's, because a thread of the study may read it at any time: to empty a
storage in which a tensor lies would end the process at the next read. The bits that come back are those that left.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ds_hooks.shared import statuses
from ds_hooks.shared.page.layout import Field
from ds_hooks.shared.processes.signals import END_SIGNAL
from trials.gate.base import HOST_UNIT, Gate, StopRequested
from trials.gate.process import nap
from trials.training.cuda_graph import forget_all

CHUNK_BYTES = 1 << 20
"""Copy this much at once, as host work. It takes some tenths of a millisecond."""

LOOK_EVERY_NS = 50_000_000
"""Asking the allocator takes some tenths of a millisecond."""
_LOOK_AGAIN_S = 0.05


class Meter(Protocol):
    """Measures an allocator, and has it give memory back."""

    def held_bytes(self) -> int:
        """Return the device memory that it holds, used or not."""

    def trim(self) -> None:
        """Give back what it holds and does not use."""


class CudaMeter:
    """PyTorch's caching allocator for the current CUDA device."""

    def held_bytes(self) -> int:
        """See `Meter`."""
        return torch.cuda.memory_reserved()

    def trim(self) -> None:
        """See `Meter`. Nothing may be queued on the device, because freeing waits for it."""
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()


class _Parked(NamedTuple):
    """What is in the host's memory."""

    storage: Any
    """The device's, empty now."""

    here: Tensor
    """Its bytes."""

    tensors: list[Tensor]
    """Those that lay there, and lie here now."""


class Offload:
    """Holds device memory as long as the daemon's limit allows.

    Args:
        words: the page's.
        gate: asked before each copy.
        meter: measures the device's allocator.
        tensors: returns all that are on the device.
        report: sends a status to the daemon.
        wait: sleeps for some seconds, or until a signal comes, which it returns.
        clock_ns: the host's clock.
    """

    def __init__(
        self,
        words: "memoryview[int]",
        gate: Gate,
        meter: Meter,
        tensors: Callable[[], Iterable[Tensor]],
        report: Callable[[statuses.Status], None],
        wait: Callable[[float], int | None] = nap,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._words, self._gate, self._meter = words, gate, meter
        self._tensors, self._report, self._wait, self._clock_ns = tensors, report, wait, clock_ns
        self._look_again_ns = 0

    def step_ended(self) -> None:
        """Call it between training steps. If more is held than the limit, move out, and return when all is back.

        Raises:
            StopRequested: the side task must end.
        """
        now_ns = self._clock_ns()
        if now_ns < self._look_again_ns:
            return
        self._look_again_ns = now_ns + LOOK_EVERY_NS
        held = self._count()
        if not self._is_above_limit(held):
            return
        self._gate.enter(HOST_UNIT)
        self._meter.trim()
        if not self._is_above_limit(self._count()):
            return
        limit = self._words[Field.SIDE_LIMIT_BYTES]
        parked = self._move_out()
        self._report(statuses.MovedOut(held_bytes=held, limit_bytes=limit, left_bytes=self._count()))
        while not self._move_in(parked, held):
            self._gate.rest()
            if self._wait(_LOOK_AGAIN_S) == END_SIGNAL:
                raise StopRequested
        self._report(statuses.MovedIn(self._count()))

    def trim(self) -> None:
        """Give back memory that is no longer used."""
        gc.collect()
        self._meter.trim()
        self._count()

    def _count(self) -> int:
        held = self._words[Field.SIDE_BYTES] = self._meter.held_bytes()
        return held

    def _is_above_limit(self, held: int) -> bool:
        limit = self._words[Field.SIDE_LIMIT_BYTES]
        return bool(limit) and held > limit

    def _move_out(self) -> list[_Parked]:
        """Move all that is on the device, but what something unknown still refers to."""
        forget_all()
        parked = []
        for storage, tensors in _by_storage(self._tensors()):
            here = torch.empty(storage.nbytes(), dtype=torch.uint8)
            self._copy(here, _bytes_of(storage))
            if _is_held_only_by(tensors, storage):
                _lay(tensors, here.untyped_storage())
                storage.resize_(0)
                parked.append(_Parked(storage, here, tensors))
        self._gate.enter(HOST_UNIT)
        self._meter.trim()
        return parked

    def _move_in(self, parked: list[_Parked], needed: int) -> bool:
        """Take all back, if the limit allows as much as before. Returns whether it did."""
        limit = self._words[Field.SIDE_LIMIT_BYTES]
        if limit and limit < needed:
            return False
        self._gate.enter(HOST_UNIT)
        try:
            for storage, here, _ in parked:
                storage.resize_(here.numel())
        except torch.OutOfMemoryError:
            for storage, _, _ in parked:
                storage.resize_(0)
            self._meter.trim()
            return False
        for storage, here, tensors in parked:
            self._copy(_bytes_of(storage), here)
            _lay([tensor for tensor in tensors if _lies_in(tensor, here)], storage)
        return True

    def _copy(self, into: Tensor, source: Tensor) -> None:
        for part, own in zip(into.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True):
            self._gate.enter(HOST_UNIT)
            part.copy_(own)


def tensors_on(kind: str) -> Iterator[Tensor]:
    """Yield all tensors of this process on a kind of device, their gradients, and what they are views of."""
    for found in gc.get_objects():
        if type(found) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(found):
            continue  # the last may be what a user's cache has kept of a `vmap`, and has no memory of its own
        if found.device.type == kind and found.layout is torch.strided:
            yield found
            if found.is_leaf and found.grad is not None:
                yield found.grad
            if found._base is not None:
                yield found._base


def _by_storage(tensors: Iterable[Tensor]) -> list[tuple[Any, list[Tensor]]]:
    """Return the storages that can be moved, each once, and of `tensors` those that lie in it."""
    found: dict[int, tuple[Any, dict[int, Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            found.setdefault(storage._cdata, (storage, {}))[1][id(tensor)] = tensor
    return [(storage, list(inside.values())) for storage, inside in found.values()]


def _is_held_only_by(tensors: list[Tensor], storage: Any) -> bool:
    """Whether nothing else refers to `storage`, such as a tensor of a class of its own, and `_lay` can move all."""
    holders: int = torch._C._storage_Use_Count(storage._cdata) - 1  # one is the object `storage` itself
    return holders == len(tensors) and not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)


def _lay(tensors: list[Tensor], storage: Any) -> None:
    """Let `tensors` lie in `storage` as in their own, views of one memory as before."""
    for tensor in tensors:
        laid = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        tensor.data = laid.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _lies_in(tensor: Tensor, here: Tensor) -> bool:
    """Whether it still does: a thread of the study may have given it other data."""
    return bool(tensor.untyped_storage()._cdata == here.untyped_storage()._cdata)


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
