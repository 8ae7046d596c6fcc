"""Refuses what the methods of a study keep for a trial or an epoch, in its attributes or elsewhere: all share that."""

import copy
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.compared.describe import Describer
from trials.fusion.compared.reads import content, names_in
from trials.fusion.errors import RefusedError
from trials.study import Study
from trials.training.inputs.study_code import functions_of, is_near, names_read

_looks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> how often each of its functions was to be looked at."""

_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> those of them that keep something, each with what was there before it did. See `_Kept`."""


_OF_ANY_EPOCH = ("loss", "score", "metrics", "scheduler", "clip_norm", "clip_value", "scaler")
"""Methods that are called when batches of another epoch may have been read since."""


@contextmanager
def setting_nothing(study: Study, source: str) -> Iterator[None]:
    """Enter it to read a study's batches. What is set there once is taken for common to all epochs.

    Raises:
        RefusedError: an attribute that methods read which are called later, such as the loss, is set anew.
    """
    own = vars(study)
    before = {name: own[name] for name in names_read(study, _OF_ANY_EPOCH) & own.keys()}
    yield
    for name, value in before.items():
        if value is not None and own.get(name) is not value and not is_same(value, own.get(name)):
            raise RefusedError(
                f"{source} sets the study's attribute '{name}' anew, which the loss or another method reads when "
                "it may be of another epoch; allowed: to give it with the batch, in the inputs or targets"
            )


def may_set(study: Study) -> bool:
    """Whether there is anything that `setting_nothing` would find set: it is much to enter for every batch."""
    return not names_read(study, _OF_ANY_EPOCH).isdisjoint(vars(study))


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
        self._names = names_read(study, ("loss", "score")) | {"loss", "score"}

    def prove(self, calls: Sequence[Callable[[Callable[..., Any]], Any]]) -> bool:
        """Try it, for each study at the first, second, fourth, eighth ... call.

        Args:
            calls: each calls the function that it is given for a trial, on copies of all that the function may change.

        Returns:
            Whether to try it again: it may keep something late, and that may begin to matter later still.

        Raises:
            RefusedError: what the first call gives depends on whether others were there before.
        """
        looks = _looks.setdefault(self._study, {})
        count = looks[self._name] = looks.get(self._name, 0) + 1
        if count & (count - 1) == 0:
            kept = _kept.get(self._study, {}).get(self._name)
            if kept is None:
                self._look(calls)
            else:
                self._look_again(calls[0], kept)
        return True

    def _look(self, calls: Sequence[Callable[[Callable[..., Any]], Any]]) -> None:
        """Find out whether a call changes anything, and whether it matters to the next one."""
        try:
            alone = self._copy(self._study)
            outer = {place: _copied(place.value) for place in _places(self._study)}
            before = self._described(alone)
            expected = calls[0](self._functions(alone)[self._name])
            now = self._described(alone)
            changed = [place for place, value in now.items() if before.get(place) != value]
            if not changed:
                return
            first, after = self._copy(self._study), self._copy(self._study)
            function = self._functions(after)[self._name]
            found = [call(function) for call in (*calls[1:], calls[0])][-1]
        except Exception:  # the call itself will say it
            return
        what = min(changed, key=lambda place: (place.owner is not None, place.text)).text
        if not _alike(expected, found):
            _looks[self._study].pop(self._name)
            raise self._refused(what)
        outside = {place: outer.get(place, _ABSENT) for place in changed if place.owner is not None}
        _kept.setdefault(self._study, {})[self._name] = _Kept(first, outside, what)

    def _look_again(self, call: Callable[[Callable[..., Any]], Any], kept: "_Kept") -> None:
        """Compare the results with those of a study in which the function was never called."""
        try:
            present = {place: place.value for place in kept.outside}
            now, then = (
                self._called(call, study, {place: _copied(value) for place, value in outside.items()})
                for study, outside in ((self._study, present), (kept.study, kept.outside))
            )
        except Exception:  # as above
            return
        if not _alike(now, then):
            raise self._refused(kept.what)

    def _called(self, call: Callable[[Callable[..., Any]], Any], study: Study, outside: Mapping["_Place", Any]) -> Any:
        """Return what a call gives with copies of the study's attributes, and with these values outside of it."""
        before = {place: place.value for place, value in outside.items() if value is not _UNKNOWN}
        try:
            for place in before:
                place.put(outside[place])
            return call(self._functions(self._copy(study))[self._name])
        finally:
            for place, value in before.items():
                place.put(value)

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

    def _described(self, study: Study) -> dict["_Place", Any]:
        """Describe what a call may change: attributes of a copy of the study, and what lies outside of it."""
        own = {
            _Place(f"the study's attribute '{name}'", None, name): _described(value)
            if name in self._names
            else id(value)
            for name, value in vars(study).items()
        }
        return {**own, **{place: _described(place.value) for place in _places(self._study)}}


