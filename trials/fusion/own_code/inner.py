"""Layers inside a forward that runs as a whole. Each leaves the `vmap` around it, and is a unit of its own."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from trials.fusion.graph.observer import comparing
from trials.fusion.graph.tracer import settings
from trials.fusion.layers.conv import as_alone, draws
from trials.fusion.layers.memory_order import order_of
from trials.fusion.own_code.drawing import Drawn, draws_for_each
from trials.fusion.own_code.streams import continue_from, note
from trials.fusion.own_code.together import tensor_entries
from trials.fusion.own_code.trees import apart, dims_of
from trials.fusion.registry import CALLS, FuseError, JointLayer, Layer, arrange
from trials.fusion.rows import Rows, Vectors
from trials.fusion.units import LayerUnits


class OwnCode(Protocol):
    """A layer without a rule, run by its own code: `trials.fusion.own_code.mapped.Mapped`.

    Attributes:
        ran_apart: whether its last call ran one trial after another, and not under `vmap`.
    """

    ran_apart: bool

    def bind(self, rows: Rows) -> None:
        """Take the tensors of `rows`; called after they were built or changed."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        """Call the layer for all trials; see `Inner.run`. Every tensor in its output has the leading axis K."""

    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        """Return what `run` would give for the first trial. It runs alone, on copies."""

    def way(self, reason: str) -> str:
        """Return how the layer is computed. `reason` is why it has no rule."""

    def ways(self) -> Iterator[tuple[str, str]]:
        """Yield what is computed otherwise inside, and how."""


class Inner:
    """A layer inside a whole model."""

    def __init__(
        self,
        rule: Layer | FuseError,
        mapped: OwnCode | None,
        units: LayerUnits,
        module: nn.Module,
        whole: nn.Module,
    ) -> None:
        """Take a `module` of the `whole`, computed by `rule` or, if that is an error, by `mapped`."""
        self.rule, self.mapped, self.units = rule, mapped, units
        self.training, self.forward, self.entries = module.training, as_alone(module), tensor_entries(module, whole)
        self._apart: list[tuple[Tensor, int]] = []
        self._draws_itself: bool | None = None  # not known yet
        self._inside = list(module.modules())
        self._settings = self._found()

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self._rows, self._settings = rows, self._found()
        if isinstance(self.rule, Layer):
            self.rule.bind(rows)
        if self.mapped is not None:
            self.mapped.bind(rows)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the output, and its `vmap` dimensions."""
        if not isinstance(self.rule, Layer) or self.mapped is not None:
            assert self.mapped is not None  # there is one wherever there is no rule
            noted = len(self._rows.drawn or ())
            output = self.mapped.run(args, kwargs, dims)
            if self.mapped.ran_apart and self._rows.drawn is not None:
                del self._rows.drawn[noted:]  # by a try under `vmap`
                self._note_drawn(args, kwargs, dims)
            self.units.seen(output)
            return output, dims_of(output, per_trial=True)
        self._note_drawn(args, kwargs, dims)
        if isinstance(self.rule, JointLayer):
            inputs, found = self.rule.arrange(args, kwargs), self.rule.arrange(*dims)
            flags = _owned(inputs, found)
            self.units.enter()
            output, per_trial = self.rule.run_joint(inputs, flags, self.training)
        else:
            inputs, found = (*args, *kwargs.values()), (*dims[0], *dims[1].values())
            if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
                raise FuseError(f"module '{self.rule.label}' is called with {len(inputs)} inputs; allowed: one tensor")
            self.units.enter()
            output, per_trial = self.rule.run(inputs[0], found[0] == 0, self.training)
            if self.training and self.rule.shares_in_some:
                if where := comparing(sys._getframe()):
                    raise FuseError(f"{where} compares by `is`, and in trials whose rate is 0 the output is the input")
                self._apart += [(tensor, _version(tensor)) for tensor in (inputs[0], output)]
        self.units.seen(output, per_trial)
        self.units.before_backward(output)
        return output, dims_of(output, per_trial)

    def run_alone(self, args: Any, kwargs: Any, row: int) -> Any:
        """Return the output for the trial in `row`, whose code runs for it alone, with PyTorch's random numbers."""
        stream, drawn = self._rows.generators[row], self._rows.drawn
        note(stream)  # whatever runs while the gate is closed may draw random numbers too
        self.units.enter()
        continue_from(stream)
        if self.mapped is None or self.mapped.ran_apart:
            self._note_drawn(args, kwargs)
            self._rows.drawn = None  # nothing is noted inside
        output = self.forward(*args, **kwargs)
        self._rows.drawn = drawn
        if drawn is None:
            self.units.seen(output, per_trial=False, row=row)
        self.units.before_backward(output)
        return output

    def _note_drawn(self, args: Any, kwargs: Any, dims: Any = None) -> None:
        """Note that its inputs lie so, if it draws for them by a rule, or trial by trial. No `dims`: of one trial."""
        if self._rows.drawn is not None and self._draws():
            given = tree_flatten((args, kwargs))[0]
            per_trial = [False] * len(given) if dims is None else [dim == 0 for dim in tree_flatten(dims)[0]]
            note_drawn(self._rows, given, per_trial)

    def _draws(self) -> bool:
        if isinstance(self.rule, Layer) and self.mapped is None:
            return self.training and self.rule.draws
        if self._draws_itself is None:
            self._draws_itself = draws(self._inside[0])
        return self._draws_itself

    def check(self) -> None:
        """Check that the code around it has not changed it for this call.

        Raises:
            FuseError: it is in another mode, or has other numbers.
        """
        kind = type(self._inside[0]).__name__
        if self._inside[0].training != self.training:
            raise FuseError(f"the forward sets the mode of {kind} (train, eval)")
        if self._found() != self._settings:
            raise FuseError(f"the forward sets an attribute of {kind} for a call")

    def _found(self) -> list[dict[str, Any]]:
        return [settings(each) for each in self._inside]

    def has_come_apart(self) -> bool:
        """Whether its input or output has been changed in place since, and is one tensor in some of the trials alone.

        They would see the change in the other, too.
        """
        seen, self._apart = self._apart, []
        return any(_version(tensor) != version for tensor, version in seen)

    def ways(self, looped: str) -> Iterator[tuple[str, str]]:
        """Yield it, and looped calls in its code, and how each is computed: one by one if all code is `looped`."""
        if looped:
            way = f"loop over trials: {looped}"
        else:
            way = f"rule {type(self.rule).__name__}" if self.mapped is None else self.mapped.way(str(self.rule))
        yield self.units.name.removesuffix(" forward"), way
        if self.mapped is not None and not looped:
            yield from self.mapped.ways()


