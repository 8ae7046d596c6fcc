"""The table of fusion rules: which class computes a type of layer for K trials at once.

A rule is a class under `@rule(nn.Something)`. For a layer made of other layers it is a plain function under
`@forward_of(nn.Something)`. A new layer is one file in `trials/fusion/layers`, imported in `trials/fusion/__init__.py`.

Letters in shapes: K trials, B examples in a batch; a layer's own file explains its others.
"""

import abc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.errors import FuseError as FuseError
from trials.pinned_memory import copied_to

if TYPE_CHECKING:
    from trials.fusion.rows import Rows


class Layer(abc.ABC):
    """One layer of K trials.

    Parameters and buffers live in `Rows`, in the user's own shape with a leading axis K, so removing or adding trials
    does not concern a layer. The layer makes the layout that its arithmetic needs, as a view where possible.
    """

    varying: ClassVar[tuple[str, ...]] = ()
    """Numeric attributes in which trials may differ; they become vectors. All other attributes must be equal."""

    inner: tuple[str, ...] = ()
    """The paths of the layers inside it that have rules of their own, if it is made of such."""

    free: ClassVar[bool] = False
    """Whether it does no device work, as a view does. Then it is not a unit, and the gate is not asked."""

    draws: bool = False
    """Whether, as it was bound last, it draws a number for each element in training, in the order of memory."""

    may_share: ClassVar[bool] = False
    """Whether the memory of its output may be that of its input, as a view's is."""

    shares_in_some: bool = False
    """Whether its output in training is its input itself in some of the trials that it is bound to, but not in all."""

    is_recordable: bool = True
    """Whether a CUDA graph may stand for it, as it was bound and run last: it has been seen in one, or is like those
    that have, and neither waits for the device nor copies from the host."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """Read the attributes of one trial's `module`, at `path` in the model.

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
        """Return the inputs of a call in the order of the user's `forward`, with its defaults filled in.

        Raises:
            FuseError: the layer does not take them.
        """
        return arrange(f"module '{self.label}'", self._signature, args, kwargs)

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        """See `Layer`. All inputs but `x` have their defaults."""
        values = self.arrange((x,), {})
        return self.run_joint(values, (per_trial, *[False] * (len(values) - 1)), training)

    @abc.abstractmethod
    def run_joint(self, values: Sequence[Any], per_trial: Sequence[bool], training: bool) -> tuple[Any, bool]:
        """Like `run`, with all inputs in the order of the user's `forward`, and whether each has the axis K."""