def _described(value: Any) -> Hashable:
    """Describe a value; of a module, all but the parameters."""
    return Describer(parameters=list(value.parameters()) if isinstance(value, nn.Module) else [])(value)


class _Kept(NamedTuple):
    """What was there before a function kept something.

    Attributes:
        study: a copy.
        outside: copies of what it changes outside of the study.
        what: it changes.
    """

    study: Study
    outside: "Mapping[_Place, Any]"
    what: str


_ABSENT, _UNKNOWN = object(), object()
"""What is not there, and what cannot be copied."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a value is that code may read and change.

    Attributes:
        text: for messages.
        owner: a table of global variables, a class or a module, a cell, or a function for its defaults; None: a study.
        name: there.
    """

    text: str
    owner: Any
    name: str

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and other.owner is self.owner and other.name == self.name

    @property
    def value(self) -> Any:
        """What is there now."""
        if isinstance(self.owner, types.CellType):
            return content(self.owner)
        if isinstance(self.owner, types.FunctionType):
            return self.owner.__defaults__, self.owner.__kwdefaults__
        return self._table.get(self.name, _ABSENT)

    @property
    def _table(self) -> Mapping[str, Any]:
        return self.owner if isinstance(self.owner, dict) else vars(self.owner)

    def put(self, value: Any) -> None:
        """Set it."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, types.FunctionType):
            self.owner.__defaults__, self.owner.__kwdefaults__ = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
            if value is _ABSENT:
                del self.owner[self.name]
        elif value is not _ABSENT:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


def _copied(value: Any) -> Any:
    """Return a copy of a value outside of the study; of modules, all but the parameters."""
    if value is _ABSENT or value is _UNKNOWN:
        return value
    parameters = value.parameters() if isinstance(value, nn.Module) else ()
    try:
        return copy.deepcopy(value, {id(each): each for each in parameters})
    except Exception:  # such as a file
        return _UNKNOWN


def _places(study: Study) -> list[_Place]:
    """Return where loss and score of a study may read beside its attributes and their arguments."""
    found: list[_Place] = []

    def add(where: str, owner: Any, table: Mapping[str, Any], names: Iterable[str]) -> None:
        code = types.ModuleType, types.FunctionType, type, property, staticmethod, classmethod
        for name in names:
            if not isinstance(table.get(name), code):
                found.append(_Place(f"{where} '{name}'", owner, name))

    functions = functions_of(study, ("loss", "score"))
    names = set[str]().union(*(names_in(function.__code__) for function in functions))
    for function in functions:
        table, inside = function.__globals__, names_in(function.__code__)
        add("the global variable", table, table, inside & table.keys())
        for owner in (table[name] for name in inside & table.keys()):
            if isinstance(owner, (type, types.ModuleType)) and is_near(owner, function):
                add(f"{owner.__name__}'s attribute", owner, vars(owner), names & vars(owner).keys())
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            add("the enclosed variable", cell, {name: content(cell)}, [name])
        if function.__defaults__ or function.__kwdefaults__:
            add("the default arguments of", function, {}, [function.__name__])
    kind = type(study)
    for each in kind.__mro__[: kind.__mro__.index(Study)]:
        add(f"{each.__name__}'s attribute", each, vars(each), names & vars(each).keys())
    return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one, or are equal in type and content."""
    return one is other or Describer()(one) == Describer()(other)


def _alike(one: Any, other: Any) -> bool:
    ours, theirs = (torch.as_tensor(each).detach().double() for each in (one, other))
    return torch.allclose(ours, theirs, equal_nan=True)
