"""Runs a model's forward once, and notes which axes of its tensors must have equal sizes.

The forward runs as it is, on real numbers. PyTorch shows each call of one of its functions first, as it does for
subclasses of tensors; `operations` lists what each call means for the axes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trials.shrinking.axes.axis import Axis, is_free, join, keep
from trials.shrinking.axes.origin import Shown, broadcast, fans_in_use, of_parameter, rearranged
from trials.shrinking.axes.run import source_line
from trials.shrinking.axes.sizes import Dim, axis_of


@dataclass(slots=True)
class Known:
    """What is known of a tensor.

    Attributes:
        axes: the class of each of its axes.
        node: the number of the call that made it; parameters and inputs have 0.
        shown: the parameters that it is or shows.
        last: the parameters of the last layers before it, if only functions with a slope at zero follow them.
        linear: the same, if nothing but linear functions follow them.
        is_weight: whether it depends on parameters alone.
    """

    axes: tuple[Axis, ...]
    node: int = 0
    shown: Shown = ()
    last: frozenset[str] = frozenset()
    linear: frozenset[str] = frozenset()
    is_weight: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of PyTorch's.

    Attributes:
        name: the function's, without underscores.
        args: its arguments.
        kwargs: the same.
        made: its result.
        where: the call in words, such as ``node 'view_2' (net.py:41)``.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Any
    where: str

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [each for each in tree_leaves((self.args, dict(self.kwargs))) if isinstance(each, Tensor)]


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplications of a call.

    Attributes:
        axes: whose sizes multiply to their number.
        times: what else multiplies.
    """

    axes: tuple[Axis, ...]
    times: int = 1


_LINEAR = (
    "add alpha_dropout bfloat16 cat chunk clone concat concatenate contiguous double dropout dropout1d dropout2d "
    "dropout3d expand flatten float getitem half iadd mT mean movedim neg permute radd ravel reshape select split "
    "squeeze stack sub sum swapaxes t T to transpose type unbind unflatten unsqueeze view view_as"
)
_SCALING = "mul div truediv rmul multiply divide masked_fill"
_SLOPED = (
    "elu erf exp expm1 gelu leaky_relu log1p log_softmax logsigmoid sigmoid silu sin softmax softmin softplus tanh"
)
"""Functions that are not flat at zero, so that layers before them can begin at zero."""

ELEMENTWISE: set[str] = set()
"""The functions that broadcast tensors and treat all their elements alike, and those that act as one."""

_OUT_PROJECTION = (11, "out_proj_weight"), (12, "out_proj_bias")

Operation = Callable[["Trace", Call], Any]
"""Returns the axes of the result: a tuple of axes, a list of such for several tensors, or None if it is no tensor."""

