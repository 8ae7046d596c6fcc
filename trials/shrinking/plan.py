"""Finds what shrinks in models of one structure, by running one of them once."""

import copy
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trials.shrinking.attributes import SizeAttribute, kept_modules, substitute, tell_sizes
from trials.shrinking.axes import elementwise as _elementwise  # noqa: F401 - each of these fills the table
from trials.shrinking.axes import products as _products  # noqa: F401
from trials.shrinking.axes import shapes as _shapes  # noqa: F401
from trials.shrinking.axes.axis import Axis, is_free, keep, leaves, new_size
from trials.shrinking.axes.run import copied, run
from trials.shrinking.axes.trace import Branch, Trace, keep_tensors
from trials.shrinking.depth import Shallower, shallower
from trials.shrinking.errors import ShrinkError
from trials.shrinking.fans import Axes


@dataclass(frozen=True, slots=True)
class Left:
    """An axis of a parameter that does not shrink.

    Attributes:
        parameter: its name.
        axis: which of its axes.
        size: of it.
        reason: why, in words.
    """

    parameter: str
    axis: int
    size: int
    reason: str

    def __str__(self) -> str:
        """In words."""
        return f"'{self.parameter}' axis {self.axis} stays {self.size}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What shrinking does to models of one structure.

    Attributes:
        by: the factor.
        axes: tensor's name -> its axes.
        attributes: sizes in modules.
        left: what does not shrink, and why.
        readouts: the weights of the last layers.
        uses: axes of the outputs and inputs of bare parameters, as their uses show.
        work: see `Shrunk`; of all blocks, also those that are dropped.
        depth: which blocks are dropped, and where the parameters of the others are.
    """

    by: int
    axes: Mapping[str, tuple[Axis, ...]]
    attributes: Sequence[SizeAttribute]
    left: tuple[Left, ...]
    readouts: tuple[str, ...]
    uses: Mapping[str, Axes] = field(default_factory=dict)
    work: tuple[int, int] = (0, 0)
    depth: Shallower = field(default_factory=Shallower)


def plan_of(
    model: nn.Module, by: int, batch: Any, divide: Sequence[str] = (), keep_: Sequence[str] = (), depth: int = 1
) -> Plan:
    """Find what shrinks, by running a copy of `model` once.

    Raises:
        ShrinkError: see `shrink`.
    """
    copy_ = _copied(model)
    trace = Trace()
    attributes = substitute(copy_, trace, divide, by)
    kept = dict(kept_modules(copy_, keep_))
    calls, tensors, ends = _traced(copy_, trace, batch, kept)
    axes = {name: trace.axes(tensor) for name, tensor in tensors.items()}
    _keep_indivisible(axes, attributes, by)
    _refuse_heads(trace, by)
    _keep_quotients(trace, by)
    parameters = {name for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    left = tuple(each for name, own_axes in axes.items() if name in parameters for each in _left(name, own_axes))
    plan = Plan(by, axes, attributes, left, _readouts(trace, ends), _fans(trace, copy_, calls), _work(trace, by))
    plan = replace(plan, depth=shallower(model, depth, trace.branches))
    if not any(is_free(axis) for name in parameters for axis in axes[name]):
        raise ShrinkError(_nothing(model, by, left))
    return plan


@dataclass(frozen=True, slots=True)
class Shown:
    """What a forward shows of a model that nothing is made from.

    Attributes:
        uses: see `Plan`.
        readouts: see `Plan`.
        branches: its residual branches.
    """

    uses: Mapping[str, Axes]
    readouts: tuple[str, ...]
    branches: Sequence[Branch]


def shown_by(model: nn.Module, batch: Any) -> Shown:
    """Run a model once.

    Raises:
        ShrinkError: see `shrink`.
    """
    copy_ = _copied(model)
    trace = Trace()
    calls, _, ends = _traced(copy_, trace, batch, {})
    return Shown(_fans(trace, copy_, calls), _readouts(trace, ends), trace.branches)


def work_of(model: nn.Module, batch: Any) -> int:
    """How many multiplications a forward takes."""
    trace = Trace()
    _traced(copy.deepcopy(model), trace, batch, {})
    return _work(trace, 1)[0]


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ShrinkError(
            f"{type(model).__name__} cannot be copied: {in_words(error)}; allowed: models that copy.deepcopy takes, so "
            "torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm"
        ) from error


def _traced(
    model: nn.Module, trace: Trace, batch: Any, kept: Mapping[str, str]
) -> tuple[Counter[int], dict[str, Tensor], list[Tensor]]:
    """Run a model, and return how often each Linear was called by its weight's id, the model's tensors, and outputs."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        trace.introduce(tensor, name=name if isinstance(tensor, nn.Parameter) else None, is_weight=True)
    tell_sizes(model, trace)
    own = copied(batch)
    for tensor in tree_leaves(own):
        if isinstance(tensor, Tensor):
            trace.introduce(tensor, "an axis of the input")
    for name, pattern in kept.items():
        keep_tensors(trace, [tensors[name]], f"keep={pattern!r}")
    calls: Counter[int] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, _: calls.update([id(m._parameters.get("weight"))]))
    outputs = _run_traced(model, trace, own)
    ends = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    keep_tensors(trace, ends, "an axis of the output")
    return calls, tensors, ends


