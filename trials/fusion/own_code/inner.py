"""Layers inside a forward that runs as a whole. Each leaves the `vmap` around it, and is a unit of its own."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from trials.fusion.graph.observer import comparing
from trials.fusion.graph.tracer import settings
from trials.fusion.layers.conv import as_alone, draws
from trials.fusion.layers.memory_order import FORMATS, Order, kept_order
from trials.fusion.own_code.together import tensor_entries
from trials.fusion.own_code.trees import apart, dims_of
from trials.fusion.registry import CALLS, FuseError, JointLayer, Layer, arrange
from trials.fusion.rows import Rows
from trials.fusion.units import LayerUnits


class OwnCode(Protocol):
    """A layer without a rule, run by its own code: `trials.fusion.own_code.mapped.Mapped`."""

    def bind(self, rows: Rows) -> None:
        """Take the tensors of `rows`; called after they were built or changed."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> Any:
        """Call the layer for all trials; see `Inner.run`. Every tensor in its output has the leading axis K."""

    def way(self, reason: str) -> str:
        """Return how the layer is computed. `reason` is why it has no rule."""


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
        self._inside = list(module.modules())
        self._settings = self._found()
        self._draws = self.training and (rule.draws if isinstance(rule, Layer) else draws(module))

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self._rows, self._settings = rows, self._found()
        if isinstance(self.rule, Layer):
            self.rule.bind(rows)
        if self.mapped is not None:
            self.mapped.bind(rows)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the output, and its `vmap` dimensions."""
        if self._draws:
            every = (*args, *kwargs.values()), (*dims[0], *dims[1].values())
            refuse_lost_order(self._rows, every[0], [dim == 0 for dim in every[1]], self.units.name.split()[0])
        if not isinstance(self.rule, Layer) or self.mapped is not None:
            assert self.mapped is not None  # there is one wherever there is no rule
            output = self.mapped.run(args, kwargs, dims)
            self.units.seen(output)
            return output, dims_of(output, per_trial=True)
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
            note_order(self._rows, [output], [per_trial])
            if self.training and self.rule.shares_in_some:
                if where := comparing(sys._getframe()):
                    raise FuseError(f"{where} compares by `is`, and in trials whose rate is 0 the output is the input")
                self._apart += [(tensor, _version(tensor)) for tensor in (inputs[0], output)]
        self.units.seen(output, per_trial)
        self.units.before_backward(output)
        return output, dims_of(output, per_trial)

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

    def way(self) -> str:
        """Return how it is computed."""
        return f"rule {type(self.rule).__name__}" if self.mapped is None else self.mapped.way(str(self.rule))


class Streams(Protocol):
    """A random stream per trial.

    Attributes:
        generators: they.
        keeps_order: whether some tensor lies as ``channels_last`` has it; see `note_order`.
    """

    generators: list[torch.Generator]
    keeps_order: bool


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
        refuse_lost_order(self._streams, inputs, owned, self._function.__name__)
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


def note_order(streams: Streams, values: Sequence[Any], owned: Sequence[bool]) -> None:
    """Note whether one of the `values`, those that are `owned` with the axis K, lies as ``channels_last`` has it."""
    if not streams.keeps_order:
        streams.keeps_order = any(_orders(values, owned))


def refuse_lost_order(streams: Streams, values: Sequence[Any], owned: Sequence[bool], name: str) -> None:
    """Refuse to draw for activations of which it is not known how they lie in the trial alone.

    Raises:
        FuseError: others lie as ``channels_last`` has it, and these may, too: `vmap` changes the order.
    """
    if streams.keeps_order and not all(_orders(values, owned)):
        raise FuseError(
            f"'{name}' draws in the order of memory, and under vmap activations lose that of channels_last; allowed: "
            "a forward that can be traced"
        )


def _orders(values: Sequence[Any], owned: Sequence[bool]) -> list[Order]:
    """Return the orders of tensors that may have another than the plain one."""
    rows = [x[0] if own else x for x, own in zip(values, owned, strict=True) if isinstance(x, Tensor)]
    return [kept_order(x) for x in rows if x.ndim in _KEEPING]


_KEEPING = {len(order) for order in FORMATS if order is not None}


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # or the code would seem to ask
        return tensor._version


def _owned(inputs: Sequence[Any], dims: Sequence[Any]) -> list[bool]:
    """Return which of `inputs` have the axis K, by their trees of `vmap` dimensions."""
    return [bool(apart(value)[0]) and 0 in tree_flatten(dim)[0] for value, dim in zip(inputs, dims, strict=True)]
