"""Traces one trial's `forward` with `torch.fx`, for a list of steps for K trials."""

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from trials.fusion.compared.reads import Codes
from trials.fusion.errors import RefusedError
from trials.fusion.graph.inputs import unknown_inputs
from trials.fusion.graph.observer import Observer, refuse_questions
from trials.fusion.graph.own_tensors import OwnTensors
from trials.fusion.graph.surroundings import kept
from trials.fusion.graph.tracer import OUT_OF_PLACE, Tracer, flags, recording, set_flags
from trials.fusion.own_code.asked import GRADIENT, MEMORY, asking, own_attributes
from trials.fusion.own_code.drawing import WITH_RULES
from trials.fusion.own_code.functional import NEW, RANDOM, VIEWS, as_type
from trials.fusion.own_code.streams import foreign_streams, kept_streams, refuse_foreign
from trials.fusion.registry import CALLS, FuseError, label, plain_forward, ruled
from trials.late_compiler import is_compiler_loaded

FORWARD = "forward"
"""The method that a training step calls, unless a study names others."""

_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
"""What a call of a module runs before its `forward`."""

_ON_GRADIENTS = frozenset(
    (
        *("backward", "register_hook", "retain_grad", torch.autograd.grad, torch.autograd.backward),
        *(Tensor.backward, Tensor.register_hook, Tensor.retain_grad),
    )
)
"""What acts on gradients: those of a graph's steps are all trials', and in evaluation there are none."""

_IN_PLACE = (setattr, operator.setitem, operator.delitem)


@dataclass(frozen=True, slots=True)
class Traced:
    """One method of a model as a graph.

    Attributes:
        graph: its calls.
        codes: the user's code that ran, which may read variables outside the model.
    """

    graph: fx.Graph
    codes: Codes


def trace(model: nn.Module, training: bool, method: str = FORWARD) -> Traced:
    """Return the graph of a method of `model` in one of its two modes.

    Raises:
        FuseError: it cannot be traced, or does something that fusing would change.
    """
    was_loaded = is_compiler_loaded()
    try:
        return _traced(model, training, method)
    except FuseError:
        if was_loaded or not is_compiler_loaded():
            raise
    return _traced(model, training, method)  # its forward had the compiler loaded, and that asked for much


def _traced(model: nn.Module, training: bool, method: str) -> Traced:
    name = type(model).__name__
    if ruled(type(model)) is not None or Tracer().is_leaf_module(model, ""):
        return Traced(_single(model, name), {})
    if method == FORWARD and (chain := _chain(model)) is not None:
        return Traced(_checked(chain, model), {})
    _refuse_own_calls(model, method)
    given = flags(model)
    streams, put_back_streams, put_back_around = foreign_streams(), kept_streams(), kept()
    drew = False
    tables = _tables(model)
    observer, own_tensors = Observer(), OwnTensors(model)
    unknown, fixed = unknown_inputs(model, method)
    if not unknown:
        raise FuseError(f"model {name} cannot be traced: its {method} has no first input with a name")
    asked = (*GRADIENT, *MEMORY, *own_attributes(model))
    try:
        model.train(training)
        with own_tensors, asking(model.named_parameters(), asked, _unkept, model.named_buffers()):
            tracer = Tracer(model)
            tracer.traced_func_name = method
            with recording(tracer, lambda: tracer.calls_with_buffers), observer:
                graph = tracer.trace(model, concrete_args=fixed)
        tracer.check(model)
        own_tensors.check()
        refuse_questions(observer)
    except RefusedError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, FuseError) else f"{type(error).__name__}: {error}"
        raise FuseError(f"model {name} cannot be traced: {why}") from error
    finally:
        drew = put_back_streams()
        put_back_around()
        changed = _put_back(tables) + own_tensors.put_back()
        set_flags(model, given)
        refuse_foreign(streams, f"model {name}")
    if changed:
        raise FuseError(f"model {name} cannot be traced: its {method} assigns '{changed[0]}'")
    if drew:
        raise FuseError(f"model {name} draws random numbers that do not depend on its input; {WITH_RULES}")
    if not _drop_defaults(graph, unknown):
        raise FuseError(f"model {name} cannot be traced: its {method} reads inputs that have no names")
    return Traced(_checked(graph, model), observer.codes)


def _unkept(attribute: str, name: str) -> FuseError:
    return FuseError(f"it asks for '{attribute}' of '{name}' itself, which a graph does not keep")