def _readouts(trace: Trace, ends: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(sorted({name for tensor in ends for name in trace.known(tensor).last}))


def in_words(error: Exception) -> str:
    """An error, with the user's line that led to it."""
    here = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(here)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _run_traced(model: nn.Module, trace: Trace, batch: Any) -> Any:
    with torch.random.fork_rng(), torch.no_grad(), trace:
        try:
            return run(model, batch)
        except AssertionError:
            raise
        except Exception as error:
            if _is_ours(error):
                raise ShrinkError(
                    f"a call of the forward cannot be followed: {in_words(error)}; allowed: its arguments by position, "
                    "or model(self, params, shrink)"
                ) from error
            raise ShrinkError(
                f"the forward fails on the batch: {in_words(error)}; allowed: inputs that it takes"
            ) from error


def _is_ours(error: Exception) -> bool:
    """Whether a rule for a call has failed, and not the call itself, which `trace` makes."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return last.is_relative_to(Path(__file__).parent) and last.name != "trace.py"


def _keep_indivisible(axes: Mapping[str, Sequence[Axis]], attributes: Sequence[SizeAttribute], by: int) -> None:
    named = [(a, f" ('{p.path}.{p.name}')") for p in attributes for a in p.axes if isinstance(a, Axis)]
    for axis, what in [*named, *((axis, "") for own in axes.values() for axis in own)]:
        for leaf in leaves(axis):
            if not leaf.kept and leaf.size % by and (not what or leaf.size == axis.size):
                leaf.kept = f"{leaf.size}{what} is not divisible by {by}{_factors(leaf.size, by)}"


def _factors(size: int, by: int) -> str:
    """The factors that would do instead, in words."""
    found = [str(factor) for factor in range(2, min(size // 2, 4 * by) + 1) if size % factor == 0]
    return f", but by {', '.join(found)}" if found else ""


def _keep_quotients(trace: Trace, by: int) -> None:
    """What the code computes by division must come out as the axes do."""
    changed = True
    while changed:
        changed = False
        for whole, divisor, quotient in trace.quotients:
            if new_size(whole, by) != new_size(divisor, by) * new_size(quotient, by):
                reason = f"the code divides {whole.size} by {divisor.size}, which must come out as the axes do"
                reason = next(leaves(quotient)).kept if divisor.size == 1 else reason
                for axis in (whole, divisor, quotient):
                    changed = changed or is_free(axis)
                    keep(axis, reason)


def _refuse_heads(trace: Trace, by: int) -> None:
    for axis, where in trace.contracted:
        if new_size(axis, by) != axis.size:
            raise ShrinkError(
                f"{where} multiplies two activations along an axis of {axis.size}, which would shrink to "
                f"{new_size(axis, by)}: the size of a head must stay, because its scale does; allowed: name the "
                "attribute that counts heads, as in divide=('n_head',), or write model(self, params, shrink)"
            )


def _left(name: str, axes: Sequence[Axis]) -> list[Left]:
    found = []
    for number, axis in enumerate(axes):
        if not is_free(axis) and axis.size > 1:
            reason = next((leaf.kept for leaf in leaves(axis) if leaf.size > 1), "")
            if reason != "a spatial axis":
                found.append(Left(name, number, axis.size, reason))
    return found


def _fans(trace: Trace, model: nn.Module, calls: Mapping[int, int]) -> dict[str, Axes]:
    """The fans of parameters, as all of their uses show them.

    Args:
        trace: of the forward.
        model: that it has run.
        calls: the id of a weight -> how often a Linear that holds it was called.

    Raises:
        ShrinkError: an embedding is the head too, and not by a Linear that holds it.
    """
    found: dict[str, Axes] = {}
    for name, uses in trace.uses.items():
        if len(uses) == 1:
            ((out, into),) = uses
            found[name] = (out or None, into or None)
            continue
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)
        if isinstance(owner, nn.Embedding) and uses[(0,), (1,)] > calls[id(getattr(owner, own))]:
            raise ShrinkError(
                f"parameter '{name}' is an embedding and also multiplied like a Linear's weight, which must be scaled "
                "in the surrogate; allowed: a Linear(bias=False) as the head whose weight is tied to it, "
                "head.weight = embed.weight"
            )
    return found


def _work(trace: Trace, by: int) -> tuple[int, int]:
    before = after = 0
    for work in trace.work:
        one, other = work.times, work.times
        for axis in work.axes:
            one, other = one * axis.size, other * new_size(axis, by)
        before, after = before + one, after + other
    return before, after


def _nothing(model: nn.Module, by: int, left: Sequence[Left]) -> str:
    reasons = list(dict.fromkeys(str(each) for each in left if "axis of the" not in each.reason))
    shown = "; ".join(reasons[:3]) or "all its axes are inputs or outputs"
    return (
        f"{type(model).__name__} does not shrink by {by}: {shown}; allowed: another factor, sizes that the code reads "
        "from tensors (flatten(1), -1, x.shape), divide=('n_head',) for attributes that count, or model(self, params, "
        "shrink)"
    )
