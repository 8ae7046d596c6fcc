"""Records a forward as a graph with `torch.fx`, and refuses what a graph would not keep."""

import dataclasses
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_leaves

from trials.fusion.errors import FuseError, RefusedError, refused_freezing
from trials.fusion.graph.observer import is_library, is_message, source_line
from trials.fusion.graph.surroundings import (
    as_written,
    changed,
    noting_autocasts,
    refused_checkpoint,
    replaced,
    surroundings,
    without_recomputing,
)
from trials.fusion.own_code.asked import MEMORY
from trials.fusion.own_code.drawing import RANDOM_NAMES, may_draw_unseen
from trials.fusion.own_code.trees import know, refuse_own_kinds
from trials.fusion.registry import CALLS, has_hooks, plain_forward, ruled

_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
OUT_OF_PLACE = {
    getattr(operator, f"i{name}"): getattr(operator, f"{name}_" if name in ("and", "or") else name)
    for name in _AUGMENTED
}
"""``operator.iadd`` -> ``operator.add``, and so on."""

_FACTORIES = (torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.linspace)
"""Functions of sizes alone. They do not notice by themselves that a size is still unknown."""

_CALLS = ("call_function", "call_method", "call_module")


def recorded(function: Callable[..., Any], tracer: fx.Tracer | None = None) -> Callable[..., Any]:
    """Return `function` as one that becomes a node where an argument is unknown; in this thread, always in `tracer`."""
    tracing = threading.get_ident()  # others may read batches meanwhile

    def call(*args: Any, **kwargs: Any) -> Any:
        has_rule = tracer is not None and kwargs.get("generator") is None  # the user's own draws for no trial
        if tracer is not None and has_rule and threading.get_ident() == tracing:
            return tracer.create_proxy("call_function", function, args, kwargs)
        unknown = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, fx.Proxy)]
        if not unknown:
            return function(*args, **kwargs)
        return unknown[0].tracer.create_proxy("call_function", function, args, kwargs)

    return call


def _refused_apply(cls: type, *_: Any, **__: Any) -> Any:
    raise FuseError(f"{cls.__name__} is an autograd.Function, whose backward a graph does not keep")


