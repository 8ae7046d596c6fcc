"""The schedulers that a study gives a trial."""

import functools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trials.fusion.compared.contents import NUMBERS, contents, parts_of
from trials.fusion.compared.reads import content
from trials.fusion.errors import FuseError, RefusedError
from trials.study import Study

_MOVES_ON = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def new_schedulers(study: Study, params: dict[str, Any], optimizer: Any) -> list[LRScheduler]:
    """Return the trial's schedulers as a list.

    Raises:
        FuseError: there is something else among them, or one that a checkpoint could not hold.
    """
    given = study.scheduler(params, optimizer)
    if given is None:
        return []
    made = list(given) if isinstance(given, Sequence) else [given]
    for each in made:
        if not isinstance(each, (LRScheduler, ReduceLROnPlateau)):
            raise FuseError(f"Study.scheduler returned {type(each).__name__}; allowed: torch schedulers, a list, None")
        for name, value in (kept for function in _functions(each) for kept in _enclosed(function)):
            if isinstance(value, _MOVES_ON):
                raise FuseError(
                    f"a function of {type(each).__name__} from Study.scheduler keeps a {type(value).__name__}{name}, "
                    "whose place no checkpoint holds; allowed: a function of the epoch alone, or an object with "
                    "__call__, whose attributes are saved"
                )
    return made


def refuse_own_memory(schedulers: Sequence[LRScheduler]) -> Callable[[], None]:
    """Return a function that refuses `schedulers` whose functions have kept something since, such as a count.

    A scheduler's own state goes to checkpoints, but what its functions enclose does not.
    """
    functions = [(each, f) for each in schedulers for f in _functions(each) if isinstance(f, _KEEPING)]
    before = [_held(function) for _, function in functions]

    def check() -> None:
        for (scheduler, function), known in zip(functions, before, strict=True):
            if _held(function) != known:
                raise RefusedError(
                    f"a function of {type(scheduler).__name__} from Study.scheduler changes what it keeps from call to "
                    "call, which no checkpoint holds; allowed: a function of the epoch alone, or an object with "
                    "__call__, whose attributes are saved"
                )

    return check


_KEEPING = (types.FunctionType, types.MethodType, functools.partial)


def _held(function: Any) -> list[tuple[str, list[Any]]]:
    """Return the numbers and texts in all that a function reaches, and which objects hold them."""
    return [
        (path, [part if type(part) in NUMBERS else id(part) for _, part in parts_of(one)])
        for path, one in contents(function)
    ]


def _functions(scheduler: Any) -> Iterator[Any]:
    """Yield the functions that a scheduler calls, and those of the schedulers inside it."""
    yield from getattr(scheduler, "lr_lambdas", ())
    yield from (own for own in (getattr(scheduler, "_scale_fn_custom", None),) if own is not None)
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _functions(inner)


def _enclosed(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps from call to call, each with its name for a message."""
    if isinstance(function, functools.partial):
        yield from (("", value) for value in (*function.args, *function.keywords.values()))
        yield from _enclosed(function.func)
    if isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, map(content, function.__closure__ or ()), strict=True)
        yield from ((f" in '{name}'", value) for name, value in cells)
        yield from (
            ("", value) for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        )
        table = function.__globals__
        yield from ((f" in '{name}'", table[name]) for name in function.__code__.co_names if name in table)
