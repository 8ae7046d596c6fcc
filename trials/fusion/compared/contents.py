"""Finds everything that an object reaches: what it holds, and what its functions have enclosed."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_CLOSED = (type, types.ModuleType, types.CodeType, Tensor, torch.Generator, fx.Proxy)
"""What is not looked into."""
NUMBERS = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""What is passed over."""


def contents(value: Any, name: str = "", beyond: Container[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each object that `value` reaches, itself first and each once.

    Numbers, text and global variables of functions do not count. Objects whose ids are in `beyond` are not looked into.
    """
    seen: dict[int, Any] = {}
    waiting = deque([(name, value)])
    while waiting:
        path, one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        yield path, one
        if id(one) in beyond:
            continue
        waiting.extend(
            (f"{path}{step}", part)
            for step, part in parts_of(one)
            if type(part) not in NUMBERS and id(part) not in seen
        )


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of `value` that are kept in slots."""
    names = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name) for name in names if name not in _HIDDEN and hasattr(value, name)}


_HIDDEN = ("__dict__", "__weakref__")


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what one object holds itself, each by the step that leads there."""
    if isinstance(value, _CLOSED):
        return
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[a {type(key).__name__}]", item
            yield ", a key", key
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" of '{variable}'", content_of(cell)) for variable, cell in cells)
    for kinds, names in _INSIDE:
        if isinstance(value, kinds):
            yield from ((f".{name}", getattr(value, name)) for name in names)
    attributes = {**getattr(value, "__dict__", {}), **slots_of(value)}
    yield from ((f".{name}", item) for name, item in attributes.items())


_INSIDE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (types.FunctionType, ("__defaults__", "__kwdefaults__")),
    (types.MethodType, ("__self__", "__func__")),
    (types.BuiltinFunctionType, ("__self__",)),
    (functools.partial, ("func", "args", "keywords")),
)
"""What objects hold beside their attributes."""


def content_of(cell: types.CellType) -> object:
    """Return what a function has enclosed; None if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
