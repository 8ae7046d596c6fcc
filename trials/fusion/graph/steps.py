"""The steps of a fused forward: a tensor of the user's, a fused layer, or a call in the user's code."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from trials.fusion.errors import is_out_of_memory
from trials.fusion.layers.memory_order import Order, Orders, as_ordered
from trials.fusion.own_code import autocast
from trials.fusion.own_code.drawing import draws_for_each
from trials.fusion.own_code.functional import ELEMENTWISE, JOINT, MOVED, aligned, cat
from trials.fusion.own_code.trees import apart, heads
from trials.fusion.registry import CALLS, CallRule, FuseError, JointLayer, Layer, arrange
from trials.fusion.rows import Rows
from trials.fusion.units import ask_before_backward


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the value of an earlier step in a step's arguments."""

    index: int


class State:
    """The values that the steps of one run pass to each other.

    Attributes:
        values: one per node.
        flags: whether a value, or the tensors of a tuple, has the leading axis K, one entry per trial. All trials
            share the others.
    """

    __slots__ = ("flags", "values")

    def __init__(self, count: int) -> None:
        """Room for `count` values."""
        self.values: list[Any] = [None] * count
        self.flags: list[bool] = [False] * count


class Step(abc.ABC):
    """One node of the graph.

    Attributes:
        layer_label: the layer that it runs; empty: none.
        keeps_order: whether it matters how its output lies in memory. See `keep_orders`.
    """

    layer_label = ""
    keeps_order = False

    def __init__(self, out: int) -> None:
        """A step that sets value `out`."""
        self.out = out
        self.last_reads: tuple[int, ...] = ()

    def bind(self, rows: Rows) -> None:  # noqa: B027 - most steps hold no tensors
        """Take the current tensors."""

    def draws(self) -> bool:
        """Whether it draws, or may draw, a number for each element of a tensor, in the order of memory."""
        return False

    @abc.abstractmethod
    def run(self, state: State) -> None:
        """Compute the value and its flag."""


def keep_orders(steps: Sequence[Step], is_drawn: bool = False) -> None:
    """Let those of the `steps` keep the order in memory of the trial alone that are before one that draws.

    `is_drawn` says whether something is drawn for what they give in the end.
    """
    for step in reversed(steps):
        step.keeps_order = is_drawn
        is_drawn = is_drawn or step.draws()


class TensorStep(Step):
    """Reads a parameter or buffer that the user's own code uses."""

    def __init__(self, out: int, name: str) -> None:
        """Reads the tensor called `name`."""
        super().__init__(out)
        self.name = name
        self.tensor: Tensor | None = None
        self.per_trial = True
        self.order: Order = None

    def bind(self, rows: Rows) -> None:
        """See `Step`."""
        name = rows.canonical(self.name)
        self.per_trial = name not in rows.once
        self.tensor = rows.tensor(name) if self.per_trial else rows.once[name]
        self.order = rows.orders.get(name)

    def run(self, state: State) -> None:
        """See `Step`."""
        found = self.tensor
        if self.keeps_order and self.order is not None and found is not None:
            found = as_ordered(found, self.order) if self.per_trial else as_ordered(found[None], self.order)[0]
        state.values[self.out] = found
        state.flags[self.out] = self.per_trial


class LayerStep(Step):
    """Runs a fused layer. The gate is asked before its forward and before its backward."""

    def __init__(
        self,
        out: int,
        source: int,
        layer: Layer,
        training: bool,
        enter: Callable[[], None] | None,
    ) -> None:
        """`enter` asks the gate for the forward; None: nothing is asked."""
        super().__init__(out)
        self.source, self.layer, self.training, self.enter = source, layer, training, enter
        self.layer_label = layer.label
        self.hook: Callable[[Any], None] | None = None

    def run(self, state: State) -> None:
        """See `Step`."""
        if self.enter is not None:
            self.enter()
        y, per_trial = self.compute(state)
        if self.hook is not None:
            for head in (y,) if isinstance(y, Tensor) else heads(y):
                ask_before_backward(head, self.hook)
        state.values[self.out] = y
        state.flags[self.out] = per_trial

    def draws(self) -> bool:
        """See `Step`."""
        return self.training and self.layer.draws

    def compute(self, state: State) -> tuple[Any, bool]:
        """Run the layer."""
        return self.layer.run(state.values[self.source], state.flags[self.source], self.training)


