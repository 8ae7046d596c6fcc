"""The table of fusion rules: which class runs a layer type for K trials at once.

A rule is one class under `@rule(nn.Something)`, or, for a layer made of other layers, one plain function under
`@forward_of(nn.Something)`; adding a layer touches one file of this folder.
"""

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from trials.fusion.errors import FuseError as FuseError

if TYPE_CHECKING:
    from trials.fusion.rows import Rows


class Layer(abc.ABC):
    """One layer of K trials.

    Parameters and buffers live in `Rows` in the user's own shape with a leading axis K, so that taking trials out or
    in never concerns a layer; whatever layout the arithmetic wants is made here, as a view where possible.
    """

    varying: ClassVar[tuple[str, ...]] = ()
    """Attributes (numbers) in which trials may differ; they become vectors. All other attributes must be equal."""

    free: ClassVar[bool] = False
    """Does no device work (a view), hence is no unit that the gate is asked about."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """Read the attributes of one trial's `module`, which stands at `path` in the model.

        Raises:
            FuseError: an attribute has a value that the rule does not handle.
        """
        self.path = path
        self.label = label(module, path)

    def bind(self, rows: "Rows") -> None:  # noqa: B027 - most layers without parameters need nothing
        """Take the current tensors from `rows`; called after the rows were built or changed."""

    @abc.abstractmethod
    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        """Compute the layer for all trials.

        Args:
            x: ``x_KB...`` if `per_trial`, else one ``x_B...`` that all trials share.
            per_trial: whether `x` has the leading axis K.
            training: the mode that the user's module had when it was traced.

        Returns:
            The output, and whether it (or, of a tuple, its tensors) has the leading axis K.
        """


class JointLayer(Layer):
    """A layer that takes more than one tensor: several inputs, or options in the call."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self._signature = inspect.signature(module.forward)

    def arrange(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The inputs of a call in the order of the user's `forward`, with its defaults filled in.

        Raises:
            FuseError: they are not those that the layer takes.
        """
        return arrange(f"module '{self.label}'", self._signature, args, kwargs)

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        """See `Layer`; what is not `x` has its default."""
        values = self.arrange((x,), {})
        return self.run_joint(values, (per_trial, *[False] * (len(values) - 1)), training)

    @abc.abstractmethod
    def run_joint(self, values: Sequence[Any], per_trial: Sequence[bool], training: bool) -> tuple[Any, bool]:
        """Like `run`, with all inputs, in the order of the user's `forward`, and a flag for each."""


def arrange(
    place: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The inputs of a call in the order of `signature`, with its defaults filled in.

    Raises:
        FuseError: `signature` takes others.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise FuseError(f"{place} is called with other inputs than it takes: {error}") from error
    bound.apply_defaults()
    return tuple(bound.arguments.values())


RULES: dict[type[nn.Module], type[Layer]] = {}

FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {}
"""Layers made of other layers -> their `forward` without the branches that cannot be traced."""

LayerType = TypeVar("LayerType", bound=type[Layer])
ForwardType = TypeVar("ForwardType", bound=Callable[..., Any])


def rule(*types: type[nn.Module]) -> Callable[[LayerType], LayerType]:
    """Register the decorated `Layer` as the way to run `types`, and exactly these: a subclass may compute otherwise."""

    def register(layer: LayerType) -> LayerType:
        for module_type in types:
            RULES[module_type] = layer
        return layer

    return register


CallRule = Callable[[Sequence[Any], Sequence[bool], list[torch.Generator]], tuple[Any, bool]]
"""Takes a call's inputs in the order of its signature, a flag for each, and a stream per trial."""

CALLS: dict[Any, tuple[inspect.Signature, CallRule]] = {}
"""Functions that a user's own code may call and that have a rule: they draw random numbers, or need no `vmap`."""


def call_rule(target: Any, like: Callable[..., Any] | None = None) -> Callable[[CallRule], CallRule]:
    """Register the decorated function as the way to call `target`, whose signature is that of `like`, or its own."""

    def register(call: CallRule) -> CallRule:
        CALLS[target] = inspect.signature(like or target), call
        return call

    return register


def forward_of(module_type: type[nn.Module]) -> Callable[[ForwardType], ForwardType]:
    """Register the decorated function, with the signature of ``module_type.forward``, to be traced in its place."""

    def register(forward: ForwardType) -> ForwardType:
        FORWARDS[module_type] = forward
        return forward

    return register


def label(module: nn.Module, path: str) -> str:
    """The name of a module in unit names and errors, such as ``"blocks.0.Linear"``."""
    name = type(module).__name__
    return f"{path}.{name}" if path else name


def supported() -> str:
    """The layer types that have a rule, for errors."""
    return ", ".join(sorted(module_type.__name__ for module_type in (*RULES, *FORWARDS)))


def find(module: nn.Module, path: str) -> type[Layer]:
    """The rule for `module`.

    Raises:
        FuseError: there is none.
    """
    layer = RULES.get(type(module))
    if layer is None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise FuseError(f"module '{path}' ({kind}) has no fusion rule; supported layers: {supported()}")
    return layer


def settings(module: nn.Module, varying: tuple[str, ...]) -> dict[str, object]:
    """The plain attributes of `module` in which trials must agree: all but `varying`."""
    plain = (bool, int, float, str, tuple, type(None))
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in ("training", *varying) and isinstance(value, plain)
    }


def refuse(path: str, module: nn.Module, setting: str, value: object, allowed: str) -> FuseError:
    """The error for an attribute whose value a rule does not handle."""
    return FuseError(f"module '{path}' ({type(module).__name__}): {setting}={value!r} cannot be fused; {allowed}")


def lift(x: Tensor, per_trial: bool, size: int) -> Tensor:
    """`x` with the leading axis K = `size`, without a copy."""
    return x if per_trial else x.expand(size, *x.shape)


def leading(values_K: list[float], like: Tensor, ndim: int) -> Tensor:
    """A vector over trials as a tensor ``[K, 1, ...]`` of `ndim` axes that broadcasts against `like`."""
    return like.new_tensor(values_K).view(-1, *[1] * (ndim - 1))
