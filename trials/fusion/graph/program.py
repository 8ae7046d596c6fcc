"""The forward of K trials: a list of steps made once from a graph, run for every batch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx, nn

from trials.fusion.graph.steps import CallStep, JointStep, LayerStep, Ref, State, Step, TensorStep, fill, keep_orders
from trials.fusion.graph.trace import layer_label, leaf_input
from trials.fusion.layers.conv import draws
from trials.fusion.layers.memory_order import kept_order
from trials.fusion.own_code import autocast
from trials.fusion.own_code.mapped import Mapped
from trials.fusion.own_code.trees import apart, dims_of, expand
from trials.fusion.registry import JointLayer, Layer, label
from trials.fusion.rows import Rows
from trials.fusion.units import LayerUnits, Units


class Program:
    """The forward of K trials in one mode.

    Attributes:
        forward_units: the units of this forward, in order.
    """

    def __init__(
        self,
        graph: fx.Graph,
        model: nn.Module,
        layers: dict[str, Layer | Exception],
        modes: dict[str, bool],
        units: Units,
    ) -> None:
        """Compile `graph`, traced from `model`.

        Args:
            graph: the user's forward.
            model: one trial's model, to look up names.
            layers: path -> fused layer, or why there is none.
            modes: path -> whether that module is in training mode.
            units: where the layers' units are numbered.
        """
        self._index = {node: index for index, node in enumerate(graph.nodes)}
        self.steps: list[Step] = []
        self.forward_units: list[str] = []
        self._asking: list[LayerStep | MappedStep] = []
        self._size = 0
        self._first = 0
        self._units = units
        self._output: Any = None
        self._sources: list[int] = []
        for node in graph.nodes:
            self._compile(node, model, layers, modes)
        if not self.forward_units:
            self._unit(f"{type(model).__name__} forward")
        self._mark_last_reads(graph)

    def bind(self, rows: Rows) -> None:
        """Take the tensors of `rows`; called after they were built or changed."""
        self._size = rows.size
        for step in self.steps:
            step.bind(rows)
        keep_orders(self.steps, rows.are_drawn_for)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], per_trial: bool) -> Any:
        """Run all layers.

        Args:
            args: the graph's inputs, tensors ``x_B...`` that all trials share, or ``x_KB...``.
            kwargs: none.
            per_trial: whether they have the axis K.

        Returns:
            The model's output, all its tensors with the leading axis K.
        """
        self._units.enter(self._first)
        state = State(len(self._index))
        values, flags = state.values, state.flags
        for index, tensor in zip(self._sources, args, strict=True):
            values[index], flags[index] = tensor, per_trial
        watch = self._units.watch
        for step in self.steps:
            step.run(state)
            if watch is not None and step.layer_label:
                watch.layer(step.layer_label, values[step.out], flags[step.out])
            for index in step.last_reads:
                values[index] = None
        size = self._size
        return fill(self._output, lambda index: values[index] if flags[index] else expand(values[index], size))

    def is_static(self) -> bool:
        """Whether no step runs the user's own code, and a CUDA graph may stand for each."""
        return all(_is_static(step) for step in self.steps)

    def ways(self) -> Iterator[tuple[str, str]]:
        """Yield each layer, and each call between layers that is not direct, and how it is computed."""
        for step in self.steps:
            if isinstance(step, LayerStep):
                yield step.layer.label, f"rule {type(step.layer).__name__}"
            elif isinstance(step, MappedStep):
                yield step.mapped.label, step.mapped.way(step.reason)
                yield from step.mapped.ways()
            elif isinstance(step, CallStep) and step.looped:
                yield f"node '{step.node}'", autocast.REASON
            elif isinstance(step, CallStep) and step.vmapped:
                yield f"node '{step.node}'", "vmap of the call: it has no equivalent with the axis K"

    def _compile(
        self, node: fx.Node, model: nn.Module, layers: dict[str, Layer | Exception], modes: dict[str, bool]
    ) -> None:
        out = self._index[node]
        if node.op == "placeholder":
            self._sources.append(out)
        elif node.op == "output":
            self._output = self._refer(node.args[0])
        elif node.op == "get_attr":
            self.steps.append(TensorStep(out, str(node.target)))
        elif node.op == "call_module":
            path = str(node.target)
            layer = layers[path]
            if not isinstance(layer, Layer):
                self._compile_mapped(node, model.get_submodule(path), str(layer), modes)
                return
            if any(modes[inner] != modes[path] for inner in layer.inner):
                self._compile_mapped(node, model.get_submodule(path), "layers inside it are in another mode", modes)
                return
            enter = None if layer.free else self._unit(f"{layer_label(model, node)} forward")
            step: LayerStep
            if isinstance(layer, JointLayer):
                inputs = layer.arrange(self._refer(node.args), self._refer(node.kwargs))
                step = JointStep(out, inputs, layer, modes[path], enter)
            else:
                step = LayerStep(out, self._index[leaf_input(node)], layer, modes[path], enter)
            self.steps.append(step)
            if not layer.free:
                self._asking.append(step)
        else:
            args, kwargs = self._refer(node.args), self._refer(node.kwargs)
            self.steps.append(CallStep(out, node, args, kwargs))

    def _compile_mapped(self, node: fx.Node, module: nn.Module, reason: str, modes: dict[str, bool]) -> None:
        path = str(node.target)
        entered = self._unit(f"{label(module, path)} forward") is None
        mapped = Mapped(module, path, modes, LayerUnits(self._units, self.forward_units[-1]))
        step = MappedStep(self._index[node], self._refer(node.args), self._refer(node.kwargs), mapped, reason, entered)
        self.steps.append(step)
        self._asking.append(step)

    def _unit(self, name: str) -> Callable[[], None] | None:
        """Number a layer's forward, and return how to ask for it."""
        again = sum(known.split("#")[0] == name for known in self.forward_units)
        name = f"{name}#{again + 1}" if again else name
        self.forward_units.append(name)
        number, enter = self._units.number(name), self._units.enter
        if len(self.forward_units) == 1:
            # `run` asks, since the user's functional code may come before the first layer
            self._first = number
            return None
        return lambda: enter(number)

    def declare_backward(self) -> None:
        """Number the backward units, last layer first, and have the gate asked for them."""
        for name, step in reversed(list(zip(self.forward_units, self._asking, strict=False))):
            if isinstance(step, MappedStep):
                step.mapped.units.declare_backward()
            else:
                step.hook = self._units.backward_hook(self._units.number(name.replace(" forward", " backward")))

    def _refer(self, value: Any) -> Any:
        def refer(node: fx.Node) -> Any:
            return Ref(self._index[node])

        return fx.node.map_arg(value, refer)

    def _mark_last_reads(self, graph: fx.Graph) -> None:
        """Free every value after its last use."""
        last = {node: max((self._index[user] for user in node.users), default=-1) for node in graph.nodes}
        for step in self.steps:
            step.last_reads = tuple(self._index[node] for node, index in last.items() if index == step.out)