def _checked(graph: fx.Graph, model: nn.Module) -> fx.Graph:
    for node in graph.nodes:
        _check(node, model)
    return graph


def _refuse_own_calls(model: nn.Module, method: str) -> None:
    """Refuse what fx would pass over, since it traces the method of the model's class.

    Raises:
        FuseError: it names the method.
    """
    name = type(model).__name__
    if method in vars(model):
        raise FuseError(f"model {name} cannot be traced: it has a {method} of its own, which its class lacks")
    for call in _CALLS:
        if method == FORWARD and getattr(type(model), call) is not getattr(nn.Module, call):
            raise FuseError(f"model {name} cannot be traced: its class has a {call} of its own")


def _tables(model: nn.Module) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return every table of attributes, parameters and buffers in `model`, and a copy of each."""
    found = []
    for path, module in model.named_modules():
        for table in (module.__dict__, module._parameters, module._buffers):
            found.append((f"{path}." if path else "", table, dict(table)))
    return found


def _put_back(tables: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Undo the traced forward's assignments, and return their names."""
    changed = []
    for prefix, table, before in tables:
        for name in {**before, **table}:
            if name.startswith("_tensor_constant") or name == "training":
                continue
            if name not in before or name not in table or table[name] is not before[name]:
                changed.append(prefix + name)
                if name in before:
                    table[name] = before[name]
                else:
                    del table[name]
    return changed


def drop_constants(model: nn.Module, graphs: Sequence[fx.Graph | None] = (None,)) -> None:
    """Drop the tensors that traces have left in `model`, unless all its graphs are there. A saved trial lacks them."""
    for module in model.modules():
        for name in [name for name in vars(module) if name.startswith("_tensor_constant") and None in graphs]:
            delattr(module, name)


def modes(model: nn.Module, training: bool) -> dict[str, bool]:
    """Return each module's mode after ``model.train(training)``. A model may keep some in eval mode."""
    before = flags(model)
    model.train(training)
    found = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    set_flags(model, before)
    return found


def describe(graph: fx.Graph) -> list[tuple[str, str]]:
    """Describe the graph node by node, so that trials can be compared."""
    return [(f"node '{n.name}'", f"{n.op} {_target(n)} {_text(n.args)} {_text(n.kwargs)}") for n in graph.nodes]


def leaf_input(node: fx.Node) -> fx.Node:
    """Return the one input of a layer's node.

    Raises:
        FuseError: the layer has more inputs, or its input is not a tensor.
    """
    given = [*node.args, *node.kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], fx.Node):
        raise FuseError(f"node '{node.name}' calls '{node.target}' with {len(given)} inputs; allowed: one tensor")
    return given[0]


def _single(model: nn.Module, name: str) -> fx.Graph:
    """Return the graph of a model that is itself a layer. It takes the layer's first input alone."""
    graph = fx.Graph()
    source = graph.placeholder(next(iter(inspect.signature(model.forward).parameters)))
    graph.output(graph.create_node("call_module", "", (source,), name=name.lower()))
    return graph


def _chain(model: nn.Module) -> fx.Graph | None:
    """Return the graph of layers one after another, as tracing would; None: `model` is more than `nn.Sequential`.

    No code of the user's runs in it, so there is nothing to find out. Tracing takes longer than some steps do.
    """
    first = {id(module): path for path, module in reversed(list(model.named_modules()))}
    paths: list[str] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if "forward" in vars(module) or plain_forward(module) is not None:
            return None
        if type(module) is nn.Sequential and nn.Sequential.forward is _SEQUENTIAL:
            waiting += reversed(list(module))
        elif ruled(type(module)) is not None:
            paths.append(first[id(module)])
        else:
            return None
    graph = fx.Graph(tracer_cls=Tracer)
    value = graph.placeholder("input")
    for path in paths:
        value = graph.call_module(path, (value,))
    graph.output(value)
    return graph


_SEQUENTIAL = nn.Sequential.forward


