"""A step's forward, loss and backward as one CUDA graph: one launch by the host, where there were hundreds.

The layers of small models take the device less time than the host needs to launch them. A graph does exactly what was
recorded, so it is used only where nothing else may happen: where all layers and the loss run by rules, which were
traced themselves. Before a graph counts, its results are compared with those of ordinary steps.

Source: PyTorch, "CUDA Graphs" (notes/cuda), whole-network capture.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from trials.fusion.errors import is_out_of_memory
from trials.fusion.layers import philox
from trials.fusion.own_code.streams import lendings, saved
from trials.fusion.rows import Rows
from trials.fusion.units import Units
from trials.own_logger import own_logger
from trials.training.inputs.batches import shapes
from trials.training.inputs.trees import mapped, tensors

WARM_UP_STEPS = 3
"""So many ordinary steps come first: kernels are loaded and chosen in them."""
PROVEN_STEPS = 2
"""So many steps are taken both ways, and their results compared."""
MOST_SHAPES = 4
"""Batches of further shapes go without: each graph holds memory of its own."""
APART = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Type -> how far apart results may be, as a share of the largest number: some kernels add in any order."""
_APART_16 = 2e-2

log = own_logger(__name__)

Pass = tuple[Tensor, Tensor]
"""Each trial's loss, ``[K]``, and the total that was differentiated."""
Result = TypeVar("Result")
Compute = Callable[[Any, Any], Pass]
"""Does forward, loss and backward of a batch's inputs and targets, and leaves gradients at the parameters."""


class Recorded(Protocol):
    """A graph."""

    def replay(self) -> None:
        """Queue all that was recorded, on the current stream."""


@dataclass
class _Shape:
    """What is known of batches of one shape. Its graph is the `unit`, whose time is forecast apart from others'."""

    unit: str
    seen: int = 0
    ordinary_ns: int = 0
    proven: int = 0
    lends: bool = False
    refused: bool = False
    graph: "PassGraph | None" = None


@dataclass(eq=False)
class PassGraph:
    """A recorded pass, with the tensors that it reads and writes."""

    recorded: Recorded
    given: tuple[Any, Any]
    result: Pass
    gradients: Mapping[str, Tensor]
    addresses: Sequence[int]
    cost_ns: float = 0.0


_in_use: "WeakSet[Captured]" = WeakSet()


