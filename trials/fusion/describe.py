"""Describes values in a form that can be hashed and compared, between trials or before and after a forward.

Code that is not traced runs for all trials from one trial's module, so all that it may read must be equal.
"""

import functools
import hashlib
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OWN = frozenset(vars(nn.Module()))
"""The tables of parameters, buffers, submodules and hooks of every module. They are compared elsewhere."""


def attributes(model: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Map (path, attribute) to its description, for all but tensors that the modules of `model` hold."""
    describe = Describer(model)
    return {
        (path, name): describe(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN and name != "forward" and not isinstance(value, Tensor)
    }


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in plain attributes of `module`: neither parameters nor buffers, but a trial's own."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def global_values(model: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Map (path, name) to the description of each global variable that a forward of `model` could change."""
    describe = Describer(model)
    found = {}
    for path, module in model.named_modules():
        function = getattr(type(module).forward, "__wrapped__", type(module).forward)
        if not isinstance(function, types.FunctionType) or function.__module__.startswith("torch."):
            continue
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, (*_PLAIN, list, dict, set, Tensor)):
                found[path, name] = describe(value)
    return found


def class_of(value: object) -> Hashable:
    """Describe the class of `value`. A class made in a function is described by its methods' code."""
    return Describer(None)(type(value))


class Describer:
    """Describes values, each object once."""

    def __init__(self, model: nn.Module | None) -> None:
        """Modules and tensors of `model` are described by their names."""
        self._names: dict[int, str] = {}
        if model is not None:
            for table in (model.named_modules(), model.named_parameters(), model.named_buffers()):
                self._names.update({id(value): f"{type(value).__name__} '{name}'" for name, value in table})
        self._seen: dict[int, tuple[object, Hashable]] = {}

    def __call__(self, value: Any) -> Hashable:
        """Describe `value`."""
        if isinstance(value, _PLAIN):
            return value if value == value else repr(value)
        if id(value) in self._names:
            return self._names[id(value)]
        if id(value) not in self._seen:
            self._seen[id(value)] = value, f"the {type(value).__name__} that contains it"
            self._seen[id(value)] = value, self._describe(value)
        return self._seen[id(value)][1]

    def _describe(self, value: Any) -> Hashable:
        for types_, parts in _PARTS:
            if isinstance(value, types_):
                return (type(value).__qualname__, *parts(self, value))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return (value.co_code, value.co_names, self(value.co_consts))
        if hasattr(value, "__dict__"):
            return (self._class(type(value)), self(vars(value)))
        return (type(value).__qualname__, repr(value))

    def _class(self, value: type) -> Hashable:
        name = f"{value.__module__}.{value.__qualname__}"
        if "<locals>" not in name:
            return name
        own = {key: item for key, item in vars(value).items() if not key.startswith("__") or callable(item)}
        return (name, self(own), tuple(self(base) for base in value.__bases__))

    def _function(self, value: types.FunctionType) -> Hashable:
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" not in name:
            return name
        cells = tuple(self(_content(cell)) for cell in value.__closure__ or ())
        return (name, self(value.__code__), self(value.__defaults__), self(value.__kwdefaults__), cells)


def _wrapped(value: Any) -> object:
    return value.fget if isinstance(value, property) else value.__func__


_PARTS: tuple[tuple[type | tuple[type, ...], Callable[[Describer, Any], Iterable[Hashable]]], ...] = (
    (Tensor, lambda describe, value: (tuple(value.shape), str(value.dtype), _digest(value))),
    (Mapping, lambda describe, value: ((describe(key), describe(item)) for key, item in value.items())),
    ((list, tuple), lambda describe, value: map(describe, value)),
    ((set, frozenset), lambda describe, value: (frozenset(map(describe, value)),)),
    (types.MethodType, lambda describe, value: (describe(value.__func__), describe(value.__self__))),
    (functools.partial, lambda describe, value: map(describe, (value.func, value.args, value.keywords))),
    ((property, staticmethod, classmethod), lambda describe, value: (describe(_wrapped(value)),)),
    (weakref.ref, lambda describe, value: (describe(value()),)),
    (torch.Generator, lambda describe, value: (_digest(value.get_state()),)),
    ((types.BuiltinFunctionType, types.ModuleType), lambda describe, value: (value.__name__,)),
)
"""Type -> what describes a value of it beside the type's name. The first that fits counts."""


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Return the global names, and more, that `code` and the functions inside it read or set."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _digest(tensor: Tensor) -> str:
    try:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    except Exception:  # no data of its own: of a forward under `vmap`, or on the meta device
        return "without data"
    return hashlib.sha256(data).hexdigest()[:16]
