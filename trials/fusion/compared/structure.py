"""What must be equal for trials to be fused; stacks the tensors of trials that are."""

import hashlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from trials.fusion.compared.describe import attributes, class_of, outer_values, own_forwards, plain_tensors
from trials.fusion.compared.peft_configs import configs
from trials.fusion.compared.reads import Codes, Watch
from trials.fusion.compared.sharing import refuse_common, refuse_overlaps, ties
from trials.fusion.errors import RefusedError
from trials.fusion.graph.module_attributes import ModuleAttributes
from trials.fusion.graph.trace import FORWARD, describe, drop_constants, modes, trace
from trials.fusion.layers.conv import refuse_own_orders
from trials.fusion.layers.memory_order import order_of, own_orders
from trials.fusion.layers.transformer import refuse_passed_over
from trials.fusion.registry import FuseError, Layer, find, has_hooks, instead_of_hooks, label, refuse, replaced_function
from trials.fusion.rows import Rows, Vectors, stack_parameters

Facts = dict[tuple[str, str], Hashable]


@dataclass(frozen=True, slots=True)
class Structure:
    """The parts of one trial's model on which fusing depends.

    Attributes:
        facts: (owner, property) -> value; equal for all trials of a group.
        phases: the methods that are called in training, by default `forward` alone -> the graph of each in training
            mode; None if it cannot be traced.
        eval: the graph in evaluation mode; None if it cannot be traced.
        train_modes: path -> mode of that module while the model trains.
        eval_modes: the same while the model is evaluated.
        untraced: why there are no graphs; empty if there are.
        watch: what the graphs were traced with, and might change.
        unread: what the model's own code may read beyond `facts`. Equal if trials are to leave their graphs together.
    """

    facts: Facts
    phases: dict[str, fx.Graph | None]
    eval: fx.Graph | None
    train_modes: dict[str, bool]
    eval_modes: dict[str, bool]
    untraced: str
    watch: Watch
    unread: str

    @property
    def graphs(self) -> tuple[fx.Graph | None, ...]:
        """All graphs."""
        return (*self.phases.values(), self.eval)


def structure(model: nn.Module, phases: Sequence[str] = (FORWARD,), untraced: str = "") -> Structure:
    """Read the structure of one trial's model.

    Args:
        model: the user's.
        phases: which of its methods are called in training.
        untraced: why it must not be traced; empty: it is, if it can be.

    Raises:
        FuseError: there is no way to fuse it.
    """
    _refuse_wrapped(model)
    drop_constants(model)
    tensors = _tensor_facts(model)
    _refuse_hooks(model)
    _refuse_sparse(model)
    refuse_own_orders(model)
    mode_tables = modes(model, training=True), modes(model, training=False)
    refuse_passed_over(model, mode_tables[1])
    facts: Facts = own_forwards(model)
    graphs: tuple[fx.Graph | None, ...] = (None,) * (len(phases) + 1)
    unchanged, plain, kept = Unchanged(model), Untouched(model), ModuleAttributes(model)
    codes: Codes = {}
    untraced = untraced or replaced_function()
    try:
        if not untraced:
            found = [*(trace(model, True, phase) for phase in phases), trace(model, training=False)]
            graphs = tuple(each.graph for each in found)
            codes = {code: variables for each in found for code, variables in each.codes.items()}
    except RefusedError:
        raise
    except FuseError as error:
        untraced = str(error)
    if changed := plain.put_back():
        untraced = f"model {type(model).__name__} cannot be traced: it changes '{changed}' in place"
        graphs = (None,) * (len(phases) + 1)
    if held := kept.changed():
        kept.put_back()
        untraced = untraced or f"model {type(model).__name__} cannot be traced: it changes '{held[0][1]}'"
        graphs = (None,) * (len(phases) + 1)
    drop_constants(model, graphs)
    unchanged.check()
    facts["model", "traced"] = not untraced
    facts["model", "phases"] = tuple(phases)
    tables = *(mode_tables[0] for _ in phases), mode_tables[1]
    names = *("train" if phase == FORWARD else f"train, {phase}" for phase in phases), "eval"
    for graph, table, mode in zip(graphs, tables, names, strict=True):
        if graph is not None:
            facts.update({(f"{owner} ({mode} mode)", "code"): text for owner, text in describe(graph)})
        paths = _with_inner(model, leaves((graph,))) or list(table)
        facts.update({(f"module '{path}'", f"training in {mode} mode"): table[path] for path in paths})
    whole = attributes(model)
    varying: set[tuple[str, str]] = set()
    for path in _layers(model, graphs):
        varying |= {(path, name) for name in getattr(rule_for(model.get_submodule(path), path), "varying", ())}
        _module_facts(model, path, whole, facts, inside=not untraced)
    named = dict(zip(phases, graphs, strict=False))
    unread = hashlib.sha256(repr([item for item in whole.items() if item[0] not in varying]).encode()).hexdigest()
    return Structure(
        *({**facts, **tensors}, named, graphs[-1], *mode_tables, untraced),
        watch=Watch(model, codes),
        unread=unread,
    )


