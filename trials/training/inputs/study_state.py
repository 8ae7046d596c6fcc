"""Refuses what the methods of a study keep for a trial or an epoch, in its attributes or elsewhere: all share that."""

import copy
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.compared.describe import Describer
from trials.fusion.compared.reads import content, names_in
from trials.fusion.errors import RefusedError
from trials.study import Study

_proven: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> the functions of which it is known that they keep nothing that mattered at once."""

_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> those of them that keep something, each with a copy of the study before, and how often it was called."""


_OF_ANY_EPOCH = ("loss", "score", "metrics", "scheduler", "clip_norm", "clip_value", "scaler")
"""Methods that are called when batches of another epoch may have been read since."""


@contextmanager
def setting_nothing(study: Study, source: str) -> Iterator[None]:
    """Enter it to read a study's batches. What is set there once is taken for common to all epochs.

    Raises:
        RefusedError: an attribute that methods read which are called later, such as the loss, is set anew.
    """
    own = vars(study)
    before = {name: own[name] for name in names_read(type(study), _OF_ANY_EPOCH) & own.keys()}
    yield
    for name, value in before.items():
        if value is not None and own.get(name) is not value and not is_same(value, own.get(name)):
            raise RefusedError(
                f"{source} sets the study's attribute '{name}' anew, which the loss or another method reads when "
                "it may be of another epoch; allowed: to give it with the batch, in the inputs or targets"
            )


def may_set(study: Study) -> bool:
    """Whether there is anything that `setting_nothing` would find set: it is much to enter for every batch."""
    return not names_read(type(study), _OF_ANY_EPOCH).isdisjoint(vars(study))


class StudyState:
    """Tries whether a function of a study keeps something on which its results depend.

    That may be in attributes of the study or its class, in global variables, or in what functions have enclosed.

    Args:
        study: the user's.
        name: of the function.
        functions: returns the functions of a study by name.
    """

    def __init__(self, study: Study, name: str, functions: Callable[[Study], Mapping[str, Callable[..., Any]]]) -> None:
        self._study, self._name, self._functions = study, name, functions
        self._names = names_read(type(study), ("loss", "score")) | {"loss", "score"}

    def prove(self, calls: Sequence[Callable[[Callable[..., Any]], Any]]) -> bool:
        """Try it, for each study at the first call and, if it keeps something, at the second, fourth, eighth ...

        Args:
            calls: each calls the function that it is given for a trial, on copies of all that the function may change.

        Returns:
            Whether to try it again: what it keeps may begin to matter late.

        Raises:
            RefusedError: what the first call gives depends on whether others were there before.
        """
        known = _proven.setdefault(self._study, set())
        if self._name in known:
            return self._prove_again(calls[0])
        known.add(self._name)
        try:
            alone, after, first = (self._copy(self._study) for _ in range(3))
            before = {**self._described(alone), **_outer_state(type(self._study))}
            expected = calls[0](self._functions(alone)[self._name])
            now = {**self._described(alone), **_outer_state(type(self._study))}
            changed = sorted(name for name, value in now.items() if before.get(name) != value)
            if not changed:
                return False
            function = self._functions(after)[self._name]
            found = [call(function) for call in (*calls[1:], calls[0])][-1]
        except Exception:  # the call itself will say it
            return False
        if not _alike(expected, found):
            known.discard(self._name)
            raise self._refused(changed[0])
        _kept.setdefault(self._study, {})[self._name] = first, 1, changed[0]
        return True

    def _prove_again(self, call: Callable[[Callable[..., Any]], Any]) -> bool:
        """Compare the results with those of a study in which the function was never called."""
        kept = _kept.get(self._study, {})
        if self._name not in kept:
            return False
        first, count, changed = kept[self._name]
        kept[self._name] = first, count + 1, changed
        if count & (count + 1):
            return True
        try:
            now, then = (call(self._functions(self._copy(study))[self._name]) for study in (self._study, first))
        except Exception:  # as above
            return True
        if not _alike(now, then):
            raise self._refused(changed)
        return True

    def _refused(self, changed: str) -> RefusedError:
        return RefusedError(
            f"Study.{self._name} changes {changed}, on which its results depend, and all trials share that; "
            "allowed: a buffer of the model, or what does not change results"
        )

    def _copy(self, study: Study) -> Study:
        """Return the study with copies of what the function may change; of modules, all but the parameters."""
        made = copy.copy(study)
        own = vars(made)
        for name in self._names & own.keys():
            parameters = own[name].parameters() if isinstance(own[name], nn.Module) else ()
            own[name] = copy.deepcopy(own[name], {id(each): each for each in parameters})
        return made

    def _described(self, study: Study) -> dict[str, Any]:
        own = vars(study)
        return {
            f"the study's attribute '{name}'": _described(value) if name in self._names else id(value)
            for name, value in own.items()
        }