class Captured:
    """Takes the passes of one group by graphs, where it can.

    Args:
        rows: of the group.
        units: where the graphs' units are numbered; a graph is one unit.
        name: of the first.

    Attributes:
        latest: the proven graph that took the last pass; None: it was an ordinary one.
    """

    def __init__(self, rows: Rows, units: Units, name: str) -> None:
        self._rows, self._units, self._name, self._other = rows, units, name, f"{name}, its proof"
        self._shapes: dict[Hashable, _Shape] = {}
        self.latest: PassGraph | None = None
        _in_use.add(self)

    def forget(self) -> None:
        """Drop all graphs: the trials' tensors have changed."""
        self._shapes.clear()
        self.latest = None

    def costs_ns(self) -> list[float]:
        """The device time of each proven graph."""
        return [known.graph.cost_ns for known in self._shapes.values() if known.graph and known.proven == PROVEN_STEPS]

    def run(self, inputs: Any, targets: Any, per_trial: bool, compute: Compute) -> Pass:
        """Take a pass.

        Args:
            inputs: of the batch.
            targets: likewise.
            per_trial: whether each trial has a batch of its own.
            compute: the ordinary pass.

        Returns:
            As `compute` does; the gradients are the parameters'.
        """
        self.latest = None
        given = tensors((inputs, targets))
        if any(tensor.requires_grad or tensor.layout is not torch.strided for tensor in given):
            return compute(inputs, targets)  # a copy would take their gradients
        # masks are drawn, and kernels chosen, by the order in memory
        known = self._known((per_trial, shapes((inputs, targets)), *(tensor.stride() for tensor in given)))
        if known is None or known.refused:
            return compute(inputs, targets)
        if known.graph is not None and known.graph.addresses != self._addresses():
            known.graph, known.seen = None, 0  # the trials were in the host's memory meanwhile
        if known.graph is None:
            known.seen += 1
            if known.seen == WARM_UP_STEPS:
                return self._timed(known, inputs, targets, compute)
            if known.seen < WARM_UP_STEPS:
                return compute(inputs, targets)
        cost_ns = known.graph.cost_ns if known.graph is not None and known.proven else known.ordinary_ns
        if not self._units.fits(cost_ns):  # not even to prove it: the main job would wait for its end
            return compute(inputs, targets)
        if known.graph is None and (_broken or not self._captures(known, inputs, targets, compute)):
            return compute(inputs, targets)
        assert known.graph is not None  # just captured
        if known.proven < PROVEN_STEPS:
            return self._prove(known, inputs, targets, cost_ns, compute)
        self.latest = known.graph
        return self._replay(known, known.graph, inputs, targets)

    def _known(self, shape: Hashable) -> _Shape | None:
        if shape not in self._shapes:
            count = len(self._shapes) + 1
            if count > MOST_SHAPES:
                return None
            self._shapes[shape] = _Shape(f"{self._name}#{count}" if count > 1 else self._name)
        return self._shapes[shape]

    def _timed(self, known: _Shape, inputs: Any, targets: Any, compute: Compute) -> Pass:
        """Take an ordinary pass, and note the device time: a graph takes no more."""
        self._units.settle()
        before_ns, before = self._units.busy_ns(), lendings()
        result = compute(inputs, targets)
        self._units.settle()
        known.ordinary_ns, known.lends = self._units.busy_ns() - before_ns, lendings() != before
        return result

    def _captures(self, known: _Shape, inputs: Any, targets: Any, compute: Compute) -> bool:
        """Record a graph. Returns whether there is one."""
        rows = self._rows
        self._enter(self._other)
        given = mapped(self._kept, (inputs, targets))
        self._units.settle()
        rows.forget_gradients()
        known.proven = 0
        try:
            with self._units.unasked():
                result, recorded = record(lambda: compute(*given), rows, known.lends)
        except Exception as error:
            rows.forget_gradients()
            self._refuse(known, f"it cannot be recorded: {_first_line(error)}")
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
            return False
        gradients = {name: p.grad for name, p in rows.parameters.items() if p.grad is not None}
        known.graph = PassGraph(recorded, given, result, gradients, self._addresses())
        rows.forget_gradients()
        return True

    def _replay(
        self, known: _Shape, graph: PassGraph, inputs: Any, targets: Any, around: "Sequence[torch.cuda.Event]" = ()
    ) -> Pass:
        """Launch a graph, with two events `around` it."""
        self._enter(known.unit)
        for kept, tensor in zip(tensors(graph.given), tensors((inputs, targets)), strict=True):
            kept.copy_(tensor, non_blocking=True)
        if around:
            around[0].record()
        graph.recorded.replay()
        if around:
            around[1].record()
        for name, gradient in graph.gradients.items():
            self._rows.parameters[name].grad = gradient
        losses_K, total = graph.result
        return losses_K.clone(), total.clone()

    def _prove(self, known: _Shape, inputs: Any, targets: Any, cost_ns: float, compute: Compute) -> Pass:
        """Take the pass both ways, and compare all that they leave. The ordinary one counts.

        The graph is forecast to take `cost_ns`.
        """
        graph, rows = known.graph, self._rows
        assert graph is not None  # what is to be proven
        self._expect(known, cost_ns)
        self._enter(self._other)
        restore = saved(rows.buffers, rows.generators)
        is_cuda = graph.result[1].is_cuda
        around = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
        try:
            result = self._replay(known, graph, inputs, targets, around)
            self._enter(self._other)
            by_graph = self._left(result)
        except Exception as error:
            self._refuse_where_full(known, error)
            del graph
            restore()
            rows.forget_gradients()
            return compute(inputs, targets)
        streams_by_graph = [each.get_state() for each in rows.generators]
        restore()
        rows.forget_gradients()
        result = compute(inputs, targets)
        self._enter(self._other)
        streams = [each.get_state() for each in rows.generators]
        try:
            ordinary = self._left(result)
            apart = None if by_graph.keys() != ordinary.keys() else _apart(by_graph, ordinary)
        except Exception as error:
            self._refuse_where_full(known, error)
            return result
        self._units.settle()
        graph.cost_ns = 1e6 * around[0].elapsed_time(around[1]) if around else 0.0
        self._expect(known, graph.cost_ns)
        if apart is None:
            self._refuse(known, "it gave gradients to other parameters than an ordinary step")
        elif not all(map(torch.equal, streams_by_graph, streams)):
            self._refuse(known, "it drew other random numbers than an ordinary step")
        elif unequal := [name for name, share in zip(ordinary, apart.tolist(), strict=True) if not share <= 1]:
            self._refuse(known, f"it gave another {unequal[0]} than an ordinary step")
        else:
            known.proven += 1
        return result

    def _left(self, result: Pass) -> dict[str, Tensor]:
        """All that a pass leaves. The buffers are copies; nothing changes the rest before the next step."""
        rows = self._rows
        found = {f"gradient of {name}": p.grad for name, p in rows.parameters.items() if p.grad is not None}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in rows.buffers.items()}
        return {name: t.detach() for name, t in {"loss": result[0], **found}.items() if t.numel()}

    def _refuse(self, known: _Shape, reason: str) -> None:
        log.info("trials train on without a CUDA graph, kernel by kernel: %s", reason)
        known.graph, known.refused = None, True

    def _refuse_where_full(self, known: _Shape, error: Exception) -> None:
        """Go on without a graph for which there is no room; other errors are the step's."""
        if not is_out_of_memory(error):
            raise error
        self._refuse(known, f"it cannot be proven: {_first_line(error)}")
        torch.cuda.empty_cache()

    def _kept(self, tensor: Tensor) -> Tensor:
        device = next(iter(self._rows.parameters.values())).device
        return tensor.to(device, copy=True, non_blocking=True)

    def _addresses(self) -> list[int]:
        rows = self._rows
        return [tensor.data_ptr() for table in (rows.parameters, rows.buffers) for tensor in table.values()]

    def _expect(self, known: _Shape, cost_ns: float) -> None:
        self._units.expect(self._number(known.unit), cost_ns)

    def _enter(self, name: str) -> None:
        self._units.enter(self._number(name))

    def _number(self, name: str) -> int:
        """The number of one of our units. They are declared when they are first needed."""
        if name not in self._units.names:
            self._units.number(name)
            self._units.declare(self._rows.size)
        return self._units.number(name)