def _layers(model: nn.Module, graphs: Sequence[fx.Graph | None]) -> list[str]:
    """Return the paths of the layers that the graphs call, and those inside; or, without graphs, of all modules."""
    return [path for path, _ in model.named_modules()] if None in graphs else _with_inner(model, leaves(graphs))


def _with_inner(model: nn.Module, paths: Sequence[str]) -> list[str]:
    rules = {path: rule_for(model.get_submodule(path), path) for path in paths}
    return [each for path, rule in rules.items() for each in (path, *(rule.inner if isinstance(rule, Layer) else ()))]


def _module_facts(model: nn.Module, path: str, whole: Facts, facts: Facts, inside: bool) -> None:
    """Collect what must be equal in the module at `path`: all that its rule or, without one, its code may read.

    With `inside`, include the modules inside it.
    """
    module, owner = model.get_submodule(path), f"module '{path}'"
    facts[owner, "type"] = f"{type(module).__module__}.{type(module).__qualname__}"
    layer = rule_for(module, path)
    if isinstance(layer, Layer):
        settled = ("training", *layer.varying)
        own = {name: value for (where, name), value in whole.items() if where == path and name not in settled}
        facts.update({(owner, name): value for name, value in own.items()})
        facts.update({(owner, f"{name} is None"): getattr(module, name) is None for name in layer.varying})
        return
    facts[owner, "class"] = class_of(module, model)
    for (where, name), value in whole.items():
        if where == path or (inside and (not path or where.startswith(f"{path}."))):
            facts[f"module '{where}'", name] = value
    for name, tensor in _plain_tensors(module, path).items():
        facts[f"tensor '{name}'", "shape"] = tuple(tensor.shape)
        facts[f"tensor '{name}'", "dtype"] = str(tensor.dtype)
        facts[f"tensor '{name}'", "order in memory"] = order_of(tensor)


class Unchanged:
    """Checks that a forward changes nothing but the trial's tensors."""

    def __init__(self, model: nn.Module) -> None:
        """Store the present values."""
        self._model = model
        self._before = self._now()

    def check(self) -> None:
        """Compare with the stored values.

        Raises:
            RefusedError: the forward of some module has changed an attribute, or a variable outside the model.
        """
        (own, outer), (own_now, outer_now) = self._before, self._now()
        for path, name in {**own, **own_now}:
            by_tracing = name.startswith("_tensor_constant")
            if own.get((path, name)) != own_now.get((path, name)) and not by_tracing:
                raise self._error(path, f"attribute '{name}'")
        for name in {**outer, **outer_now}:
            if outer.get(name, "absent") != outer_now.get(name, "absent"):  # as objects are that show no value
                raise self._error("", name)

    def _error(self, path: str, what: str) -> RefusedError:
        return RefusedError(
            f"module '{label(self._model.get_submodule(path), path)}': its forward changes the {what}, which trials "
            "that train at once cannot each do for themselves; allowed: a buffer (register_buffer), or another output"
        )

    def _now(self) -> tuple[Facts, dict[str, Hashable]]:
        """Return the attributes of the user's own modules, and the variables outside the model."""
        own = {path for path, module in self._model.named_modules() if not type(module).__module__.startswith("torch.")}
        found: Facts = attributes(self._model, own)
        for path in own:
            found.update({(path, name): "a tensor" for name in plain_tensors(self._model.get_submodule(path))})
        return found, outer_values(self._model)


