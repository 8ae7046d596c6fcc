"""The forward of K trials in one mode: by its graph, or as a whole if there is no graph or it fails."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from trials.fusion import ways
from trials.fusion.compared.reads import Watch
from trials.fusion.errors import ApartError, RefusedError, is_out_of_memory
from trials.fusion.graph.inputs import Inputs, arguments, moved
from trials.fusion.graph.program import Program
from trials.fusion.graph.trace import FORWARD
from trials.fusion.layers.memory_order import Orders
from trials.fusion.own_code.draw_orders import in_orders
from trials.fusion.own_code.mapped import Mapped
from trials.fusion.own_code.streams import saved
from trials.fusion.own_code.trees import apart, dims_of, heads
from trials.fusion.registry import Layer, label, replaced_function
from trials.fusion.rows import Rows, Vectors
from trials.fusion.shared_base import WrittenError
from trials.fusion.units import LayerUnits, Units


class Way(Protocol):
    """One way to compute the forward."""

    def bind(self, rows: Rows) -> None:
        """Take the tensors of `rows`."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], per_trial: bool) -> Any:
        """Return the model's output. All its tensors have the axis K, and those of the inputs do if `per_trial`."""

    def declare_backward(self) -> None:
        """Number the backward units."""

    def ways(self) -> Iterator[tuple[str, str]]:
        """Yield each layer or node, and how it is computed."""


