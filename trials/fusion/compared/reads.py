"""Finds what a forward reads beside its input and its module: global variables, closures and attributes of classes."""

import functools
import gc
import inspect
import sys
import types
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn

from trials.fusion.compared.contents import contents

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray, Tensor, numpy.ndarray)
_VALUES = (*PLAIN, *_CONTAINERS)
_WITHOUT_CODE = frozenset((bool, int, float, str, type(None), list, tuple, dict, OrderedDict, set))
"""What most attributes of a module are."""
_LIBRARIES = ("torch", "trials", "builtins", "numpy")
_MANY = 256
"""Longer containers are compared by identity alone, since a graph compares them before every step."""

_CACHE: Any = type(functools.lru_cache(lambda: None))

Codes = Mapping[types.CodeType, dict[str, Any]]
"""Code -> the global variables that it sees."""
Read = tuple[str, Callable[[], Any]]
"""A name for messages, and what returns the present value."""


def code_of(model: nn.Module) -> dict[types.CodeType, dict[str, Any]]:
    """Return the code that a forward of `model` may run: its own methods, and the functions that they name."""
    found: dict[types.CodeType, dict[str, Any]] = {}
    waiting = [function for function in _functions(model) if function.__name__ != "__init__"]
    while waiting:
        function = waiting.pop()
        if function.__code__ in found:
            continue
        found[function.__code__] = function.__globals__
        named = (function.__globals__.get(name) for name in names_in(function.__code__))
        enclosed = map(content, function.__closure__ or ())
        waiting += [each for each in map(_plain, (*named, *enclosed)) if each is not None and _is_near(each, function)]
    return found


def _is_near(named: types.FunctionType, function: types.FunctionType) -> bool:
    """Whether a function that another one names is the user's, or of the same library."""
    if not _is_users(named):
        return False
    is_installed = "site-packages" in named.__code__.co_filename or _root(named) in sys.stdlib_module_names
    return not is_installed or _root(named) == _root(function)


def reads(model: nn.Module, codes: Codes) -> Iterator[Read]:
    """Yield what `codes` read, for a forward of `model`."""
    roots = {_root(type(module)) for module in model.modules()}
    # a library that is not the model's may keep caches, which change no result
    own = {
        code: variables
        for code, variables in codes.items()
        if "site-packages" not in code.co_filename or str(variables.get("__name__")).partition(".")[0] in roots
    }
    owners = {kind: f"class {kind.__name__}" for module in model.modules() for kind in _classes(module)}
    yield from _global_reads(own, {id(kind): (owner, vars(kind)) for kind, owner in owners.items()})
    for function in _functions(model):
        if function.__code__ in own:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name != "__class__" and isinstance(content(cell), _VALUES):
                    yield f"variable '{name}' around {function.__name__}", _cell_getter(cell)


def _global_reads(codes: Codes, owners: dict[int, tuple[str, Mapping[str, Any]]]) -> Iterator[Read]:
    """Yield global variables that `codes` read, and attributes of `owners` and of objects in global variables."""
    names: set[str] = set()
    for code, variables in codes.items():
        own = names_in(code)
        names |= own
        for name in own & variables.keys():
            value = variables[name]
            if isinstance(value, _VALUES):
                yield f"global variable '{name}'", _getter(variables, name)
            elif _has_values(value):
                owners[id(value)] = f"'{name}'", _attributes(value)
    for owner, table in owners.values():
        tables = table.maps if isinstance(table, ChainMap) else [table]
        for name in set[str]().union(*(names.intersection(each) for each in tables)):
            if isinstance(table[name], _VALUES) and not name.startswith("__"):
                yield f"attribute '{name}' of {owner}", _getter(table, name)