class Untouched:
    """Undoes changes of plain tensors. Tracing makes them, because it sees a tensor there and nothing to record."""

    def __init__(self, model: nn.Module) -> None:
        """Store the present values."""
        named = _plain_tensors(model, "").items()
        self._before = [(name, t, t.detach().clone(), t._version) for name, t in named if not t.is_inference()]

    def put_back(self) -> str:
        """Restore what has changed, and return the first name; empty: nothing has."""
        changed = [(name, t, value) for name, t, value, version in self._before if t._version != version]
        with torch.no_grad():
            for _, tensor, value in changed:
                tensor.copy_(value)
        return changed[0][0] if changed else ""


def difference(first: Facts, second: Facts) -> tuple[str, str, Any, Any] | None:
    """Return the first property in which two trials differ: owner, property, and both values."""
    for owner, name in [*first, *second]:
        one, other = (facts.get((owner, name), "absent") for facts in (first, second))
        if one != other:
            return owner, name, one, other
    return None


def leaves(graphs: Sequence[fx.Graph | None]) -> list[str]:
    """Return the paths of the layers that the graphs call, each once."""
    nodes = [node for graph in graphs if graph is not None for node in graph.nodes]
    return list(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))


def stack(
    models: Sequence[nn.Module],
    shapes: Sequence[Structure],
    generators: list[torch.Generator],
    once: Collection[str] = (),
) -> Rows:
    """Copy the tensors of K `models`, all of one of `shapes`, into rows with a leading axis K.

    The parameters in `once` are equal in all models, and are copied once.

    Raises:
        FuseError: two models share another tensor.
    """
    refuse_common([[*_own_parameters(model, once), *_buffers(model).items()] for model in models])
    first, shape = models[0], shapes[0]
    aliases = ties({**_parameters(first), **_buffers(first), **_constants(first, shape)})
    tables_K = [_parameters(model) for model in models]
    parameters = {
        name: stack_parameters([table[name] for table in tables_K])
        for name in tables_K[0]
        if name not in aliases and name not in once
    }
    common = {name: tables_K[0][name].detach().clone(memory_format=torch.contiguous_format) for name in once}
    buffers_K = [{**_buffers(model), **_constants(model, shape)} for model in models]
    buffers = {
        name: torch.stack([table[name].detach() for table in buffers_K]) for name in buffers_K[0] if name not in aliases
    }
    vectors: Vectors = {}
    for path in _layers(first, shape.graphs):
        layer = rule_for(first.get_submodule(path), path)
        if isinstance(layer, Layer) and (names := layer.varying):
            modules = [model.get_submodule(path) for model in models]
            vectors[path] = {name: [getattr(module, name) for module in modules] for name in names}
    vectors.update(configs(models))
    rows = Rows(parameters, buffers, vectors, aliases, generators, [own.unread for own in shapes], common)
    rows.orders = own_orders(tables_K[0], buffers_K[0])
    return rows


