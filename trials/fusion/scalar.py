"""Computes the user's loss or score, written for one model, for K models at once."""

import dis
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from trials.fusion import autocast
from trials.fusion.errors import FuseError, RefusedError, is_out_of_memory
from trials.fusion.functional import JOINT, MOVED
from trials.fusion.inner import Calls
from trials.fusion.observer import Observer, refuse_questions
from trials.fusion.registry import CALLS
from trials.fusion.steps import CallStep, Ref, State, Step
from trials.fusion.streams import drawing_from, drawing_nothing, foreign_streams, refuse_foreign, saved
from trials.fusion.surroundings import as_written, kept, reentrant_checkpoint, refused_checkpoint, without_recomputing
from trials.fusion.together import Together
from trials.fusion.tracer import Tracer, recording
from trials.fusion.trees import apart, dims_of, of_row
from trials.fusion.ways import Way


class Scalar:
    """A function from one model's outputs and the targets to a scalar, for K models.

    A pure function is traced once, and its steps run without `vmap`. Any other runs under `vmap` each time, or once for
    each trial where `vmap` cannot and under autocast.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Tensor], way: Way = "rules") -> None:
        """`name` is for error messages. By "rules" a pure function is traced; by "loop" none runs under `vmap`."""
        self._name, self._function = name, function
        self._steps, self._last = _trace(function) if way == "rules" else ([], 0)
        self._looped, self._seen, self._stepped = way == "loop", False, False

    def __call__(
        self, outputs: Any, targets: Any, generators: Sequence[torch.Generator], per_trial: bool = False
    ) -> Tensor:
        """Return one value per trial.

        Args:
            outputs: the model's. Every tensor in it has the leading axis K, one entry per trial.
            targets: tensors in any containers, or none: shared by all trials, or with the axis K too.
            generators: a random stream per trial.
            per_trial: whether they have that axis.

        Returns:
            ``[K]``.

        Raises:
            FuseError: it is not a scalar, or draws from streams that no trial has for itself.
        """
        values_K = None
        if self._steps and isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            values_K = self._by_steps(outputs, targets, per_trial)
        if values_K is None:
            streams = None if self._seen else foreign_streams()
            values_K = self._by_code(outputs, targets, generators, per_trial)
            if streams is not None:
                refuse_foreign(streams, self._name)
            self._seen = True
        if not isinstance(values_K, Tensor) or values_K.ndim != 1:
            raise self._no_scalar(values_K, 1)
        return values_K

    def _no_scalar(self, value: Any, axes: int) -> FuseError:
        what = list(value.shape[axes:]) if isinstance(value, Tensor) else type(value).__name__
        return FuseError(f"{self._name} returned {what}; allowed: a scalar tensor")

    def _by_steps(self, outputs: Tensor, targets: Tensor, per_trial: bool) -> Tensor | None:
        """Return the values, or None if a step fails: then the user's own code is run, for its error."""
        state = State(len(self._steps) + 2)
        state.values[:2], state.flags[:2] = [outputs, targets], [True, per_trial]
        try:
            # what is drawn here would come from no trial's stream, and be the same for all
            with nullcontext() if self._stepped else drawing_nothing(outputs.device, self._name):
                for step in self._steps:
                    step.run(state)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._steps = []
            return None
        self._stepped = True
        if not state.flags[self._last]:
            self._steps = []
            return None
        found: Tensor = state.values[self._last]
        return found

    def _by_code(self, outputs: Any, targets: Any, generators: Sequence[torch.Generator], per_trial: bool) -> Any:
        """Run the user's code: under `vmap`, or else for one trial after another."""
        if any(autocast.is_on(tensor.device) for tensor in apart(outputs)[0]):  # `vmap` gives other types there
            return self._by_loop(outputs, targets, generators, per_trial)
        if len(generators) > 1 and not self._looped:
            restore = saved({}, generators)
            try:
                return self._by_vmap(outputs, targets, per_trial)
            except RefusedError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                restore()
        self._looped = True
        return self._by_loop(outputs, targets, generators, per_trial)

    def _by_vmap(self, outputs: Any, targets: Any, per_trial: bool) -> Any:
        tensors, together = apart(outputs)
        rules = Together()

        def call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            rules.check_call(function)
            return function(*args, **kwargs)

        def one(own: list[Tensor], own_targets: Any) -> Tensor:
            with Calls(call), rules, without_recomputing(refused_checkpoint):
                return self._function(together(own), own_targets)

        with as_written():
            return torch.vmap(one, (0, dims_of(targets, per_trial)), randomness="error")(tensors, targets)

    def _by_loop(self, outputs: Any, targets: Any, generators: Sequence[torch.Generator], per_trial: bool) -> Any:
        tensors, together = apart(outputs)
        dims = dims_of(targets, per_trial)
        values: list[Any] = []
        for row, generator in enumerate(generators):
            own_targets = of_row(targets, dims, row)
            with drawing_from(generator), without_recomputing(reentrant_checkpoint):
                values.append(self._function(together([tensor[row] for tensor in tensors]), own_targets))
            if not isinstance(values[-1], Tensor) or values[-1].ndim:
                raise self._no_scalar(values[-1], 0)
        return torch.stack(values)