class Whole:
    """The user's own `forward`, under one `vmap` or in a loop over the trials."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        modes: dict[str, bool],
        units: Units,
        reason: str,
        method: str,
        vectors: Vectors | None = None,
        way: ways.Way = "vmap",
    ) -> None:
        """Take a copy of one trial's `model`, called `name`.

        `reason` is why its `method` has no graph. `vectors` are the rows', if the method had one.
        """
        self._own = LayerUnits(units, f"{name} forward")
        self._mapped = Mapped(model, "", modes, self._own)
        self._mapped.label = name  # `model` may be a graph's code
        self._mapped.looped = reason if way == "loop" else replaced_function()
        if method != FORWARD:
            self._mapped.module.forward = getattr(self._mapped.module, method)
            self._mapped.memo.is_allowed = False
        self._inner = self._mapped.number_inside(modes, units, vectors)
        self._name, self._reason, self._orders = name, reason, Orders()

    def bind(self, rows: Rows) -> None:
        """See `Way`."""
        self._rows = rows
        self._mapped.bind(rows)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], per_trial: bool) -> Any:
        """See `Way`."""
        by_name = dict(kwargs)
        dims = dims_of(args, per_trial), dims_of(by_name, per_trial)
        output = self._mapped.run(args, by_name, dims)
        if self._rows.are_drawn_for:
            output = in_orders(self._orders, output, self._mapped, self._rows, args, by_name, dims)
        return output

    def declare_backward(self) -> None:
        """See `Way`."""
        for each in (self._own, *reversed(self._inner)):
            each.declare_backward()

    def ways(self) -> Iterator[tuple[str, str]]:
        """See `Way`."""
        yield f"{self._name} as a whole", self._mapped.way(self._reason)
        yield from self._mapped.ways()


class Forward:
    """The forward of K trials in one mode.

    Its graph runs step by step. If a step fails on the first batch, the graph's code runs as a whole from then on. If
    what the graph was traced with changes, or a batch has other inputs, the user's own code does.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph | None,
        layers: dict[str, Layer | Exception],
        modes: dict[str, bool],
        units: Units,
        untraced: str,
        watch: Watch,
        method: str = FORWARD,
        way: ways.Way = "rules",
    ) -> None:
        """Choose the best way.

        Args:
            model: one trial's.
            graph: its forward; None if it cannot be traced.
            layers: path -> fused layer, or why there is none.
            modes: path -> whether that module is in training mode.
            units: where the units are numbered.
            untraced: why there is no graph.
            watch: what `graph` was traced with.
            method: which of the model's methods it is.
            way: how it runs where there is no graph.
        """
        self._units = units
        self._declared = False
        self._rows: Rows | None = None
        name = label(model, "") if method == FORWARD else f"{label(model, '')}.{method}"
        self._way: Way
        self._instead: Callable[[str], None] | None = None
        self._tried: set[tuple[bool, bool]] = set()  # which kinds of batches its graph has run
        self._watch = watch if graph is not None else None
        self._name, self._left, self._checked = name, "", False
        self._settled = False  # whether a first batch has shown what it writes to

        def own_code(reason: str, vectors: Vectors | None = None) -> Way:
            return Whole(model, name, modes, units, reason, method, vectors, way)

        self._own_code = own_code
        self._inputs = None if graph is None else Inputs.of(model, method, graph)
        if graph is None:
            self._way = own_code(untraced)
            return
        self._way = Program(graph, model, layers, modes, units)
        is_layer = any(node.op == "call_module" and not node.target for node in graph.nodes)
        # the graph, not the user's code, for it knows which tensors are each trial's own
        counted = any("counted" in node.meta for node in graph.nodes)
        if is_layer:
            self._instead = self._use_own_code
        elif counted:
            self._instead = self._leave
        else:
            code = fx.GraphModule(model, graph)
            self._instead = lambda reason: self._use(Whole(code, name, modes, units, reason, FORWARD))

    def bind(self, rows: Rows) -> None:
        """Take the tensors of `rows`; called after they were built or changed.

        Raises:
            RefusedError: the trials' own code runs, and what it may read differs.
        """
        self._rows = rows
        if self._left:
            self._check_alike(rows)
        self._way.bind(rows)

    def run(self, inputs: Any, device: torch.device, per_trial: bool = False) -> Any:
        """Run all layers.

        Args:
            inputs: one batch that all trials share, tensors ``x_B...`` in any containers, or ``x_KB...``. See
                `trials.fusion.graph.inputs.arguments` for how the model is called with them.
            device: where the trials are.
            per_trial: whether they have the axis K.

        Returns:
            The model's output, all its tensors with the leading axis K.

        Raises:
            RefusedError: it trains a parameter that is not the trials'.
            ApartError: the user's own code has to run, and the trials differ in what it may read.
        """
        args, kwargs = arguments(moved(inputs, device))
        output = self._run_reading(args, kwargs, per_trial)
        if not self._checked and torch.is_grad_enabled():
            assert self._rows is not None  # bound when it was built
            _refuse_foreign(output, apart((args, kwargs))[0], self._rows, self._name)
            self._checked = True
        return output

    def _run_reading(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], per_trial: bool) -> Any:
        """Run all layers. What is held once, and the forward writes to, becomes each trial's own.

        Raises:
            WrittenError: it has not done so for its first batch.
        """
        assert self._rows is not None  # bound when it was built
        once = self._rows.once
        if not once:
            return self._run(args, kwargs, per_trial)
        restore = None
        if not self._settled:  # a forward that writes to some frozen parameters may write to others, too
            own = {name: p.detach() for name, p in self._rows.parameters.items() if name not in once}
            restore = saved({**own, **self._rows.buffers}, self._rows.generators)
        try:
            output = self._run(args, kwargs, per_trial)
        except WrittenError as error:
            if restore is None:
                raise
            restore()
            self._rows.unshare(error.names)
            return self._run_reading(args, kwargs, per_trial)
        if written := once.written():
            raise WrittenError(written)
        self._settled = True
        return output

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], per_trial: bool) -> Any:
        if self._watch is not None and (name := self._watch.changed()):
            self._leave(f"{name} has changed since the trace")
        if self._inputs is not None:
            own = self._inputs.take(args, kwargs)
            if own is not None:
                return self._run_graph(own, args, kwargs, per_trial)
            self._leave("a batch has other inputs than the trace")
        return self._way.run(args, kwargs, per_trial)

    def _run_graph(
        self, own: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any], per_trial: bool
    ) -> Any:
        """Run the graph on `own`, its inputs. If it fails on the first batch of a kind, run something else."""
        assert self._rows is not None  # bound when it was built
        kind = self._rows.size > 1, per_trial  # a number (`.item()`) is there for one trial, or of a shared batch
        if self._instead is None or kind in self._tried:
            return self._way.run(own, {}, per_trial)
        restore = saved(self._rows.buffers, self._rows.generators)
        try:
            output = self._way.run(own, {}, per_trial)
        except RefusedError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            restore()
            self._instead(str(error))
            given, by_name = (args, kwargs) if self._inputs is None else (own, {})
            output = self._way.run(given, by_name, per_trial)
        self._tried.add(kind)
        return output

    def is_static(self) -> bool:
        """Whether all layers run by rules, for batches like the last one: the same operations each time."""
        if not isinstance(self._way, Program) or self._rows is None:
            return False
        if all(several != (self._rows.size > 1) for several, _ in self._tried):
            return False
        return not (self._watch is not None and self._watch.changed()) and self._way.is_static()

    def declare_backward(self) -> None:
        """Number the backward units, last layer first, and have the gate asked for them."""
        self._declared = True
        self._way.declare_backward()

    def ways(self) -> Iterator[tuple[str, str]]:
        """Yield each layer or node, and how it is computed."""
        return self._way.ways()

    def _leave(self, reason: str) -> None:
        """Run the user's own code from now on, because of `reason`.

        Raises:
            ApartError: the trials differ in what it may read.
        """
        assert self._rows is not None  # bound when it was built
        self._left = reason
        self._check_alike(self._rows)
        self._use_own_code(reason, self._rows.vectors)

    def _use_own_code(self, reason: str, vectors: Vectors | None = None) -> None:
        self._watch = self._inputs = None
        self._use(self._own_code(reason, vectors))

    def _use(self, way: Way) -> None:
        assert self._rows is not None  # bound when it was built
        self._instead = None
        way.bind(self._rows)
        if self._declared:
            way.declare_backward()
        self._units.declare(self._rows.size)
        self._way = way

    def _check_alike(self, rows: Rows) -> None:
        if len(set(rows.unread)) > 1:
            raise ApartError(
                f"{self._name} has to run by its own code, because {self._left}, and the trials' modules differ in "
                "attributes that it may read; allowed: equal attributes"
            )


def _refuse_foreign(output: Any, inputs: Sequence[Tensor], rows: Rows, name: str) -> None:
    """Refuse a forward that trains a parameter of another module, such as a global one that all trials would share."""
    own = {*map(id, inputs), *map(id, rows.parameters.values())}
    waiting: list[Any] = [tensor.grad_fn for tensor in heads(output)]
    seen = {*(x.grad_fn for x in inputs), *waiting}  # what the inputs came from belongs to others
    while waiting:
        node = waiting.pop()
        found = getattr(node, "variable", None)
        if isinstance(found, nn.Parameter) and id(found) not in own:
            raise RefusedError(
                f"{name} trains a parameter of shape {list(found.shape)} that its module does not have, so that all "
                "trials would share it; allowed: the module's own"
            )
        after = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= after
        waiting.extend(after)