def arrange(
    where: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the inputs of a call in the order of `signature`, with its defaults filled in.

    Raises:
        FuseError: they do not match `signature`.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise FuseError(f"{where} is called with other inputs than it takes: {error}") from error
    bound.apply_defaults()
    return tuple(bound.arguments.values())


RULES: dict[type[nn.Module], type[Layer]] = {}

_OWN_CODE: dict[type[nn.Module], dict[str, Callable[..., Any]]] = {}
"""What the rules compute: the `forward` of each type, and the methods that it calls."""

FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {}
"""Layers made of other layers -> a `forward` for each, without branches that cannot be traced."""

LayerType = TypeVar("LayerType", bound=type[Layer])
ForwardType = TypeVar("ForwardType", bound=Callable[..., Any])


def rule(*types: type[nn.Module]) -> Callable[[LayerType], LayerType]:
    """Register the decorated `Layer` for exactly `types`. Subclasses may compute something else."""

    def register(layer: LayerType) -> LayerType:
        for module_type in types:
            RULES[module_type] = layer
            _OWN_CODE[module_type] = _code_of(module_type)
        return layer

    return register


NAMED: dict[str, type[Layer]] = {}
"""The same by module and name of the class, for classes of libraries that may not be there."""


def rule_named(*names: str) -> Callable[[LayerType], LayerType]:
    """Register the decorated `Layer` for exactly the classes called `names`, such as ``"library.layers.Linear"``."""

    def register(layer: LayerType) -> LayerType:
        NAMED.update(dict.fromkeys(names, layer))
        return layer

    return register


def ruled(module_type: type[nn.Module]) -> type[Layer] | None:
    """Return the rule for exactly this type, if there is one."""
    if module_type not in RULES:
        layer, forward = NAMED.get(f"{module_type.__module__}.{module_type.__qualname__}"), module_type.forward
        own = f"{module_type.__qualname__}.forward"
        if layer is None or (forward.__module__, forward.__qualname__) != (module_type.__module__, own):
            return None  # others may have replaced the library's forward
        RULES[module_type], _OWN_CODE[module_type] = layer, _code_of(module_type)
    return RULES[module_type]


CallRule = Callable[[Sequence[Any], Sequence[bool], list[torch.Generator]], tuple[Any, bool]]
"""Takes a call's inputs in the order of its signature, whether each has the axis K, and a random stream per trial."""

CALLS: dict[Any, tuple[inspect.Signature, CallRule]] = {}
"""Functions in users' code that have a rule, because they draw random numbers or need no `vmap`."""


def call_rule(target: Any, like: Callable[..., Any] | None = None) -> Callable[[CallRule], CallRule]:
    """Register the decorated function for calls of `target`. `like` has the signature if `target` has none."""

    def register(call: CallRule) -> CallRule:
        CALLS[target] = inspect.signature(like or target), call
        return call

    return register


def forward_of(module_type: type[nn.Module]) -> Callable[[ForwardType], ForwardType]:
    """Register the decorated function, to be traced instead of ``module_type.forward``; same signature."""

    def register(forward: ForwardType) -> ForwardType:
        FORWARDS[module_type], _OWN_CODE[module_type] = forward, _code_of(module_type)
        return forward

    return register


def label(module: nn.Module, path: str) -> str:
    """Return a module's name in unit names and errors, such as ``"blocks.0.Linear"``."""
    name = type(module).__name__
    return f"{path}.{name}" if path else name


def supported() -> str:
    """Return the layer types that have a rule, for error messages."""
    return ", ".join(sorted(module_type.__name__ for module_type in (*RULES, *FORWARDS)))


def find(module: nn.Module, path: str) -> type[Layer]:
    """Return the fused layer for `module`.

    Raises:
        FuseError: there is no rule.
    """
    layer = ruled(type(module))
    if layer is None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise FuseError(f"module '{path}' ({kind}) has no fusion rule; supported layers: {supported()}")
    if name := _replaced_in(module):
        raise FuseError(f"module '{path}' ({type(module).__name__}) has a {name} of its own")
    return layer


def plain_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the `forward` to trace instead of that of `module`, if it is a layer with one."""
    forward = FORWARDS.get(type(module))
    return None if forward is None or _replaced_in(module) else forward


def replaced_function() -> str:
    """Return which function of PyTorch's others have replaced for the whole process, or nothing.

    Rules and graphs would compute by the original, and function modes, as under a `vmap`, would call the other one
    twice.
    """
    for home, functions in _FUNCTIONS.items():
        now = vars(home)
        for name, function in functions:
            if now.get(name) is not function:
                return f"{home.__name__}.{name} is not PyTorch's own here"
    return ""


def _is_pytorchs(function: FunctionType | BuiltinFunctionType) -> bool:
    """Whether nobody has replaced it before this module was loaded. Decorators are Python's, too."""
    home = function.__globals__["__name__"] if isinstance(function, FunctionType) else str(function.__module__)
    top = home.partition(".")[0]
    return top in ("torch", "typing_extensions") or top in sys.stdlib_module_names


_FUNCTIONS = {
    home: [
        (name, own if _is_pytorchs(own) else None)
        for name, own in vars(home).items()
        if isinstance(own, (FunctionType, BuiltinFunctionType)) and not name.startswith("_") and hasattr(inside, name)
    ]
    for home, inside in ((functional, functional), (torch, torch._C._VariableFunctions))
}
"""What layers, and code between them, compute with."""


def _code_of(module_type: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return `forward` and the methods that it calls, by name, but for those that all modules have."""
    found: dict[str, Callable[..., Any]] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        method = getattr(module_type, name, None)
        if isinstance(method, FunctionType) and name not in found and method is not getattr(nn.Module, name, None):
            found[name] = method
            waiting += method.__code__.co_names
    return found


def _replaced_in(module: nn.Module) -> str:
    """Return the name of a method that others have replaced in `module` or its class, or nothing."""
    kind, own = type(module), _OWN_CODE[type(module)]
    return next((name for name, method in own.items() if name in vars(module) or getattr(kind, name) is not method), "")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module | None) -> bool:
    """Whether a `module` has hooks; None: whether there are some on all modules."""
    if module is None:
        return any(getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS)
    return any(getattr(module, name) for name in _HOOKS)


def instead_of_hooks(module: nn.Module) -> str:
    """Return what to write instead of a module's hooks."""
    makers = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}
    for maker, name in (("WeightNorm", "weight_norm"), ("SpectralNorm", "spectral_norm")):
        if maker in makers:
            return f"torch.nn.utils.parametrizations.{name} in place of torch.nn.utils.{name}"
    if hasattr(module, "weight_mask") or hasattr(module, "bias_mask"):
        return (
            "torch.nn.utils.prune.remove, if pruned weights may be trained again, or a parametrization that multiplies "
            "by the mask (torch.nn.utils.parametrize)"
        )
    if module._backward_hooks or module._backward_pre_hooks:
        return "none; what they do to gradients, an autograd.Function in the forward can do"
    return "none; what they do, a module around this one can do in its forward"


def refuse(path: str, module: nn.Module, setting: str, value: object, allowed: str) -> FuseError:
    """Return the error for an attribute whose value a rule does not handle."""
    return FuseError(f"module '{path}' ({type(module).__name__}): {setting}={value!r} cannot be fused; {allowed}")


def lift(x: Tensor, per_trial: bool, size: int) -> Tensor:
    """Return `x` with a leading axis K = `size`, without a copy."""
    return x if per_trial else x.expand(size, *x.shape)


def leading(values_K: list[float], like: Tensor, ndim: int) -> Tensor:
    """Return a vector over trials as a tensor ``[K, 1, ...]`` of `ndim` axes that broadcasts against `like`."""
    if values_K.count(values_K[0]) == len(values_K):  # no copy from the host, which no CUDA graph can record
        made = torch.full((len(values_K),), values_K[0], dtype=like.dtype, device=like.device)
    else:
        made = copied_to(like.device, torch.tensor(values_K, dtype=like.dtype))
    return made.view(-1, *[1] * (ndim - 1))
