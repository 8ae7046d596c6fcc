"""Random streams for each of several iterators of batches that are read in turns: each draws what it would alone."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trials.fusion.compared.contents import NUMBERS, parts_of
from trials.study import Study

States = tuple[Any, ...]
"""Of all streams, in their order."""

_LOOKED_AT, _LONG = 500, 100
"""So many objects of a study are looked into for random streams, and no longer lists: these are data."""

_KINDS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], object]], ...] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, lambda stream: stream.get_state(legacy=False), np.random.RandomState.set_state),
    (np.random.BitGenerator, lambda stream: stream.state, lambda stream, state: setattr(stream, "state", state)),
)
"""Kinds of random streams; what returns the state of one, and what sets it."""


class Turns:
    """The random streams that a study's batches may draw from: the process's own, and those in its attributes.

    They are put back and forth only if there are several turns, so what is read alone finds all as it is.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self._states: dict[object, States] = {}
        self._last: object = None

    @cached_property
    def _streams(self) -> list[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], object]]]:
        return [(stream, *_access(stream)) for stream in (*_global(), *_own(self._study))]

    def new(self) -> Callable[[], None]:
        """Return a function to call before anything is read of one iterator, and before it is made.

        At first the streams are left as the last one in turn has left them.
        """

        def take() -> None:
            if self._last is take:
                return
            if self._last is not None:
                self._states[self._last] = self.states()
            if take in self._states:
                self.put_back(self._states[take])
            self._last = take

        return take

    def states(self) -> States:
        """Return the present states."""
        return tuple(get(stream) for stream, get, _ in self._streams)

    def put_back(self, states: States) -> None:
        """Let all streams continue from `states`."""
        for (stream, _, put), state in zip(self._streams, states, strict=True):
            put(stream, state)


def _access(stream: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next((get, put) for kind, get, put in _KINDS if isinstance(stream, kind))


def _global() -> Sequence[Any]:
    """The process's own. Functions such as `random.random` are methods of hidden objects."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return torch.default_generator, *devices, random._inst, np.random.mtrand._rand


def _own(study: Study) -> Sequence[Any]:
    """Those in a study's attributes, such as a sampler's generator; not what lies deep in data."""
    kinds = tuple(kind for kind, _, _ in _KINDS)
    known, found, seen = {id(stream) for stream in _global()}, list[Any](), dict[int, Any]()
    waiting = deque[Any](vars(study).values())
    while waiting and len(seen) < _LOOKED_AT:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, np.random.Generator):
            waiting.append(one.bit_generator)
        elif isinstance(one, kinds):
            if id(one) not in known and not isinstance(one, random.SystemRandom):
                found.append(one)
        elif not _is_data(one):
            waiting.extend(part for _, part in parts_of(one) if type(part) not in NUMBERS)
    return found


def _is_data(value: Any) -> bool:
    """Whether a value is long, or a mapping that may read files when it is asked for its items."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return True
    return isinstance(value, (list, tuple, set, frozenset, deque, dict)) and len(value) > _LONG
