"""Watches the user's code while it is traced, for answers that a graph would freeze."""

import ast
import dis
import gc
import inspect
import os
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, fx, nn

from trials.fusion.errors import FuseError

_CHANGING: frozenset[Hashable] = frozenset(
    (
        *(torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype),
        *(torch.is_autocast_cpu_enabled, torch.get_autocast_gpu_dtype, torch.get_autocast_cpu_dtype),
        *(torch.is_autocast_cache_enabled, torch.get_default_dtype, torch.get_num_threads),
        *(time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns),
        *(time.process_time, time.thread_time, time.localtime, time.gmtime, os.urandom),
        *(getattr(torch.default_generator, name) for name in ("manual_seed", "seed", "initial_seed", "get_state")),
        *(getattr(torch.default_generator, name) for name in ("set_state", "graphsafe_get_state", "clone_state")),
        torch.default_generator.graphsafe_set_state,
    )
)
"""Functions in C whose answer is another when the graph runs."""

_CHANGING_CODE = {
    id(function.__code__): function.__code__
    for function in (
        *(torch.random.manual_seed, torch.random.seed, torch.random.initial_seed, torch.random.get_rng_state),
        *(torch.random.set_rng_state, torch.random.fork_rng, type(os.environ).__getitem__, torch.get_default_device),
        *(torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.cuda.seed, torch.cuda.seed_all),
        *(torch.cuda.get_rng_state, torch.cuda.get_rng_state_all, torch.cuda.initial_seed),
        *(torch.cuda.set_rng_state, torch.cuda.set_rng_state_all),
    )
}
"""The same for functions in Python: their codes by id. They are held, so that no other code gets the id of one."""