def forget_all() -> None:
    """Drop the graphs of all groups. Each holds as much memory as a step."""
    for each in _in_use:
        each.forget()


def can_capture(device: torch.device) -> bool:
    """Whether passes on `device` can be recorded."""
    return device.type == "cuda"


def record(run: Callable[[], Result], rows: Rows, lends: bool) -> tuple[Result, Recorded]:
    """Record what `run` queues for the trials in `rows`, without doing it. The current stream is not the default.

    Args:
        run: queues it.
        rows: the trials.
        lends: whether PyTorch's own operations draw from the trials' streams in it. Then all do.
    """
    graph, pool, device = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_device()
    streams = [*rows.generators, torch.cuda.default_generators[device]]
    before = [stream.clone_state() for stream in streams]
    with nullcontext() if lends else philox.recorded(rows.generators) as drawn:
        if lends:
            for stream in rows.generators:
                graph.register_generator_state(stream)
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")  # another thread looks at events meanwhile
            result = run()
            graph.capture_end()
        except BaseException:
            _abandon(graph, pool, device)
            for stream, state in zip(streams, before, strict=True):
                stream.graphsafe_set_state(state)  # in older versions the other takes itself for recorded for ever
            raise
    return result, graph if drawn is None else _Drawn(graph, drawn)


@dataclass
class _Drawn:
    """A graph whose random numbers come from `drawn`."""

    graph: Recorded
    drawn: philox.Recording

    def replay(self) -> None:
        """See `Recorded`."""
        self.drawn.before_replay()
        self.graph.replay()
        self.drawn.after_replay()


_broken: list[object] = []
"""Recordings that could not be ended. The process records no more: PyTorch does not promise its state after one."""


def is_broken() -> bool:
    """Whether this process records no more."""
    return bool(_broken)


def _abandon(graph: "torch.cuda.CUDAGraph", pool: Any, device: int) -> None:
    """End a recording that has failed, so that the stream and the allocator work again.

    What ends it may fail too. Until version 2.12, the allocator then took the recording for under way, and refused to
    give memory back. See pull requests 180395 and 190348 of pytorch/pytorch.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _broken.append(graph)  # the allocator may refer to it
        steps: list[Callable[[], None]] = [
            lambda: torch._C._cuda_endAllocateToPool(device, pool),
            graph.reset,
            lambda: torch._C._cuda_releasePool(device, pool),
        ]
        for undo in steps:
            with suppress(RuntimeError):  # PyTorch has done it
                undo()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _apart(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Tensor:
    """How far apart tensors of the same names are, in shares of what is allowed. Nothing is read from the device."""
    shares = []
    for name, other in others.items():
        one, bound = ones[name], APART.get(other.dtype, _APART_16) if other.is_floating_point() else 0.0
        same = (one == other) | (one != one) & (other != other)
        difference = torch.where(same, 0.0, (one.double() - other.double()).abs())
        allowed = bound * other.double().nan_to_num(0.0, 0.0, 0.0).abs().amax()
        # nothing is apart where nothing differs, even if nothing is allowed
        shares.append(torch.where(same.all(), 0.0, difference.amax() / allowed))
    return torch.stack(shares)