def _drop_defaults(graph: fx.Graph, unknown: list[str]) -> bool:
    """Remove the inputs that were fixed to their defaults. Only assertions on their values are left of them.

    Returns:
        Whether the `unknown` inputs, and nothing but them, make the output.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = {node for node in inputs if node.target not in unknown}
    for node in graph.nodes:
        if fixed.intersection(node.all_input_nodes):
            fixed.add(node)
    for node in reversed(graph.nodes):
        if node in fixed:
            if node.op == "output":
                return False
            graph.erase_node(node)
    return [node.target for node in graph.nodes if node.op == "placeholder"] == unknown


def _check(node: fx.Node, model: nn.Module) -> None:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if getattr(module, "inplace", False):
            _check_in_place(node, model, leaf_input(node))
        return
    if node.op not in ("call_function", "call_method"):
        return
    name = _name(node)
    if node.target in OUT_OF_PLACE or (name.endswith("_") and not name.endswith("__")):
        _refuse_change_of_input(node, node)
    if node.target in OUT_OF_PLACE:
        if isinstance(node.args[0], fx.Node):
            _check_in_place(node, model, node.args[0])
        node.target = OUT_OF_PLACE[node.target]
        with node.graph.inserting_after(node):
            typed = node.graph.call_function(as_type, (node, node.args[0]))
        node.replace_all_uses_with(typed, delete_user_cb=lambda user: user is not typed)
    _check_effects(node, name)
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        raise FuseError(f"node '{node.name}' calls {name}, which works in place; allowed: its out-of-place form")
    if node.kwargs.get("out") is not None:  # fx adds it to calls of some functions, such as normalize
        raise FuseError(f"node '{node.name}' calls {name} with out=; allowed: without")
    _drop_in_place_flag(node, model)


def _check_effects(node: fx.Node, name: str) -> None:
    if node.target in _ON_GRADIENTS:
        raise FuseError(f"node '{node.name}' calls {name}, which acts on gradients")
    if node.target in RANDOM and node.target not in CALLS:
        raise FuseError(f"node '{node.name}' calls {name}, which draws random numbers; {WITH_RULES}")


def _refuse_change_of_input(node: fx.Node, changing: fx.Node) -> None:
    """Refuse changes of the batch: it belongs to all trials, and returns in the next epoch."""
    if changing.op == "placeholder":
        raise RefusedError(
            f"node '{node.name}' calls {_name(node)}, which changes the model's input '{changing.name}' in place; "
            "allowed: the out-of-place form, or a clone of it"
        )
    first = changing.args[0] if changing.args else None
    if isinstance(first, fx.Node) and (changing is node or _name(changing) in VIEWS):
        _refuse_change_of_input(node, first)


def _drop_in_place_flag(node: fx.Node, model: nn.Module) -> None:
    """Turn ``relu(x, inplace=True)`` into ``relu(x)`` where no other node reads x."""
    if not callable(node.target) or getattr(node.target, "__module__", None) != functional.__name__:
        return
    names = list(inspect.signature(node.target).parameters)
    if "inplace" not in names:
        return
    position = names.index("inplace")
    by_position = len(node.args) > position and node.args[position]
    if by_position or node.kwargs.get("inplace"):
        source = node.args[0] if node.args else node.kwargs["input"]
        if isinstance(source, fx.Node):
            _check_in_place(node, model, source)
    if len(node.args) > position:
        node.args = (*node.args[:position], False, *node.args[position + 1 :])
    elif "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": False}


def _check_in_place(node: fx.Node, model: nn.Module, source: fx.Node) -> None:
    """Refuse an in-place layer where another node would see the change, because it runs out of place."""
    if source.op in ("get_attr", "placeholder"):
        raise FuseError(f"node '{node.name}' changes '{source.target}' in place, which a graph does not keep")
    others = [user.name for user in source.users if user is not node]
    if others:
        raise FuseError(
            f"node '{node.name}' changes in place what node '{others[0]}' also reads; allowed: inplace=False there"
        )
    if not _is_new(source, model):
        for earlier in source.all_input_nodes:
            _check_in_place(source, model, earlier)


def _is_new(node: fx.Node, model: nn.Module) -> bool:
    """Whether the memory of a call's result is surely not that of an input."""
    if node.op != "call_module":
        return _name(node) in NEW or (node.target is torch.einsum and len(node.args) > 2)  # of one it may be a view
    module = model.get_submodule(str(node.target))
    rules = (ruled(kind) for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    layer = next((each for each in rules if each is not None), None)  # of what a parametrization has made a subclass
    return layer is not None and not layer.may_share and not getattr(module, "inplace", False)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return f"{getattr(node.target, '__module__', '')}.{_name(node)}"


def _text(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def layer_label(model: nn.Module, node: fx.Node) -> str:
    """Return the name of the layer that `node` calls, for unit names."""
    return label(model.get_submodule(str(node.target)), str(node.target))