def canonical_names(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter of `model` to its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def rule_for(module: nn.Module, path: str) -> Layer | FuseError:
    """Return the fused layer for `module`, or why there is none."""
    try:
        return find(module, path)(module, path)
    except FuseError as error:
        return error


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks: neither a fused layer nor a traced forward would call them."""
    if has_hooks(None):
        raise FuseError("there are hooks on all modules of the process; allowed: none")
    for path, module in model.named_modules():
        if has_hooks(module):
            allowed = instead_of_hooks(module)
            raise FuseError(f"module '{path}' ({type(module).__name__}) has hooks; allowed: {allowed}")


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse compiled modules and those that copy themselves: neither takes another trial's tensors."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RefusedError(f"module '{path}' is compiled by torch.jit; allowed: the module that it was made from")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise RefusedError(
                f"module '{path}' is a {type(module).__name__}, which trains on several devices or for several "
                "processes; allowed: the module inside it, since a group of trials trains on one device"
            )


def _refuse_sparse(model: nn.Module) -> None:
    """Refuse sparse gradients: one trial's share of the rows' gradient is dense."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise refuse(path, module, "sparse", True, "allowed: False")


def _tensor_facts(model: nn.Module) -> Facts:
    facts: Facts = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise FuseError(f"parameter '{name}' has no shape yet; allowed: layers that know their sizes")
    _refuse_two_devices(model)
    refuse_overlaps(model)
    aliases = ties({**_parameters(model), **_buffers(model), **_plain_tensors(model, "")})
    for kind, table in (("parameter", _parameters(model)), ("buffer", _buffers(model))):
        for name, tensor in table.items():
            owner = f"{kind} '{name}'"
            hooks = (getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None))
            if type(tensor) not in (Tensor, nn.Parameter):
                raise FuseError(f"{owner} is of type {type(tensor).__name__}; allowed: Tensor, nn.Parameter")
            if any(hooks):
                raise FuseError(f"{owner} has hooks; allowed: none")
            facts[owner, "shape"] = tuple(tensor.shape)
            facts[owner, "dtype"] = str(tensor.dtype)
            facts[owner, "device"] = str(tensor.device)
            facts[owner, "requires_grad"] = tensor.requires_grad
            facts[owner, "tied to"] = aliases.get(name)
            facts[owner, "order in memory"] = order_of(tensor)
    for name in _plain_tensors(model, ""):
        facts[f"tensor '{name}'", "tied to"] = aliases.get(name)
    return facts | _saved_facts(model)


def _saved_facts(model: nn.Module) -> Facts:
    known = _parameters(model).keys() | _buffers(model).keys()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise FuseError(f"state_dict entry '{name}' is a {type(value).__name__}; allowed: tensors")
        if name not in known:
            raise FuseError(f"state_dict entry '{name}' is no parameter or buffer of that name; allowed: these")
    return {("state_dict", name): "saved" for name in model.state_dict()}


def _refuse_two_devices(model: nn.Module) -> None:
    first: tuple[str, torch.device] | None = None
    for name, tensor in {**_parameters(model), **_buffers(model)}.items():
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise FuseError(
                f"'{name}' is on {tensor.device}, and '{first[0]}' on {first[1]}; allowed: one device, as by "
                "model.to(device)"
            )


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _own_parameters(model: nn.Module, once: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters but those in `once`, by all their names."""
    found = _parameters(model)
    common = {id(found[name]) for name in once}
    return ((name, tensor) for name, tensor in found.items() if id(tensor) not in common)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _constants(model: nn.Module, shape: Structure) -> dict[str, Tensor]:
    """Return plain tensors that the user's forward reads: a trial's own, but neither parameters nor buffers."""
    graphs = shape.graphs
    found: dict[str, Tensor] = {}
    for path in _layers(model, graphs):
        if not isinstance(rule_for(model.get_submodule(path), path), Layer):
            found.update(_plain_tensors(model.get_submodule(path), path))
    known = _parameters(model).keys() | _buffers(model).keys()
    nodes = [node for graph in graphs if graph is not None for node in graph.nodes]
    for name in dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr"):
        if name in known:
            continue
        value: Any = model
        for part in name.split("."):
            value = getattr(value, part)
        if not isinstance(value, Tensor):
            raise FuseError(f"forward reads '{name}', a {type(value).__name__}; allowed: tensors")
        found[name] = value
    return found


def _plain_tensors(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Map names in the model to plain tensors, for `module` at `path` and those inside it."""
    return {
        ".".join(filter(None, (path, inner, name))): tensor
        for inner, owner in module.named_modules()
        for name, tensor in plain_tensors(owner).items()
    }