def _described(value: Any) -> Hashable:
    """Describe a value; of a module, all but the parameters."""
    return Describer(parameters=list(value.parameters()) if isinstance(value, nn.Module) else [])(value)


def _outer_state(kind: type[Study]) -> dict[str, Hashable]:
    """Describe what loss and score of a study may read beside its attributes and their arguments, each by its name."""
    found: dict[str, Hashable] = {}

    def describe(where: str, table: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            value = table.get(name)
            if not isinstance(value, (types.ModuleType, types.FunctionType, type, property, staticmethod, classmethod)):
                found[f"{where} '{name}'"] = _described(value)

    functions = functions_of(kind, ("loss", "score"))
    names = set[str]().union(*(names_in(function.__code__) for function in functions))
    for function in functions:
        table, inside = function.__globals__, names_in(function.__code__)
        describe("the global variable", table, inside & table.keys())
        for owner in (table[name] for name in inside & table.keys()):
            if isinstance(owner, (type, types.ModuleType)) and is_near(owner, function):
                describe(f"{owner.__name__}'s attribute", vars(owner), names & vars(owner).keys())
        cells = zip(function.__code__.co_freevars, map(content, function.__closure__ or ()), strict=True)
        describe("the enclosed variable", dict(cells), function.__code__.co_freevars)
        defaults = {function.__name__: (function.__defaults__, function.__kwdefaults__)}
        describe("the default arguments of", defaults, defaults)
    for each in kind.__mro__[: kind.__mro__.index(Study)]:
        describe(f"{each.__name__}'s attribute", vars(each), names & vars(each).keys())
    return found


def is_near(owner: Any, function: types.FunctionType) -> bool:
    """Whether a class or a module is the user's, and no library's."""
    home = str(owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__)
    return home == function.__module__ or not is_of_library(home)


def is_of_library(module: str) -> bool:
    """Whether a module of this name is nobody's own code."""
    file = str(getattr(sys.modules.get(module), "__file__", None))
    return "site-packages" in file or module.partition(".")[0] in _LIBRARIES


_LIBRARIES = {*sys.stdlib_module_names, "torch", "trials"}


@lru_cache(256)
def names_read(kind: Hashable, methods: tuple[str, ...]) -> frozenset[str]:
    """Return all names in the code of `methods` of a class, and of what they call by name."""
    return frozenset[str]().union(*(names_in(function.__code__) for function in functions_of(kind, methods)))


@lru_cache(256)
def functions_of(kind: Any, methods: tuple[str, ...]) -> tuple[types.FunctionType, ...]:
    """Return the functions that are `methods` of a class, and those that they call by name."""
    seen: dict[types.CodeType, types.FunctionType] = {}
    waiting: list[Any] = [vars(each).get(name) for each in kind.__mro__ for name in methods]
    while waiting:
        function = inspect.unwrap(_plain(waiting.pop()))
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        seen[function.__code__] = function
        names = names_in(function.__code__)
        waiting += [vars(each).get(name) for each in kind.__mro__ for name in names]
        home = str(function.__module__).partition(".")[0]
        of_module = (function.__globals__.get(name) for name in names)
        waiting += [each for each in of_module if str(getattr(each, "__module__", "")).partition(".")[0] == home]
    return tuple(seen.values())


def _plain(value: Any) -> Any:
    """Return the function inside a method or a property."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one, or are equal in type and content."""
    return one is other or Describer()(one) == Describer()(other)


def _alike(one: Any, other: Any) -> bool:
    ours, theirs = (torch.as_tensor(each).detach().double() for each in (one, other))
    return torch.allclose(ours, theirs, equal_nan=True)