def is_apart(module: nn.Module, path: str, rule: Layer | FuseError, vectors: Vectors | None) -> bool:
    """Whether a module inside a whole model is a layer of its own there; see `Mapped.number_inside`."""
    if not path or (not isinstance(rule, Layer) and list(module.children())):
        return False
    if vectors is not None and isinstance(rule, Layer) and rule.varying and path not in vectors:
        return False
    # in place, or a view: only the code around it knows what else sees the change
    return not getattr(module, "inplace", False) and not (isinstance(rule, Layer) and rule.free)


class Streams(Protocol):
    """A random stream per trial.

    Attributes:
        generators: they.
        drawn: for what numbers were drawn, while that is noted. See `note_drawn`.
    """

    generators: list[torch.Generator]
    drawn: list[Drawn] | None


class Call:
    """A function with a rule that a module's code or a loss calls."""

    def __init__(self, function: Callable[..., Any], streams: Streams) -> None:
        """A call, whose random numbers come from `streams`."""
        self._function, self._streams = function, streams

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        """See `Inner`."""
        signature, call = CALLS[self._function]
        inputs, found = (arrange(self._function.__name__, signature, *given) for given in ((args, kwargs), dims))
        owned = _owned(inputs, found)
        named = dict(zip(signature.parameters, inputs, strict=True))
        if self._streams.drawn is not None and draws_for_each(self._function, named):
            note_drawn(self._streams, inputs, owned)
        output, per_trial = call(inputs, owned, self._streams.generators)
        return output, dims_of(output, per_trial)


class Calls(TorchFunctionMode):
    """Passes every function that a module's code calls to `call`, while it is entered.

    Args:
        call: takes the function, its arguments and its arguments by name, and returns the function's result.
    """

    def __init__(self, call: Callable[[Callable[..., Any], Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call
        self._error = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"  # it would hold all trials' tensors
            raise

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Refuse code that has caught an error: it may have gone another way than it does for one trial.

        Raises:
            FuseError: it has.
        """
        super().__exit__(kind, *error)
        if kind is None and self._error:
            raise FuseError(f"the code catches {self._error}")


def note_drawn(streams: Streams, values: Sequence[Any], owned: Sequence[bool]) -> None:
    """Note, if `streams` do, that a number is drawn for each element of each tensor among `values`.

    Those that are `owned` have the axis K.
    """
    if streams.drawn is not None:
        tensors = [x[0] if own else x for x, own in zip(values, owned, strict=True) if isinstance(x, Tensor)]
        streams.drawn += [_drawn(x) for x in tensors]


def _drawn(x: Tensor) -> Drawn:
    order = order_of(x) or range(x.ndim)
    return tuple(x.shape), tuple(axis for axis in order if x.shape[axis] > 1)


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # or the code would seem to ask
        return tensor._version


def _owned(inputs: Sequence[Any], dims: Sequence[Any]) -> list[bool]:
    """Return which of `inputs` have the axis K, by their trees of `vmap` dimensions."""
    return [bool(apart(value)[0]) and 0 in tree_flatten(dim)[0] for value, dim in zip(inputs, dims, strict=True)]