class Observer:
    """Enter it around a trace.

    Attributes:
        codes: the user's code that ran, and the global variables of each.
        asked: what it asked, and where; empty if nothing.
    """

    def __init__(self) -> None:
        """Observe nothing yet."""
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.asked = ""
        # by the codes' ids: to hash a code hashes all that is defined in it
        self._seen: dict[int, CodeType] = {}
        self._users: set[int] = set()
        self._questioned: dict[int, dict[str, str]] = {}

    def __enter__(self) -> "Observer":
        self._outer, self._collected = sys.getprofile(), gc.isenabled()
        gc.disable()  # its callbacks are not the user's code
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._outer)
        if self._collected:
            gc.enable()

    def _event(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":  # calls into C and their ends, which are ignored, are half of all events
            if id(frame.f_code) in self._users and _hashable_in(called):
                self._note(called.__name__, frame)
        elif event == "call":
            code = frame.f_code
            if id(code) not in self._seen:
                self._meet(code, frame)
            if id(code) in _CHANGING_CODE:
                self._note(code.co_name, _asker(frame))
        elif event == "return" and id(frame.f_code) in self._questioned:
            for path, question in self._questioned[id(frame.f_code)].items():
                if _is_unknown(path, frame.f_locals):
                    self._note(f"'{question}' of {path or 'a result'}", frame)

    def _meet(self, code: CodeType, frame: FrameType) -> None:
        self._seen[id(code)] = code
        if not is_library(frame) and not _is_stdlib(frame):
            self._users.add(id(code))
            self.codes[code] = frame.f_globals
            if questions := _questioned(code):
                self._questioned[id(code)] = questions

    def _note(self, name: str, frame: FrameType | None) -> None:
        if frame is not None and not self.asked:
            self.asked = f"{source_line(frame)} asks {name}, whose answer may differ when the graph runs"


def _hashable_in(called: Any) -> bool:
    try:
        return called in _CHANGING
    except TypeError:  # a method of what has no hash
        return False


@lru_cache(256)
def _questioned(code: CodeType) -> dict[str, str]:
    """Return what `code` asks about in ways that no value notices, each with the question.

    They are ``type(x)``, ``callable(x)``, ``id(x)`` and ``x is y``. Of a variable or an attribute it is the name, of
    anything else it is nothing.
    """
    found = {}
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PUSH_NULL", "PRECALL")]
    for index, step in enumerate(steps):
        after = steps[index + 1 :]
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in ("type", "callable", "id"):
            if after and not _calls(after[0]):  # else it is an argument itself, as in isinstance(x, type)
                found.update(dict.fromkeys(_asked(after), f"{step.argval}()"))
        elif step.opname == "IS_OP":
            found.update(dict.fromkeys(_compared(steps[:index]), "is"))
    return found


def comparing(frame: FrameType | None) -> str:
    """Return where the user's code that has led to `frame` compares values by ``is``; empty: nowhere."""
    met = False
    while frame is not None and not (met and _root(frame) == "trials"):
        own = not is_library(frame) and not _is_stdlib(frame)
        if own and "is" in _questioned(frame.f_code).values():
            return source_line(frame)
        met, frame = met or own, frame.f_back
    return ""


def _compared(steps: Sequence[dis.Instruction]) -> list[str]:
    """Return which of the two values on the stack after `steps` an ``is`` asks about: none if one of them is None.

    A value of the graph never is: attributes and layers of which it may be are another matter of the trace's.
    """
    found: list[str] = []
    loads = [(step, name) for step in steps for name in _variables(step) or (None,)]
    for _ in range(2):
        attributes: list[str] = []
        while loads and loads[-1][0].opname == "LOAD_ATTR":
            attributes.insert(0, str(loads.pop()[0].argval))
        step, name = loads.pop() if loads else (None, None)
        if name is not None:
            found.append(".".join((name, *attributes)))
        elif step is None or step.opname not in ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME"):
            return [*found, ""]  # what was on the stack before is not known
        elif step.argval is None:
            return []
    return found


def _asked(steps: Sequence[dis.Instruction]) -> Sequence[str]:
    """Return what the call that begins with `steps` gets: a variable, an attribute of one, or nothing."""
    names = _variables(steps[0])
    for count, step in enumerate(steps[1:], 1):
        if _calls(step):
            return [*names[:-1], ".".join((*names[-1:], *(str(each.argval) for each in steps[1:count])))]
        if step.opname != "LOAD_ATTR" or not names:
            break
    return [*names[:-1], ""]


def _calls(step: dis.Instruction) -> bool:
    return step.opname.startswith("CALL")


def _is_unknown(path: str, variables: Mapping[str, Any]) -> bool:
    """Whether a variable, or an attribute of one, may be known only when the graph runs.

    Of a result, which `path` does not name, it may if any variable is.
    """
    if not path:
        return any(issubclass(type(value), fx.Proxy) for value in variables.values())
    name, *attributes = path.split(".")
    value = variables.get(name)
    for attribute in attributes:
        if issubclass(type(value), fx.Proxy):
            break
        value = _attribute(value, attribute)
    # a traced forward sees a value in place of a parameter
    return issubclass(type(value), (fx.Proxy, Tensor) if attributes else fx.Proxy)


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the user's or of a library's, but for that of a module's property."""
    if isinstance(value, nn.Module):
        with suppress(Exception):
            return getattr(value, name, None)
        return None
    found = inspect.getattr_static(value, name, None)
    return found.__get__(value) if isinstance(found, MemberDescriptorType) else found


def _variables(step: dis.Instruction) -> tuple[str, ...]:
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _asker(frame: FrameType) -> FrameType | None:
    """Return the user's frame that called a library's `frame` by way of Python's own; None: PyTorch did."""
    caller = frame.f_back
    while caller is not None and _is_stdlib(caller):
        caller = caller.f_back
    return None if caller is None or is_library(caller) else caller


def source_line(frame: FrameType) -> str:
    """Return where a frame is, for messages."""
    return f"{frame.f_code.co_name} in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno},"


def is_message(frame: FrameType) -> bool:
    """Whether a frame formats a part of the message of a `torch._assert`, which nothing else reads."""
    code, made = frame.f_code, frame.f_lasti
    if not dis.opname[code.co_code[made]].startswith(("FORMAT_", "CONVERT_")):
        return False
    position = next(islice(code.co_positions(), made // 2, None))
    return any(
        _contains(message, position) and _meaning(function, frame) is torch._assert
        for function, message in _with_messages(code)
    )


@lru_cache(256)
def _with_messages(code: CodeType) -> list[tuple[str, ast.expr]]:
    """Return which functions `code` calls with formatted text as the second of two arguments, each with the text."""
    try:
        lines, first = inspect.getsourcelines(code)
        is_indented = lines[0][:1].isspace()
        tree = ast.parse("if True:\n" * is_indented + "".join(lines))
    except (OSError, SyntaxError):  # as for a lambda in the middle of an expression
        return []
    ast.increment_lineno(tree, first - 1 - is_indented)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2)
    return [(ast.unparse(call.func), call.args[1]) for call in calls if _is_formatted(call.args[1])]


def _is_formatted(node: ast.expr) -> bool:
    """Whether an expression is one f-string, without others in it, whose text its code may read."""
    return isinstance(node, ast.JoinedStr) and not any(
        isinstance(each, ast.JoinedStr)
        for part in node.values
        if isinstance(part, ast.FormattedValue)
        for each in ast.walk(part.value)
    )


def _contains(node: ast.expr, position: tuple[int | None, int | None, int | None, int | None]) -> bool:
    """Whether an expression's place in the source has within it that of an instruction, as `co_positions` gives it."""
    line, last_line, column, last_column = (-1 if number is None else number for number in position)
    last = (node.end_lineno or 0, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= (line, column) and (last_line, last_column) <= last


def _meaning(path: str, frame: FrameType) -> Any:
    """Return what a name, or an attribute of one, stands for in a frame."""
    name, *attributes = path.split(".")
    value = {**frame.f_globals, **frame.f_locals}.get(name)
    for attribute in attributes:
        value = _attribute(value, attribute)
    return value


def is_library(frame: FrameType) -> bool:
    """Whether a frame belongs to PyTorch or to us."""
    return _root(frame) in ("torch", "trials")


def _is_stdlib(frame: FrameType) -> bool:
    return _root(frame) in sys.stdlib_module_names


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def refuse_questions(observer: Observer) -> None:
    """Refuse a trace in which the user's code asked something.

    Raises:
        FuseError: it did.
    """
    if observer.asked:
        raise FuseError(observer.asked)