@contextmanager
def recording(tracer: fx.Tracer, changing: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Enter it around a trace: some functions do not notice that their arguments are still unknown.

    Those with a rule that draw random numbers become nodes of `tracer` even where nothing is unknown.

    Args:
        tracer: takes the trace.
        changing: see `without_recomputing`.
    """
    _device_constructors()  # a cache, which would keep what is replaced here
    factories = {function.__name__: recorded(function) for function in _FACTORIES}
    drawing = {
        name: recorded(getattr(torch, name), tracer) for name in RANDOM_NAMES if getattr(torch, name, "") in CALLS
    }
    with (
        replaced(torch, **factories, **drawing),
        replaced(torch.autograd.Function, apply=classmethod(_refused_apply)),
        without_recomputing(refused_checkpoint, changing),
        noting_autocasts(),
        as_written(),
    ):
        yield


_ATTRIBUTES = frozenset(dir(Tensor))
_PERHAPS_NONE = ("grad", "_grad", "grad_fn", "_base")
"""Attributes of a tensor that may be None. A graph would freeze the answer to ``is None``, which no value notices."""


class _Unknown(fx.Proxy):
    """Refuses questions about a value that is known only when the graph runs.

    It records ``y += z`` as such. Plain fx would record ``y = y + z``, even if other code reads y.
    """

    def _refused(self, what: str) -> FuseError:
        """Return the error for what the caller's caller does with the value. See `Tracer.refused`."""
        tracer: Tracer = self.tracer  # type: ignore[assignment]
        return tracer.refused(f"{source_line(sys._getframe(2))} {what}")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class. `isinstance` looks here if it is no class of a `Proxy`, so that its answer would be wrong."""
        caller = sys._getframe(1)
        if caller.f_code is type(nn.Parameter).__instancecheck__.__code__ and caller.f_back is not None:
            caller = caller.f_back  # for the user's code, or for PyTorch's
        if not is_library(caller) or caller.f_code is torch.is_tensor.__code__:
            raise self.tracer.refused(  # type: ignore[attr-defined]
                f"{source_line(caller)} asks for the class of a value"
            )
        return type(self)

    def __getattr__(self, name: str) -> Any:
        """Record the attribute. Whether a value has it is not known, but tensors are."""
        if not name.startswith("__") and name not in _ATTRIBUTES:
            raise self._refused(f"reads the attribute '{name}', which a tensor lacks")
        if name.startswith("__array_"):
            raise self._refused("makes an array of a value")
        if name in _PERHAPS_NONE:
            raise self._refused(f"reads the attribute '{name}', which may be None when the graph runs")
        if name in MEMORY:
            raise self._refused(f"reads the attribute '{name}', about memory that a graph does not keep")
        return Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what a tensor has: a graph would not keep it."""
        if name == "requires_grad" and self.node.op == "get_attr":
            raise refused_freezing(str(self.node.target))
        if hasattr(Tensor, name):
            raise self._refused(f"sets the attribute '{name}' of a value")
        super().__setattr__(name, value)

    def __copy__(self) -> Any:
        """Refuse it: a copy of a value is not the value."""
        raise self._refused("copies a value; allowed: x.clone()")

    def __hash__(self) -> int:
        """Refuse it to the user's code: a set or a dict would not find an equal value."""
        if not is_library(sys._getframe(1)):
            raise self._refused("looks for a value in a set or a dict")
        return super().__hash__()

    def __repr__(self) -> str:
        """Refuse it to the user's code: the text is not the value's. A message is no answer: libraries format many."""
        caller = sys._getframe(1)
        if is_library(caller):
            return super().__repr__()
        if not is_message(caller):
            raise self._refused("makes text of a value")
        return "?"

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        """See `__repr__`."""
        if not is_message(sys._getframe(1)):
            raise self._refused("makes text of a value")
        return "?"

    def _number(self) -> Any:
        """Refuse it: the number is not known."""
        raise self._refused("makes a number of a value")

    __int__ = __float__ = __complex__ = _number

    def __len__(self) -> int:
        """Refuse it: the length is not known."""
        raise self._refused("asks for the length of a value; allowed: x.size(0)")


class Proxy(_Unknown):
    """A value."""


class Attribute(_Unknown, fx.proxy.Attribute):
    """An attribute or method of a value."""


def _augmented(target: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return record


for _target in OUT_OF_PLACE:
    setattr(_Unknown, f"__{_target.__name__}__", _augmented(_target))


class Tracer(fx.Tracer):
    """Stops at layers of torch.nn and at layers with a rule. Buffers become nodes, not constants."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module | None = None) -> None:
        """Remember the modes of `model`, which its forward must not change."""
        super().__init__()
        self._around = surroundings()
        self._flags = {} if model is None else flags(model)
        self.calls_with_buffers = 0
        self._first_refused: Exception | None = None

    def create_proxy(self, *of: Any, **options: Any) -> fx.Proxy:
        """See `fx.Tracer`. None of it is the user's code, so whoever observes that is spared most calls of a trace."""
        observing = sys.getprofile()
        sys.setprofile(None)
        try:
            return super().create_proxy(*of, **options)
        finally:
            sys.setprofile(observing)

    def create_arg(self, a: Any) -> Any:
        """See `fx.Tracer`."""
        if dataclasses.is_dataclass(type(a)):
            know(a)
            if any(leaf is a for leaf in tree_leaves(a)):
                raise FuseError(f"it makes a {type(a).__name__}, of which a graph knows no parts")
        if isinstance(a, Tensor):
            refuse_own_kinds(a)
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> fx.Node:
        """See `fx.Tracer`. A call in other surroundings than the whole forward's is refused."""
        if may_draw_unseen(target):
            raise FuseError(f"it calls {target}, which is no operator of PyTorch's, and may draw random numbers")
        node = super().create_node(kind, target, args, kwargs, *more, **options)
        if kind in _CALLS and (name := changed(self._around, surroundings())):
            raise FuseError(f"node '{node.name}' changes {name}, which a graph does not keep")
        return node

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """See `fx.Tracer`. A ``chunk`` has as many parts as the call asks for; with fewer, it fails when run."""
        count = _parts(obj.node)
        if count is None:
            with self._noting():
                return super().iter(obj)
        obj.node.meta["counted"] = True
        return iter([operator.getitem(obj, index) for index in range(count)])

    def to_bool(self, obj: fx.Proxy) -> bool:
        """See `fx.Tracer`."""
        with self._noting():
            return super().to_bool(obj)

    def refused(self, reason: str) -> FuseError:
        """Return the error for what a graph would freeze.

        It is kept for `check`: the user's code may catch it, and take the branch that it has for errors.
        """
        error = FuseError(reason)
        self._first_refused = self._first_refused or error
        return error

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._first_refused = self._first_refused or error
            raise

    def check(self, model: nn.Module) -> None:
        """Refuse the trace of `model` if the forward has changed a mode, or has caught what was refused.

        Raises:
            RefusedError: a parameter is frozen, or trained again.
            Exception: anything else.
        """
        self.check_flags(model)
        if self._first_refused is not None:
            raise self._first_refused

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See `fx.Tracer`."""
        return Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """See `fx.Tracer`."""
        if plain_forward(m) is not None:
            return False
        return ruled(type(m)) is not None or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """See `fx.Tracer`."""
        self.check_flags(m)
        if type(m)._call_impl is not nn.Module._call_impl or has_hooks(m):
            raise FuseError(f"{type(m).__name__} has a _call_impl of its own, or hooks that the forward sets")
        self.calls_with_buffers += m.training and next(m.buffers(), None) is not None
        plain = plain_forward(m)
        found = super().call_module(m, forward if plain is None else partial(plain, m), args, kwargs)
        return (found[0], None) if type(m) is nn.MultiheadAttention and _has_no_weights(args, kwargs) else found

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """See `fx.Tracer`."""
        plain = plain_forward(self.root)
        return super().create_args_for_root(root_fn if plain is None else plain, is_module, concrete_args)

    def check_flags(self, module: nn.Module) -> None:
        """Refuse a `module` whose modes the forward has changed.

        Raises:
            RefusedError: a parameter is frozen, or trained again.
            FuseError: a module is in another mode.
        """
        for name, value in flags(module).items():
            if self._flags.get(name, value) != value:
                what = type(module).__name__
                if name[0] == "requires_grad":
                    raise refused_freezing(what)
                how = "the mode" if name[0] == "training" else f"'{name[0]}'"
                raise FuseError(f"the forward sets {how} of {what}, and calls it")


def settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of `module` itself, such as its mode and the numbers of a layer."""
    found = {name: value for name, value in vars(module).items() if _sets(value)}
    return {name: tuple(value) if type(value) is list else value for name, value in found.items()}


_SETTINGS = {bool, int, float, str, type(None)}


def _sets(value: Any) -> bool:
    """Whether a value is plain, or some plain ones, such as the strides of a convolution."""
    return type(value) in _SETTINGS or (type(value) in (tuple, list) and _SETTINGS.issuperset(map(type, value)))


def flags(module: nn.Module) -> dict[tuple[str, int], Any]:
    """Return the modes and other settings of all modules in `module`, and which of its parameters are trained."""
    found: dict[tuple[str, int], Any] = {}
    for inner in module.modules():
        found.update({(name, id(inner)): value for name, value in settings(inner).items()})
        found["training", id(inner)] = inner.training  # a compiled module has its original's
    found.update({("requires_grad", id(own)): own.requires_grad for own in module.parameters()})
    return found


def set_flags(module: nn.Module, before: dict[tuple[str, int], Any]) -> None:
    """Set what `flags` returned.

    Raises:
        RefusedError: since then the forward has made a module or a parameter.
    """
    for name, inner in module.named_modules():
        if ("training", id(inner)) not in before:
            raise _refused_new("module", name)
        inner.training = before["training", id(inner)]
    for name, own in module.named_parameters():
        if ("requires_grad", id(own)) not in before:
            raise _refused_new("parameter", name)
        own.requires_grad_(before["requires_grad", id(own)])


def _refused_new(kind: str, name: str) -> RefusedError:
    return RefusedError(
        f"the forward makes the {kind} '{name}', which no optimizer trains and other trials do not have; allowed: to "
        "make it in __init__"
    )


def _has_no_weights(args: Any, kwargs: Any) -> bool:
    """Whether the second output of a call of an attention is None, for which the user's code may ask."""
    return kwargs.get("need_weights", args[4] if len(args) > 4 else True) is False


def _parts(node: fx.Node) -> int | None:
    """Return how many parts a ``chunk`` makes if the call has a literal number."""
    if node.target not in ("chunk", torch.chunk):
        return None
    count = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks")
    return count if isinstance(count, int) else None
