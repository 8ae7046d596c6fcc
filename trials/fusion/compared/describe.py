"""Describes values in a form that can be hashed and compared, between trials or before and after a forward.

Code that is not traced runs for all trials from one trial's module, so all that it may read must be equal.
"""

import copyreg
import enum
import functools
import hashlib
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from trials.fusion.compared.contents import content_of, slots_of
from trials.fusion.compared.peft_configs import fields_of
from trials.fusion.compared.reads import caches, code_of, reads

_PLAIN = (int, str, bytes, type(None), torch.dtype, torch.device)
_NUMBERS = (bool, float, complex)
_OWN = frozenset(vars(nn.Module()))
"""The tables of parameters, buffers, submodules and hooks of every module. They are compared elsewhere."""
_DERIVED = _OWN | {"forward", "_flat_weights", "_flat_weight_refs", "_compiled_call_impl", "_torchdynamo_wrapper_id"}
"""Those, what a recurrent layer makes of its parameters, and what `torch.compile` makes of a module."""


def attributes(model: nn.Module, of: Container[str] | None = None) -> dict[tuple[str, str], Hashable]:
    """Map (path, attribute) to its description, for all but tensors that modules hold: of `model`, or those at `of`."""
    describe = Describer(model)
    return {
        (path, name): describe(value)
        for path, module in model.named_modules()
        if of is None or path in of
        for name, value in vars(module).items()
        if name not in _DERIVED and not isinstance(value, Tensor) and not _is_compiler(module)
    }


def own_forwards(model: nn.Module) -> dict[tuple[str, str], Hashable]:
    """The same for forwards that modules have instead of their class's."""
    describe = Describer(model)
    return {
        (f"module '{path}'", "forward"): Code(describe(vars(module)["forward"]))
        for path, module in model.named_modules()
        if "forward" in vars(module) and not _is_compiler(module)
    }


def _is_compiler(module: nn.Module) -> bool:
    """Whether it is only what `torch.compile` puts around a user's module."""
    return type(module).__module__.startswith("torch._dynamo")


