"""Whose an error is that comes while a hook runs: the hook's own, or the script's, whose signals and threads go on."""

import functools
import opcode
import signal
import sys
import traceback
from itertools import pairwise
from types import FrameType
from typing import Any

_CALLED_BY_HOOKS = sys.stdlib_module_names | {"ds_hooks", "zmq", "torch", "deepspeed"}
_RAISES = {opcode.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def is_of_the_script(error: BaseException) -> bool:
    """Whether the script has raised it while a hook happened to run: a time limit, say, or the end of an allocation.

    Either a signal handler did, or another thread, by `PyThreadState_SetAsyncExc`. The latter shows only by its class,
    which no code that a hook calls can have raised, or has not raised so: without a word, and at no `raise`.
    """
    if not isinstance(error, Exception):
        return True  # Ctrl-C, say
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    if any(frame.f_code in handlers or _was_given_a_signal(frame) for frame in frames):
        return True
    if not all(_is_known(frame.f_globals.get("__name__", "")) for frame in frames):
        return False
    return not _is_known(type(error).__module__) or _came_from_nowhere(error)


def _was_given_a_signal(frame: FrameType) -> bool:
    """Whether it is a handler's, which may have set another one before it raises: it has the frame that it interrupts.

    That comes behind the signal's number.
    """
    given: list[object] = []
    for value in frame.f_locals.values():
        given += value if isinstance(value, tuple) else (value,)
    return any(isinstance(number, int) and before is frame.f_back for number, before in pairwise(given))


def _came_from_nowhere(error: Exception) -> bool:
    """Whether nothing in the last frame has raised it: another thread gives a class alone, and Python makes the error.

    What is written in C gives its errors arguments, but for the two classes that Python itself raises so.
    """
    last = error.__traceback__
    if last is None or error.args or isinstance(error, MemoryError | StopIteration):
        return False
    while last.tb_next is not None:
        last = last.tb_next
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti : last.tb_lasti + 1]  # empty: it is no Python
    return bool(instruction) and instruction[0] not in _RAISES


def _is_known(module: str) -> bool:
    """Whether a hook calls code of this module by itself, rather than what the script has put there."""
    return module.partition(".")[0] in _CALLED_BY_HOOKS


def _code_of(handler: Any) -> Any:
    if not callable(handler):
        return None
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