class MappedStep(Step):
    """Runs a layer without a rule."""

    def __init__(self, out: int, args: Any, kwargs: dict[str, Any], mapped: Mapped, reason: str, entered: bool) -> None:
        """`args` and `kwargs` have a `Ref` for each node. `reason` is why there is no rule."""
        super().__init__(out)
        self.args, self.kwargs, self.mapped, self.reason, self.entered = args, kwargs, mapped, reason, entered
        self.layer_label, self._draws = mapped.label, draws(mapped.module)

    def bind(self, rows: Rows) -> None:
        """See `Step`."""
        self._size = rows.size
        self.mapped.bind(rows)

    def draws(self) -> bool:
        """See `Step`."""
        return self._draws

    def run(self, state: State) -> None:
        """See `Step`."""
        values, flags = state.values, state.flags
        args, kwargs = fill((self.args, self.kwargs), values.__getitem__)
        dims = fill((self.args, self.kwargs), lambda i: dims_of(values[i], flags[i]), constant=lambda _: None)
        if self.keeps_order and not self.mapped.looped and self._size > 1:
            given = fill((self.args, self.kwargs), lambda i: [x[0] if flags[i] else x for x in apart(values[i])[0]])
            if any(kept_order(x) for x in apart(given)[0]):
                self.mapped.looped = "under vmap activations lose the order of channels_last, in which dropout draws"
        values[self.out] = self.mapped.run(args, kwargs, dims, self.entered)
        flags[self.out] = True


def _is_static(step: Step) -> bool:
    if isinstance(step, LayerStep):
        return step.layer.is_recordable
    return not isinstance(step, MappedStep) and not (isinstance(step, CallStep) and step.looped)