def _trace(function: Callable[[Any, Any], Tensor]) -> tuple[list[Step], int]:
    """Return the steps of `function` and the index of its result. No steps: it may depend on more than its inputs."""
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, types.FunctionType) or not _is_pure(plain, bound=plain is not function):
        return [], 0
    random_state, put_back_around = torch.get_rng_state(), kept()
    observer = Observer()
    try:
        with recording(), observer:
            graph = Tracer().trace(lambda outputs, targets: function(outputs, targets))
        refuse_questions(observer)
    except Exception:
        return [], 0
    finally:
        drew = not torch.equal(random_state, torch.get_rng_state())
        torch.set_rng_state(random_state)
        put_back_around()
    if drew:
        return [], 0
    index = {node: number for number, node in enumerate(graph.nodes)}

    def refer(node: fx.Node) -> Any:
        return Ref(index[node])

    steps: list[Step] = []
    for node in graph.nodes:
        if node.op == "output":
            result = node.args[0]
            return (steps, index[result]) if isinstance(result, fx.Node) else ([], 0)
        if node.op in ("call_function", "call_method") and node.target not in CALLS:
            args, kwargs = (fx.node.map_arg(value, refer) for value in (node.args, node.kwargs))
            steps.append(CallStep(index[node], node, args, kwargs))
        elif node.op != "placeholder":
            return [], 0
    return [], 0


_PURE = (
    "abs",
    "bool",
    "dict",
    "enumerate",
    "float",
    "int",
    "len",
    "list",
    "max",
    "min",
    "range",
    "sum",
    "tuple",
    "zip",
)
"""Python's own functions that a loss may call without depending on more than its inputs."""


def _is_pure(function: types.FunctionType, bound: bool) -> bool:
    """Whether its code reads nothing but its inputs, constants and functions of torch, and changes nothing."""
    code = function.__code__
    inside = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
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


_FEW_CLASSES, _MANY_TRIALS = 16, 8
"""A softmax over a shorter axis than this leaves the processor's vectors unused; many trials side by side fill them."""


def _cross_entropy(
    x_KBC: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`functional.cross_entropy` of class numbers (``[1, B]`` or ``[K, B]``), without class weights."""
    if weight is not None or size_average is not None or reduce is not None or reduction != "mean":
        return NotImplemented
    return _of_classes(
        functional.cross_entropy,
        x_KBC,
        target,
        ignore_index,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def _nll_loss(x_KBC: Tensor, target: Tensor) -> Any:
    return _of_classes(functional.nll_loss, x_KBC, target, -100)


def _of_classes(loss: Callable[..., Tensor], x_KBC: Tensor, target: Tensor, ignored: int, **options: Any) -> Any:
    """The mean over each trial's examples whose class is not `ignored`."""
    if x_KBC.ndim != 3 or target.is_floating_point():
        return NotImplemented
    size, batch, classes = x_KBC.shape
    if size == 1:
        return loss(x_KBC[0], target[0], **options).unsqueeze(0)
    target_KB = target.expand(size, batch)
    if classes <= _FEW_CLASSES and size >= _MANY_TRIALS:
        losses_BK = loss(x_KBC.permute(1, 2, 0), target_KB.t(), reduction="none", **options)
        losses_K = losses_BK.sum(0)
    else:
        losses = loss(x_KBC.flatten(0, 1), target_KB.reshape(-1), reduction="none", **options)
        losses_K = losses.view(size, batch).sum(1)
    return losses_K / (target != ignored).sum(-1)


def _elementwise(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """A loss that compares two tensors of one shape, and averages."""

    def call(x_K: Tensor, target: Tensor) -> Any:
        if target.shape[1:] != x_K.shape[1:] or x_K.ndim < 2:
            return NotImplemented
        if len(x_K) == 1:
            return loss(x_K[0], target[0]).unsqueeze(0)
        return loss(x_K, target.expand_as(x_K), reduction="none").flatten(1).mean(1)

    return call


def _whole(reduce: Callable[..., Tensor], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction over all of a trial's axes, called without naming any."""

    def call(x_K: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return otherwise(x_K, *args, **kwargs)
        return reduce(x_K.flatten(1), 1) if x_K.ndim > 1 else x_K

    return call


def _argmax(x_K: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return x_K.argmax(dim + 1 if dim >= 0 else dim, keepdim)


MOVED[functional.cross_entropy] = _cross_entropy
MOVED[functional.nll_loss] = _nll_loss
_ELEMENTWISE_LOSSES = (
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
)
for _loss in _ELEMENTWISE_LOSSES:
    MOVED[_loss] = _elementwise(_loss)
JOINT.update((functional.cross_entropy, functional.nll_loss, *_ELEMENTWISE_LOSSES))
MOVED[torch.argmax] = MOVED["argmax"] = _argmax
MOVED[torch.mean] = MOVED["mean"] = _whole(torch.mean, MOVED["mean"])
MOVED[torch.sum] = MOVED["sum"] = _whole(torch.sum, MOVED["sum"])