def caches(model: nn.Module, codes: Codes) -> Iterator[Read]:
    """Yield what the caches of `functools` around methods, and around functions in `codes`, know of trials."""
    tables = [(vars(kind), set(vars(kind))) for module in model.modules() for kind in _classes(module)]
    for table, names in [*tables, *((variables, names_in(code)) for code, variables in codes.items())]:
        for name in names & table.keys():
            if isinstance(table[name], _CACHE):
                yield f"cache of '{name}'", functools.partial(_of_trials, table[name])


def _of_trials(cache: Any) -> int:
    """Return how many of a cache's keys have tensors or modules in them, and how many results belong to a graph."""
    held = gc.get_referents(cache)
    table = {key: own for part in held if type(part) is dict and part is not vars(cache) for key, own in part.items()}
    keys = (part for key in table for _, part in contents(key))
    results = (part for value in (*held, *table.values()) if not isinstance(value, dict) for part in _items(value))
    return sum(isinstance(part, (Tensor, nn.Module, fx.Proxy)) for part in keys) + sum(map(_is_computed, results))


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if type(value) in (tuple, list) else (value,)


def _is_computed(part: Any) -> bool:
    """Whether a result is a trial's own."""
    if not isinstance(part, Tensor):
        return isinstance(part, fx.Proxy)
    return part.requires_grad or torch._C._functorch.is_batchedtensor(part)


class Watch:
    """Notices when what a graph was traced with has changed."""

    def __init__(self, model: nn.Module, codes: Codes) -> None:
        """Note the present values of what `codes` read."""
        self._noted = [(name, get, _state(get())) for name, get in reads(model, codes)]

    def changed(self) -> str:
        """Return the name of what has changed, or nothing."""
        return next((name for name, get, before in self._noted if _state(get()) != before), "")


def names_in(code: types.CodeType) -> set[str]:
    """Return the global names, and more, that `code` and the functions inside it read or set."""
    inside = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return set(code.co_names).union(*map(names_in, inside))


def content(cell: types.CellType) -> object:
    """Return the value of a variable around a function."""
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _functions(model: nn.Module) -> Iterator[types.FunctionType]:
    """Yield the functions of the user's classes in `model`, and those that its modules hold."""
    seen = set()
    for module in model.modules():
        for table in (vars(module), *map(vars, _classes(module))):
            for value in table.values():
                function = None if type(value) in _WITHOUT_CODE else _plain(value)
                if function is not None and id(function) not in seen and _is_users(function):
                    seen.add(id(function))
                    yield function


def _classes(module: nn.Module) -> list[type]:
    """Return the user's own classes of a module."""
    return [kind for kind in type(module).__mro__ if _root(kind) not in _LIBRARIES]


def _plain(value: Any) -> types.FunctionType | None:
    """Return the function inside a method, a property or a decorator."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    return inspect.unwrap(value) if isinstance(value, types.FunctionType) else None


def _is_users(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _root(value) not in _LIBRARIES


def _has_values(value: Any) -> bool:
    """Whether a variable is an object, a class or a module of the user's, whose attributes code may read."""
    if isinstance(value, (types.FunctionType, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    return str(home).partition(".")[0] not in _LIBRARIES


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, a class or a module, as they are at any time."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    own = [] if isinstance(value, type) else [vars(value)]
    tables: list[Any] = [*own, *(vars(kind) for kind in kinds)]
    return ChainMap(*tables)


def _root(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _getter(table: Mapping[str, Any], name: str) -> Callable[[], Any]:
    return lambda: table.get(name)


def _cell_getter(cell: types.CellType) -> Callable[[], Any]:
    return lambda: content(cell)


def _state(value: Any) -> object:
    """Return what is equal as long as `value` is the same."""
    if isinstance(value, PLAIN):
        return type(value), value if value == value else repr(value)
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, numpy.ndarray):
        return id(value), value.tobytes() if value.size <= _MANY else None
    if not isinstance(value, _CONTAINERS) or len(value) > _MANY:
        return id(value)
    if isinstance(value, dict):
        return id(value), [(key, _state(item)) for key, item in value.items()]
    return id(value), [_state(item) for item in value]