class JointStep(LayerStep):
    """Runs a fused layer that takes more than one tensor."""

    def __init__(
        self,
        out: int,
        inputs: Sequence[Any],
        layer: JointLayer,
        training: bool,
        enter: Callable[[], None] | None,
    ) -> None:
        """`inputs` are the layer's, with `Ref` for nodes."""
        super().__init__(out, out, layer, training, enter)
        self.joint, self.inputs = layer, inputs
        self.refs = [_found(value) for value in inputs]

    def compute(self, state: State) -> tuple[Any, bool]:
        """See `LayerStep`."""
        return self.joint.run_joint(*_inputs(self.inputs, self.refs, state), self.training)


class CallStep(Step):
    """Runs one function or method call of the user's own code."""

    def __init__(self, out: int, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> None:
        """`args` and `kwargs` are the node's, with `Ref` for nodes."""
        super().__init__(out)
        self.node = node.name
        self.target = node.target
        self.args, self.kwargs = args, kwargs
        self.refs = tuple(dict.fromkeys(_found((args, kwargs))))
        self.call = _method(node.target) if isinstance(node.target, str) else node.target
        flat = all(isinstance(arg, Ref) or not isinstance(arg, (tuple, list, dict, slice, Tensor)) for arg in args)
        self.elementwise = node.target in ELEMENTWISE and flat and not _found(kwargs)
        self.moved = MOVED.get(node.target) if bool(args) and isinstance(args[0], Ref) else None
        self.rule: CallRule | None = None
        self._draws = False
        if node.target in CALLS:
            signature, self.rule = CALLS[node.target]
            self.inputs = arrange(f"node '{node.name}'", signature, args, kwargs)
            self.input_refs = [_found(value) for value in self.inputs]
            self._draws = draws_for_each(node.target, dict(zip(signature.parameters, self.inputs, strict=True)))
        self.constant = not _found((args[1:], kwargs))
        self.flat = flat and not _found(kwargs)
        self.generators: list[torch.Generator] = []
        self.vmapped = self.looped = False
        self.orders = Orders()

    def bind(self, rows: Rows) -> None:
        """See `Step`."""
        self.generators = rows.generators

    def run(self, state: State) -> None:
        """See `Step`."""
        values, flags = state.values, state.flags
        if self.rule is not None:
            inputs, owned = _inputs(self.inputs, self.input_refs, state)
            value, per_trial = self.rule(inputs, owned, self.generators)
        elif not any(flags[index] for index in self.refs):
            args, kwargs = self._filled(0, values)
            value, per_trial = self.call(*args, **kwargs), False
        else:
            value = self._direct(state)
            value = self._vmapped(state) if value is NotImplemented else value
            if self.keeps_order:
                value = self._ordered(value, state)
            per_trial = isinstance(value, Tensor) or bool(apart(value)[0])
        values[self.out] = value
        flags[self.out] = per_trial

    def draws(self) -> bool:
        """See `Step`."""
        return self._draws

    def _direct(self, state: State) -> Any:
        """Return the call's result without `vmap`, or NotImplemented."""
        values, flags = state.values, state.flags
        if self.elementwise:
            args = [values[arg.index] if isinstance(arg, Ref) else arg for arg in self.args]
            own = [isinstance(arg, Ref) and flags[arg.index] for arg in self.args]
            together = aligned(args, own)
            return NotImplemented if together is None else self.call(*together, **self.kwargs)
        first = self.args[0] if self.args else None
        if self.call in (torch.cat, torch.concat) and isinstance(first, (list, tuple)):
            return self._cat(first, state)
        if not isinstance(first, Ref) or not flags[first.index]:
            return NotImplemented
        x = values[first.index]
        if isinstance(x, (tuple, list)) and self.constant:
            return self.call(x, *self.args[1:], **self.kwargs)
        if self.moved is None or not isinstance(x, Tensor):
            return NotImplemented
        args, kwargs = self._filled(1, values)
        if self.call in JOINT:
            second = self.args[1] if args else self.kwargs.get("target")
            if not isinstance(second, Ref):
                return NotImplemented
            target = args[0] if args else kwargs.pop("target")
            args = [target if flags[second.index] else target.unsqueeze(0), *args[1:]]
        elif any(flags[index] for index in self.refs if index != first.index):
            return NotImplemented
        try:
            return self.moved(x, *args, **kwargs)
        except TypeError:
            return NotImplemented

    def _ordered(self, value: Any, state: State) -> Any:
        """Return a call's result with each trial's tensors in the order in memory that they have alone."""
        values, flags = state.values, state.flags
        given = [tensor for index in self.refs for tensor in apart(values[index])[0]]
        found, together = apart(value)

        def of_first(index: int) -> Any:
            tensors, rebuild = apart(values[index])
            return rebuild([tensor[0] for tensor in tensors]) if flags[index] else values[index]

        def alone() -> list[Tensor]:
            args, kwargs = fill((self.args, self.kwargs), of_first)
            return apart(self.call(*args, **kwargs))[0]

        return together(self.orders.as_alone(found, given, alone)) if found else value

    def _filled(self, first: int, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments from number `first` on, and those by name, with the values of nodes."""
        if self.flat:
            args = [values[arg.index] if type(arg) is Ref else arg for arg in self.args[first:]]
            return args, dict(self.kwargs)
        found: tuple[list[Any], dict[str, Any]] = fill((list(self.args[first:]), self.kwargs), values.__getitem__)
        return found

    def _cat(self, parts: Sequence[Any], state: State) -> Any:
        dim = self.args[1] if len(self.args) > 1 else self.kwargs.get("dim", 0)
        if not all(isinstance(part, Ref) for part in parts) or not isinstance(dim, int):
            return NotImplemented
        joined = cat([state.values[p.index] for p in parts], [state.flags[p.index] for p in parts], dim)
        return NotImplemented if joined is None else joined

    def _vmapped(self, state: State) -> Any:
        """Compute the call under `vmap`; trial by trial if there is one, or if autocast would cast otherwise."""
        values = state.values
        own = [index for index in self.refs if state.flags[index]]
        parts = [apart(values[index]) for index in own]
        tensors_K = [tensors for tensors, _ in parts]
        together: list[Callable[[Sequence[Tensor]], Any]] = []

        def call(items: list[list[Tensor]]) -> Any:
            mine = {index: part[1](tensors) for index, part, tensors in zip(own, parts, items, strict=True)}
            args, kwargs = fill((self.args, self.kwargs), lambda index: mine.get(index, values[index]))
            return self.call(*args, **kwargs)

        def one(items: list[list[Tensor]]) -> tuple[Tensor, ...]:
            tensors, rebuild = apart(call(items))
            together[:] = [rebuild]
            return tuple(tensors)

        def alone(row: int) -> Any:
            return call([[tensor[row] for tensor in tensors] for tensors in tensors_K])

        first = next(tensor for tensors in tensors_K for tensor in tensors)
        self.looped = len(first) > 1 and autocast.has_parts(self.target, tensors_K, {})
        self.vmapped = len(first) > 1 and not self.looped
        try:
            if self.vmapped:
                found = torch.vmap(one, randomness="error")(tensors_K)
                return together[0](found)
            return autocast.trial_by_trial(alone, len(first), f"node '{self.node}'")
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise FuseError(f"node '{self.node}' cannot be computed for several trials at once: {error}") from error


def fill(value: Any, get: Callable[[int], Any], constant: Callable[[Any], Any] | None = None) -> Any:
    """Return `value` with each `Ref` in it replaced by what `get` returns for its index."""
    kind = type(value)
    if kind is Ref:
        return get(value.index)
    if kind is slice:
        return slice(fill(value.start, get), fill(value.stop, get), fill(value.step, get))
    if isinstance(value, (tuple, list)):
        return (
            [fill(v, get, constant) for v in value]
            if isinstance(value, list)
            else tuple(fill(v, get, constant) for v in value)
        )
    if isinstance(value, dict):
        return {name: fill(v, get, constant) for name, v in value.items()}
    return value if constant is None else constant(value)


def _found(value: Any) -> list[int]:
    """The indices of all `Ref` in `value`."""
    found: list[int] = []
    fill(value, lambda index: found.append(index))
    return found


def _inputs(inputs: Sequence[Any], refs: Sequence[list[int]], state: State) -> tuple[list[Any], list[bool]]:
    """The values of `inputs`, and which of them have the leading axis K."""
    values = [fill(value, state.values.__getitem__) for value in inputs]
    return values, [any(state.flags[index] for index in found) for found in refs]


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
