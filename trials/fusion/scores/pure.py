"""Traces a loss or score that depends on nothing but its inputs, and on random numbers."""

import dis
import types
from collections.abc import Callable
from operator import is_not
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, fx

from trials.fusion.compared.reads import PLAIN
from trials.fusion.graph.observer import Observer, refuse_questions
from trials.fusion.graph.steps import CallStep, Ref, keep_orders
from trials.fusion.graph.surroundings import kept
from trials.fusion.graph.tracer import Tracer, recording
from trials.fusion.own_code.streams import kept_streams
from trials.fusion.registry import CALLS

_graphs: "WeakKeyDictionary[types.FunctionType, tuple[list[object], fx.Graph | None]]" = WeakKeyDictionary()
"""A pure function -> the global values that its code reads, and its graph. To trace one takes most of the time that a
group of trials takes to build."""


def steps_of(function: Callable[[Any, Any], Tensor]) -> tuple[list[CallStep], int]:
    """Return the steps of `function` and the index of its result. No steps: it may depend on more than its inputs."""
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, types.FunctionType) or not _is_pure(plain, bound=plain is not function):
        return [], 0
    values = [plain.__globals__.get(name) for name in plain.__code__.co_names]
    known, graph = _graphs.get(plain, ([], None))
    if len(known) != len(values) or any(map(is_not, known, values)):
        graph = _graph_of(function)
        _graphs[plain] = values, graph
    return ([], 0) if graph is None else _steps_in(graph)


def _graph_of(function: Callable[[Any, Any], Tensor]) -> fx.Graph | None:
    """Return the graph of `function`; None if it cannot be traced, or draws random numbers without a rule."""
    put_back_streams, put_back_around = kept_streams(), kept()
    observer, tracer = Observer(), Tracer()
    try:
        with recording(tracer), observer:
            graph = tracer.trace(lambda outputs, targets: function(outputs, targets))
        refuse_questions(observer)
    except Exception:
        return None
    finally:
        drew = put_back_streams()
        put_back_around()
    return None if drew else graph


def _steps_in(graph: fx.Graph) -> tuple[list[CallStep], int]:
    index = {node: number for number, node in enumerate(graph.nodes)}

    def refer(node: fx.Node) -> Any:
        return Ref(index[node])

    steps: list[CallStep] = []
    for node in graph.nodes:
        if node.op == "output":
            result = node.args[0]
            keep_orders(steps)
            return (steps, index[result]) if isinstance(result, fx.Node) else ([], 0)
        if node.op in ("call_function", "call_method") and not _changes_its_input(node):
            args, kwargs = (fx.node.map_arg(value, refer) for value in (node.args, node.kwargs))
            steps.append(CallStep(index[node], node, args, kwargs))
        elif node.op != "placeholder":
            return [], 0
    return [], 0


def _changes_its_input(node: fx.Node) -> bool:
    """Whether a call with a rule asks for what no rule does."""
    if node.target not in CALLS:
        return False
    signature, _ = CALLS[node.target]
    try:
        return bool(signature.bind(*node.args, **node.kwargs).arguments.get("inplace"))
    except TypeError:
        return True


_ALLOWED = (abs, bool, dict, enumerate, float, int, len, list, max, min, range, sum, tuple, zip)
_PURE = {each.__name__ for each in _ALLOWED}
"""Python's own functions that a loss may call without depending on more than its inputs."""


def _is_pure(function: types.FunctionType, bound: bool) -> bool:
    """Whether its code reads nothing but its inputs, constants and functions of torch, and changes nothing."""
    code = function.__code__
    inside = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    if any(not isinstance(default, PLAIN) for default in function.__defaults__ or ()) or function.__kwdefaults__:
        return False
    if inside or function.__closure__ or code.co_cellvars or (bound and _reads(code, code.co_varnames[0])):
        return False
    for name in {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}:
        if name not in function.__globals__:
            if name not in _PURE:
                return False
            continue
        value = function.__globals__[name]
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
        if home != "torch" and not home.startswith("torch."):
            return False
    return not any(name.endswith("_") and not name.endswith("__") for name in code.co_names)


def _reads(code: types.CodeType, name: str) -> bool:
    return any(
        instruction.argval == name or (isinstance(instruction.argval, tuple) and name in instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("LOAD_FAST", "STORE_FAST"))
    )