def attributes_of_user(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a user's module has beside parameters, buffers and modules."""
    if type(module).__module__.startswith("torch."):
        return {}
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in plain attributes of `module`: neither parameters nor buffers, but a trial's own."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def outer_values(model: nn.Module) -> dict[str, Hashable]:
    """Map the name of each variable outside `model` that its forward may change to a description of the value."""
    describe = Describer(model, into_objects=False)
    codes = code_of(model)
    return {name: describe(get()) for name, get in (*reads(model, codes), *caches(model, codes))}


def class_of(module: nn.Module, model: nn.Module) -> Hashable:
    """Describe the class of a `module` of `model`. A class made in a function is described by its methods' code."""
    return Describer(model)(type(module))


@dataclass(frozen=True, slots=True)
class Value:
    """A number or a truth value: 1, 1.0 and True are equal in Python, but not to code that reads them."""

    kind: str
    text: str

    def __repr__(self) -> str:
        """As Python would print it."""
        return self.text


@dataclass(frozen=True, slots=True)
class Code:
    """A description of code, which is too long for a message."""

    description: Hashable

    def __repr__(self) -> str:
        """Tell it from others."""
        return f"code of its own ({hashlib.sha256(repr(self.description).encode()).hexdigest()[:8]})"


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """An object that shows no value to compare. It is equal to itself alone."""

    value: object

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        """See `__eq__`."""
        return id(self.value)

    def __repr__(self) -> str:
        """Name its type."""
        return f"a {type(self.value).__name__} that cannot be compared"


class Describer:
    """Describes values, each object once. Equal descriptions mean equal values, of equal types."""

    def __init__(
        self, model: nn.Module | None = None, parameters: Sequence[Tensor] = (), *, into_objects: bool = True
    ) -> None:
        """Modules and tensors of `model`, and `parameters`, are described by their names or numbers.

        Without `into_objects`, an object that is no container counts as one thing, whatever it holds.
        """
        self._into_objects = into_objects
        self._names: dict[int, str] = {id(p): f"parameter {index}" for index, p in enumerate(parameters)}
        if model is not None:
            for table in (model.named_modules(), model.named_parameters(), model.named_buffers()):
                self._names.update({id(value): f"{type(value).__name__} '{name}'" for name, value in table})
        self._seen: dict[int, tuple[object, Hashable]] = {}

    def __call__(self, value: Any) -> Hashable:
        """Describe `value`."""
        if type(value) in _PLAIN:
            return cast(Hashable, value)
        if type(value) in _NUMBERS:
            return Value(type(value).__name__, repr(value))
        if id(value) in self._names:
            return self._names[id(value)]
        if id(value) not in self._seen:
            self._seen[id(value)] = value, f"the {type(value).__name__} that contains it"
            self._seen[id(value)] = value, self._describe(value)
        return self._seen[id(value)][1]

    def _describe(self, value: Any) -> Hashable:
        if issubclass(type(value), fx.Proxy):  # which refuses questions
            return Same(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return (value.co_code, value.co_names, value.co_freevars, self(value.co_consts))
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        if not self._into_objects and not isinstance(value, _CONTAINERS):
            return Same(value)
        kind = self._class(type(value))
        varying = fields_of(value)
        named = sorted((name, item) for name, item in attributes_of(value).items() if name not in varying)
        attributes = tuple((name, self(item)) for name, item in named)
        if varying:
            return (kind, *attributes)
        for types_, parts in _PARTS:
            if isinstance(value, types_):
                return (kind, *parts(self, value), *attributes)
        reduced = self._reduced(value)
        return reduced if isinstance(reduced, Same) else (kind, *attributes, reduced)

    def _reduced(self, value: Any) -> Hashable:
        """Describe what `value` is made of, as pickling sees it; attributes do not show what lies in C."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            made = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:
            return Same(value)
        if isinstance(made, str):
            return made
        return tuple(self(list(part) if isinstance(part, Iterator) else part) for part in made)

    def _class(self, value: type) -> Hashable:
        name = f"{value.__module__}.{value.__qualname__}"
        if _found_by_name(value) or not value.__flags__ & _MADE_BY_CODE:
            return name
        own = {key: v for key, v in vars(value).items() if (not key.startswith("__") or callable(v)) and key != _ABC}
        return (name, self(own), tuple(self(base) for base in value.__bases__))

    def _function(self, value: types.FunctionType) -> Hashable:
        name = f"{value.__module__}.{value.__qualname__}"
        if _found_by_name(value):
            return name
        cells = tuple(self(content_of(cell)) for cell in value.__closure__ or ())
        parts = (self(value.__code__), self(value.__defaults__), self(value.__kwdefaults__), self(vars(value)))
        return (name, *parts, cells)


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of one object, wherever it keeps them."""
    return {**getattr(value, "__dict__", {}), **slots_of(value)}


_MADE_BY_CODE = 1 << 9
"""A flag of classes that are made while a program runs (``Py_TPFLAGS_HEAPTYPE``)."""
_ABC = "_abc_impl"
"""An abstract class's own caches."""


def _found_by_name(value: Any) -> bool:
    """Whether its module has exactly this function or class under its name, so that the name says all."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _wrapped(value: Any) -> object:
    return value.fget if isinstance(value, property) else value.__func__


def _array(describe: Describer, value: "np.ndarray[Any, Any] | np.generic") -> Iterable[Hashable]:
    if value.dtype.hasobject:
        return (value.shape, describe(value.tolist()))
    return (value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest())


def _tensor(describe: Describer, value: Tensor) -> Iterable[Hashable]:
    return (tuple(value.shape), str(value.dtype), str(value.device), value.requires_grad, _digest(value))


_PARTS: tuple[tuple[type | tuple[type, ...], Callable[[Describer, Any], Iterable[Hashable]]], ...] = (
    (Tensor, _tensor),
    ((np.ndarray, np.generic), _array),
    (Mapping, lambda describe, value: ((describe(key), describe(item)) for key, item in value.items())),
    ((list, tuple, deque), lambda describe, value: map(describe, value)),
    ((set, frozenset), lambda describe, value: (frozenset(map(describe, value)),)),
    (enum.Enum, lambda describe, value: (value.name, describe(value.value))),
    (types.MethodType, lambda describe, value: (describe(value.__func__), describe(value.__self__))),
    (types.BuiltinFunctionType, lambda describe, value: (value.__qualname__, describe(value.__self__))),
    (functools.partial, lambda describe, value: map(describe, (value.func, value.args, value.keywords))),
    ((property, staticmethod, classmethod), lambda describe, value: (describe(_wrapped(value)),)),
    (weakref.ref, lambda describe, value: (describe(value()),)),
    (torch.Generator, lambda describe, value: (str(value.device), _digest(value.get_state()))),
    (random.Random, lambda describe, value: (value.getstate(),)),
    (np.random.Generator, lambda describe, value: (describe(value.bit_generator.state),)),
    (np.random.RandomState, lambda describe, value: (describe(value.get_state()),)),
    (
        types.GeneratorType,
        lambda describe, value: (Same(value), value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_lineno)),
    ),
)
"""Type -> what describes a value of it beside its class and attributes. The first that fits counts."""


def _digest(tensor: Tensor) -> Hashable:
    if tensor.device.type == "meta":
        return "without data"
    try:
        # a copy, because a tensor that numpy has seen cannot be resized any more
        plain = tensor.detach().clone(memory_format=torch.contiguous_format).cpu().resolve_conj().resolve_neg().view(-1)
        return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
    except Exception:  # no data of its own, such as a tensor of a forward under `vmap`
        return Same(tensor)


_CONTAINERS = tuple(kind for kinds, _ in _PARTS for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
"""The types in `_PARTS`."""
