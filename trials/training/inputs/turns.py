"""Random streams for each of several iterators of batches that are read in turns: each draws what it would alone."""

import ctypes
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

_KINDS = torch.Generator, random.Random, np.random.RandomState, np.random.BitGenerator
"""Kinds of random streams."""


class Turns:
    """The random streams that a study's batches may draw from: the process's own, and those in its attributes.

    They are put back and forth only if there are several turns, so what is read alone finds all as it is.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self._states: dict[object, States] = {}
        self._last: object = None

    @cached_property
    def _streams(self) -> list["_Access"]:
        return [_access(stream) for stream in (*_global(), *_own(self._study))]

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
        return tuple(get() for get, _ in self._streams)

    def put_back(self, states: States) -> None:
        """Let all streams continue from `states`."""
        for (_, put), state in zip(self._streams, states, strict=True):
            put(state)


_Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""What returns the state of a stream, and what sets it."""


def _access(stream: Any) -> _Access:
    if isinstance(stream, torch.Generator):
        return stream.get_state, stream.set_state
    if isinstance(stream, random.Random):
        return stream.getstate, stream.setstate
    if isinstance(stream, np.random.RandomState):
        return (seldom := _Seldom(stream)).state, seldom.put_back
    return lambda: stream.state, lambda state: setattr(stream, "state", state)


class _Seldom:
    """A `RandomState`. To read and set one takes 0.2 ms, so neither is done until something has been drawn from it."""

    def __init__(self, stream: np.random.RandomState) -> None:
        self._stream, self._start = stream, stream.get_state(legacy=False)
        is_known = self._start["bit_generator"] == "MT19937" and not self._start["has_gauss"]  # else it draws unseen
        self._source = stream._bit_generator
        self._address = self._source.ctypes.state_address if is_known else 0
        self._unused = self._bytes() if is_known else None

    def state(self) -> Any:
        if self._unused is not None and self._bytes() == self._unused:
            return self._start
        self._unused = None
        return self._stream.get_state(legacy=False)

    def put_back(self, state: Any) -> None:
        """Set the state; `state` was called just before."""
        if self._unused is None or state is not self._start:
            self._stream.set_state(state)

    def _bytes(self) -> bytes:
        return ctypes.string_at(self._address, _MT19937_BYTES) if self._stream._bit_generator is self._source else b""


_MT19937_BYTES = 624 * 4 + 4
"""Its words, and its place among them."""


def _global() -> Sequence[Any]:
    """The process's own. Functions such as `random.random` are methods of hidden objects."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return torch.default_generator, *devices, random._inst, np.random.mtrand._rand


def _own(study: Study) -> Sequence[Any]:
    """Those in a study's attributes, such as a sampler's generator; not what lies deep in data."""
    known, found, seen = {id(stream) for stream in _global()}, list[Any](), dict[int, Any]()
    waiting = deque[Any](vars(study).values())
    while waiting and len(seen) < _LOOKED_AT:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, np.random.Generator):
            waiting.append(one.bit_generator)
        elif isinstance(one, _KINDS):
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