OPERATIONS: dict[str, Operation] = {}


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register what a call of these functions means for axes."""

    def register(function: Operation) -> Operation:
        for name in names:
            OPERATIONS[name] = function
        return function

    return register


@dataclass
class Branch:
    """A sum of two tensors, of which one was made from the other.

    Attributes:
        source: the node that made the stream's tensor.
        inside: the parameters of the layers between the two.
        last: those of its last layers.
        where: the call in words.
    """

    source: int
    inside: frozenset[str]
    last: frozenset[str]
    where: str


@dataclass
class Trace(TorchFunctionMode):
    """What a forward has shown so far.

    Attributes:
        work: its multiplications.
        uses: parameter -> the axes of its outputs and inputs, as each use shows them, and how often.
        contracted: axes along which activations are multiplied with each other -> where.
        branches: the residual branches.
        quotients: see `Dim`.
    """

    work: list[Work] = field(default_factory=list)
    uses: dict[str, Counter[tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    contracted: list[tuple[Axis, str]] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    quotients: list[tuple[Axis, Axis, Axis]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with nothing known."""
        super().__init__()
        self._known: dict[int, Known] = {}
        self._alive: list[Tensor] = []
        self._counts: dict[str, int] = {}
        self._node = 0
        self._parents: dict[int, tuple[int, ...]] = {}
        self._params_of: dict[int, frozenset[str]] = {}

    def introduce(self, tensor: Tensor, reason: str = "", name: str | None = None, is_weight: bool = False) -> Known:
        """Begin with a tensor: each axis a class of its own, kept for `reason` if there is one."""
        known = Known(tuple(Axis(size, reason) for size in tensor.shape), is_weight=is_weight)
        if name is not None:
            known.shown = of_parameter(name, tensor.ndim)
        return self._note(tensor, known)

    def known(self, tensor: Tensor) -> Known:
        """What is known of a tensor; of one made elsewhere, only that it does not shrink."""
        found = self._known.get(id(tensor))
        return found if found is not None else self.introduce(tensor, "a tensor that is no parameter and no buffer")

    def axes(self, tensor: Tensor) -> tuple[Axis, ...]:
        """The classes of a tensor's axes."""
        return self.known(tensor).axes

    def meet(self, axis: Axis, size: Any, call: Call) -> None:
        """An axis must have a size that the code gives: one that is known, or a plain number, which keeps it."""
        if isinstance(size, Dim):
            join(axis, size.axis, f"{call.where} needs {int(size)}")
        elif is_free(axis):
            keep(axis, f"{call.where} takes {int(size)}, a plain number")

    def dim(self, axis: Axis) -> Dim:
        """An axis's size, for the forward's own arithmetic."""
        return Dim(axis, self.quotients)

    def contract(self, one: Tensor, other: Tensor, axis: Axis, where: str) -> None:
        """Two tensors are multiplied and summed along an axis."""
        if not self.known(one).is_weight and not self.known(other).is_weight:
            self.contracted.append((axis, where))

    def use(self, tensor: Tensor, out: Iterable[int], into: Iterable[int]) -> None:
        """If a tensor is a parameter, note which of its axes are outputs and inputs in this use."""
        out, into = tuple(out), tuple(into)
        for each in self.known(tensor).shown:
            self.uses.setdefault(each.name, Counter())[fans_in_use(each, tensor.shape, out, into)] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note what it means for axes."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = _name(func)
        if name in ("shape", "size"):
            return self._sizes(args, kwargs, made)
        if name == "setitem":
            self._apply(Call(name, tuple(args), kwargs, args[0][args[1]], f"node '{name}'{source_line()}"))
            return made
        if not any(isinstance(each, Tensor) for each in tree_leaves(made)):
            return made
        node = name if name not in self._counts else f"{name}_{self._counts[name]}"
        self._counts[name] = self._counts.get(name, 0) + 1
        call = Call(name, tuple(args), kwargs, made, f"node '{node}'{source_line()}")
        self._apply(call)
        return made

    def _apply(self, call: Call) -> None:
        found = OPERATIONS.get(call.name)
        axes = found(self, call) if found is not None else _keep_all(self, call)
        outputs = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)]
        several = axes if isinstance(axes, list) else [axes]
        self._node += 1
        sources = [self.known(tensor) for tensor in call.tensors]
        weights = frozenset(each.name for source in sources for each in source.shown)
        last, linear = self._last(call, sources)
        self._parents[self._node] = tuple({s.node for s in sources if s.node})
        self._params_of[self._node] = weights
        is_weight = bool(sources) and all(s.is_weight for s in sources)
        if call.name in ("add", "iadd", "radd") and len(sources) == 2:
            self._add(sources[0], sources[1], call)
        for output, own in zip(outputs, several, strict=True):
            if tuple(axis.size for axis in own) != tuple(output.shape):
                raise AssertionError(f"{call.where}: {[axis.size for axis in own]} for {list(output.shape)}")
            shown = self._shown(call, sources, own) if is_weight else ()
            self._note(output, Known(tuple(own), self._node, shown, last, linear, is_weight))

    def _shown(self, call: Call, sources: Sequence[Known], own: Sequence[Axis]) -> Shown:
        """The parameters that the result of a call on weights alone shows."""
        if len(sources) == 1:
            is_whole = call.name in (*_LINEAR.split(), *_SCALING.split(), *_SLOPED.split())
            return rearranged(sources[0].shown, sources[0].axes, own, is_whole)
        if call.name in ELEMENTWISE:
            return broadcast([(source.shown, source.axes) for source in sources], own)
        return ()

    def _last(self, call: Call, sources: Sequence[Known]) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters of the last layers, after a call on `sources`."""
        layers = sources
        if call.name == "multi_head_attention_forward":
            layers = [self.known(call.get(i, name)) for i, name in _OUT_PROJECTION if call.get(i, name) is not None]
        weights = frozenset(each.name for layer in layers for each in layer.shown if each.is_whole)
        if weights:
            return weights, weights
        last: frozenset[str] = frozenset().union(*(s.last for s in sources))
        linear: frozenset[str] = frozenset().union(*(s.linear for s in sources))
        if (
            call.name in _SCALING
            and sum(1 for s in sources if s.last) == 1
            and not (call.name in ("div", "truediv") and sources[-1].last)
        ):
            return last, linear
        if call.name in _LINEAR.split():
            return last, linear
        return (last, frozenset()) if call.name in _SLOPED.split() else (frozenset(), frozenset())

    def _add(self, a: Known, b: Known, call: Call) -> None:
        """Note a residual branch, if one of two tensors was made from the other."""
        for stream, branch in ((a, b), (b, a)):
            between = self._between(stream.node, branch.node)
            if stream.node and between is not None:
                inside = frozenset().union(*(self._params_of[node] for node in between))
                self.branches.append(Branch(stream.node, inside, branch.linear, call.where))
                return

    def _between(self, source: int, node: int) -> set[int] | None:
        """The calls by which `node` was made from `source`; None: it was not."""
        reached: dict[int, bool] = {source: True}

        def reaches(each: int) -> bool:
            stack = [each]
            while stack:
                top = stack[-1]
                waiting = [p for p in self._parents.get(top, ()) if p not in reached and p > source]
                if waiting:
                    stack += waiting
                    continue
                reached[top] = reached.get(top, False) or any(reached.get(p, False) for p in self._parents.get(top, ()))
                stack.pop()
            return reached[each]

        if node <= source or not reaches(node):
            return None
        return {each for each, found in reached.items() if found and each != source} | self._weights_between(reached)

    def _weights_between(self, reached: Mapping[int, bool]) -> set[int]:
        """Calls on weights alone, such as a transpose, whose results were used on the way."""
        found: set[int] = set()
        for node in [each for each, is_reached in reached.items() if is_reached]:
            found |= {p for p in self._parents.get(node, ()) if not self._parents.get(p) and self._params_of.get(p)}
        return found

    def _sizes(self, args: Any, kwargs: Any, made: Any) -> Any:
        axes = self.axes(args[0])
        if isinstance(made, torch.Size):
            return torch.Size([self.dim(axis) for axis in axes])
        chosen = args[1] if len(args) > 1 else kwargs["dim"]
        return self.dim(axes[chosen])

    def _note(self, tensor: Tensor, known: Known) -> Known:
        self._known[id(tensor)] = known
        self._alive.append(tensor)  # so that no other tensor gets its id
        return known


def keep_tensors(trace: Trace, tensors: Iterable[Any], reason: str) -> None:
    """Let tensors stay as they are."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            for axis in trace.axes(tensor):
                keep(axis, reason)


def _keep_all(trace: Trace, call: Call) -> list[tuple[Axis, ...]]:
    """A function of unknown meaning: nothing that it touches shrinks."""
    reason = f"{call.where}: there is no rule for {call.name}"
    keep_tensors(trace, call.tensors, reason)
    outputs = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)]
    return [tuple(Axis(size, reason) for size in output.shape) for output in outputs]


def sizes_as_axes(trace: Trace, sizes: Sequence[Any], call: Call) -> tuple[Axis, ...]:
    """The axes of a new tensor of these sizes."""
    reason = call.where
    return tuple(
        axis_of(size) if isinstance(size, Dim) else Axis(int(size), f"{reason} takes {size}, a plain number")
        for size in sizes
    )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_")
    return name.rstrip("_")
