"""Finds the code that methods of a study may run: those of its class, and what its attributes and modules hold."""

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.compared.reads import content, names_in

_found: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> by methods: the attributes that may have code when it was searched, and what was found."""


class Code(NamedTuple):
    """What methods may run.

    Attributes:
        functions: the user's functions.
        modules: the modules that they may call.
        names: all names in the functions.
        called: the names that others' functions, which they name, have at home.
    """

    functions: tuple[types.FunctionType, ...]
    modules: tuple[nn.Module, ...]
    names: frozenset[str]
    called: frozenset[str]


def code_run(owner: Any, methods: tuple[str, ...]) -> Code:
    """Return the code that `methods` of a study, or of a class, may run.

    A function is followed by the names in it: into attributes of the study and its class, global variables, modules of
    the user's, and variables around it. Libraries are not entered.
    """
    kind: Any = owner if isinstance(owner, type) else type(owner)
    held = {} if kind is owner else vars(owner)
    own = {name: value for name, value in held.items() if callable(value) or not _is_plain(value)}
    if not own:
        return _of_class(kind, methods)
    known = _found.setdefault(owner, {})
    before: dict[str, Any]
    code: Code | None
    before, code = known.get(methods, ({}, None))
    if code is None or before.keys() != own.keys() or any(before[name] is not own[name] for name in own):
        code = _search(kind, methods, own)
        known[methods] = own, code
    return code


def functions_of(owner: Any, methods: tuple[str, ...]) -> tuple[types.FunctionType, ...]:
    """Return the user's functions among that."""
    return code_run(owner, methods).functions


def names_read(owner: Any, methods: tuple[str, ...]) -> frozenset[str]:
    """Return all names in them."""
    return code_run(owner, methods).names


@lru_cache(256)
def _of_class(kind: Any, methods: tuple[str, ...]) -> Code:
    return _search(kind, methods, {})


def _search(kind: type, methods: Iterable[str], own: dict[str, Any]) -> Code:
    seen: dict[types.CodeType, types.FunctionType] = {}
    opened: dict[int, Any] = {}
    tables = [own, *(vars(each) for each in kind.__mro__)]
    waiting = [table.get(name) for table in tables for name in methods]
    while waiting:
        value = inspect.unwrap(_plain(waiting.pop()))
        if not isinstance(value, types.FunctionType):
            if callable(value) and id(value) not in opened:
                opened[id(value)] = value
                waiting += _called_by(value)
        elif is_of_library(str(value.__module__)):
            opened[id(value)] = value
        elif value.__code__ not in seen:
            seen[value.__code__] = value
            names = names_in(value.__code__)
            found = [table[name] for table in tables for name in names & table.keys()]
            found += _around(value, names)
            waiting += [*found, *(inner for each in found for inner in _inside(each, names))]
    modules = tuple(each for each in opened.values() if isinstance(each, nn.Module))
    called = frozenset(str(getattr(each, "__name__", "")) for each in opened.values())
    return Code(tuple(seen.values()), modules, frozenset[str]().union(*map(names_in, seen)), called)


def _around(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield what a function finds by `names` outside the study."""
    table = function.__globals__
    yield from (table[name] for name in names & table.keys())
    yield from map(content, function.__closure__ or ())
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _inside(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield what is found by `names` in a module, a class or an object of the user's."""
    if isinstance(value, types.ModuleType):
        tables: list[Any] = [] if is_of_library(value.__name__) else [vars(value)]
    else:
        kind = value if isinstance(value, type) else type(value)
        own = vars(value) if hasattr(value, "__dict__") and value is not kind else {}
        tables = [] if is_of_library(kind.__module__) else [own, *(vars(each) for each in kind.__mro__)]
    for each in tables:
        yield from (each[name] for name in names & each.keys())


def _called_by(value: Any) -> list[Any]:
    """Return what a call of something else than a function runs."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__]
    if isinstance(value, nn.Module):
        return [type(each).forward for each in value.modules()]
    names = ("__init__", "__call__", "forward") if isinstance(value, type) else ("__call__",)
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    return [vars(kind).get(name) for kind in kinds for name in names]


def _is_plain(value: Any) -> bool:
    """Whether an object has no code of the user's."""
    return is_of_library(type(value).__module__)


def _plain(value: Any) -> Any:
    """Return the function inside a method or a property."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def is_near(owner: Any, function: types.FunctionType) -> bool:
    """Whether a class or a module is the user's, and no library's."""
    home = str(owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__)
    return home == function.__module__ or not is_of_library(home)


def is_of_library(module: str) -> bool:
    """Whether a module of this name is nobody's own code."""
    file = str(getattr(sys.modules.get(module), "__file__", None))
    return "site-packages" in file or module.partition(".")[0] in _LIBRARIES


_LIBRARIES = {*sys.stdlib_module_names, "torch", "trials"}
