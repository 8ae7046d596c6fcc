"""Refuses what building a trial sets for it where all trials look, when later another one's is there.

That may be an attribute of the study, a global variable, or an attribute of a class or a module of the user's.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.compared.reads import names_in
from trials.fusion.errors import FuseError
from trials.study import Study
from trials.training.inputs.study_code import functions_of, is_near, is_of_library, names_read
from trials.training.inputs.study_state import is_same

_LATER = (
    *("loss", "score", "metrics", "batches", "trial_batches", "validation"),
    *("scheduler", "clip_norm", "clip_value", "scaler"),
)
"""Methods that are called for a trial when others may have been built since."""
_LATER_OF_PARTS = "forward", "step"
_BUILDING = "model", "optimizer"

_set: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> the places that building a trial has set."""
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> the names in the code of its models and optimizers that runs later."""


@contextmanager
def building(study: Study) -> Iterator[list[Any]]:
    """Enter it to build a trial. What is set there once is taken for common to all trials, and so is what is added.

    Yields:
        A list, for the trial's model and optimizers.

    Raises:
        FuseError: what is read later is set anew, or to a part of the trial. It is put back.
    """
    is_first = study not in _set
    known, read = _set.setdefault(study, set()), _read.setdefault(study, set())
    read |= names_read(study, _LATER)
    before = {place: _Kept(place.value) for place in _places(study)}
    parts: list[Any] = []
    yield parts
    read |= _names_of(parts)
    inside = {id(each) for part in parts for each in (part, *_inside(part))}
    again = []
    for place in dict.fromkeys(_places(study)):  # several functions may name one
        kept = before.get(place, _NONE)
        if place.name not in read or kept.is_still(place.value):
            continue
        is_new = is_first or kept.value is None
        if place in known or not is_new or id(place.value) in inside:
            again.append(place)
        known.add(place)
    for place in again:
        place.put_back(before.get(place, _NONE))
    if again:
        raise FuseError(
            f"building a trial sets {min(place.text for place in again)} anew, which is read when it may be another "
            "trial's; allowed: the same for all trials, an attribute of the model, or what a method gets, such as "
            "loss(self, outputs, targets, params)"
        )


class _Place(NamedTuple):
    """Where a value is that any code may read."""

    text: str
    table_id: int
    name: str
    owner: Any

    def __hash__(self) -> int:
        return hash((self.table_id, self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and (self.table_id, self.name) == (other.table_id, other.name)

    @property
    def value(self) -> Any:
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name)

    def put_back(self, kept: "_Kept") -> None:
        kept.put_back()
        if isinstance(self.owner, dict):
            self.owner[self.name] = kept.value
            if kept is _NONE:
                del self.owner[self.name]
        elif kept is _NONE:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, kept.value)


class _Kept:
    """What was in a place, and how to put it back."""

    def __init__(self, value: Any) -> None:
        self.value, self._contents = value, _Contents(value)

    def is_still(self, value: Any) -> bool:
        """Whether it is there, unchanged; dictionaries and sets in it may have grown, as those that cache do."""
        if value is not self.value:
            return self.value is not None and is_same(self.value, value)
        return _has_grown_at_most(self._contents.text, _Contents(value).text)

    def put_back(self) -> None:
        """Give an object the contents that it had."""
        if not self.is_still(self.value):
            for container, contents in self._contents.held:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(contents)


_MOST = 300
"""So many parts of a value are looked at. What has more is a table of data, and seldom changed in place."""


class _Contents:
    """The plain contents of a value, such as a configuration's; of anything else, which object it is.

    Attributes:
        text: equal if and only if the contents are; see `_has_grown_at_most`.
        held: each container inside, and a shallow copy of it.
    """

    def __init__(self, value: Any) -> None:
        self.held: list[tuple[Any, Any]] = []
        self._left, self._seen = _MOST, set[int]()
        self.text: Any = self._of(value)
        if self._left < 0:
            self.held, self.text = [], id(value)

    def _of(self, value: Any) -> Any:
        self._left -= 1
        if isinstance(value, (bool, int, float, complex, str, bytes)):
            return type(value), repr(value)
        if isinstance(value, Tensor):
            return id(value), value._version
        if self._left < 0 or isinstance(value, type) or id(value) in self._seen:
            return id(value)
        self._seen.add(id(value))
        return self._inside(value)

    def _inside(self, value: Any) -> Any:
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            if len(value) > self._left:
                self._left = -1
                return id(value)
            if not isinstance(value, (tuple, frozenset)):
                self.held.append((value, value.copy()))
            if isinstance(value, dict):
                return {name: self._of(each) for name, each in value.items()}
            if isinstance(value, (set, frozenset)):
                return frozenset(map(_key, value))
            return id(value), len(value), tuple(map(self._of, value))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and (isinstance(value, SimpleNamespace) or not is_of_library(type(value).__module__)):
            return id(value), self._of(own)
        return id(value)


def _key(value: Any) -> Any:
    """Describe an element of a set."""
    return (type(value), repr(value)) if isinstance(value, (bool, int, float, complex, str, bytes)) else id(value)


def _has_grown_at_most(one: Any, other: Any) -> bool:
    """Whether contents are what they were, but for new keys, attributes and elements of sets."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(key in other and _has_grown_at_most(one[key], other[key]) for key in one)
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return one <= other
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_has_grown_at_most, one, other))
    return bool(one == other)


_NONE = _Kept(None)


def _places(study: Study) -> Iterable[_Place]:
    """Return the study's attributes, and what the code names that builds a trial."""
    own = vars(study)
    found = [_Place(f"the study's attribute '{name}'", id(own), name, own) for name in own]
    functions = functions_of(study, _BUILDING)
    names = set[str]().union(*(names_in(function.__code__) for function in functions))
    for function in functions:
        table = function.__globals__
        inside = {name: table[name] for name in names_in(function.__code__) & table.keys()}
        found += [
            _Place(f"the global variable '{name}'", id(table), name, table) for name in inside if _is_data(inside[name])
        ]
        for owner in (each for each in inside.values() if isinstance(each, (type, types.ModuleType))):
            if is_near(owner, function):
                named: Mapping[str, Any] = {name: vars(owner)[name] for name in names & vars(owner).keys()}
                where = f"{owner.__name__}'s attribute"
                found += [_Place(f"{where} '{n}'", id(owner), n, owner) for n in named if _is_data(named[n])]
    return found


def _is_data(value: Any) -> bool:
    code = types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod
    return not isinstance(value, code)


def _names_of(parts: Iterable[Any]) -> set[str]:
    """Return the names in the user's code of a trial's parts that runs when it trains."""
    modules = (module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    optimizers = (part for part in parts if isinstance(part, torch.optim.Optimizer))
    kinds: set[Any] = {type(each) for each in (*modules, *optimizers)}
    own = (kind for kind in kinds if not is_of_library(kind.__module__))
    return set[str]().union(*(names_read(kind, _LATER_OF_PARTS) for kind in own))


def _inside(part: Any) -> Iterable[Any]:
    return (*part.modules(), *part.parameters()) if isinstance(part, nn.Module) else ()
