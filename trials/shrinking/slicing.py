"""Makes a surrogate from a target: takes slices of its tensors, and tries the result."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trials.shrinking.attributes import set_sizes
from trials.shrinking.axes.axis import Axis, index_of, new_size
from trials.shrinking.axes.run import copied, run
from trials.shrinking.depth import drop, set_branches
from trials.shrinking.errors import ShrinkError, ShrinkWarning
from trials.shrinking.fans import Axes
from trials.shrinking.plan import Left, Plan, in_words, plan_of, work_of
from trials.shrinking.roles import Role, Roles, roles
from trials.shrinking.rules import initial_factor
from trials.shrinking.settings import READOUTS, READOUTS_ALLOWED
from trials.shrinking.tied import make_tied

NARROW = 32
"""Narrower layers than this behave unlike wide ones."""

MIXED = 0.2
"""From this share of inputs that stay, a layer with others that shrink moves visibly further."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A surrogate.

    Attributes:
        model: the narrow model.
        roles: of its parameters.
        left: what has not shrunk, and why.
        zeroed: the readouts that begin at zero, as those of the target must.
        work: multiplications of one forward on the batch: the target's, and the surrogate's.
    """

    model: nn.Module
    roles: Roles
    left: tuple[Left, ...]
    zeroed: tuple[str, ...] = ()
    work: tuple[int, int] = (0, 0)


def shrink(
    model: nn.Module,
    by: int,
    batch: Any,
    *,
    depth: int = 1,
    readout: str = "zero",
    divide: Sequence[str] = (),
    fans: Mapping[str, Axes] | None = None,
    keep: Sequence[str] = (),
) -> Shrunk:
    """Make a surrogate of `model`, at 1/`by` of its width, by running its forward once. The model stays as it is.

    Args:
        model: the target, as it begins.
        by: how many times narrower.
        batch: its inputs: a tensor, a tuple for ``model(*batch)`` or a dict for ``model(**batch)``.
        depth: how many times shallower, for stacks of pre-norm residual blocks.
        readout: "zero" lets the last layers begin at zero, as those of the target must then too; "keep" leaves the
            target as it is.
        divide: names of integer attributes, such as ``("n_head",)``, that count what shrinks in code of your own.
        fans: see `roles`; needed only where a parameter's use does not show them.
        keep: patterns of names of parameters or modules that stay as they are.

    Raises:
        ShrinkError: the forward cannot be shrunk. The message names the line and the way out.
    """
    _check_settings(by, readout)
    plan = plan_of(model, by, batch, divide, keep, depth)
    made = apply(plan, model, readout, fans or {})
    if depth != 1:
        made = replace(made, work=(plan.work[0], work_of(made.model, batch)))
    try_out(model, made, batch)
    _warn(plan, made)
    return made


def apply(plan: Plan, model: nn.Module, readout: str, fans: Mapping[str, Axes]) -> Shrunk:
    """Make a surrogate of a model of the plan's structure, with slices of its tensors."""
    target, by = model, plan.by
    if plan.depth.dropped:
        target = copy.deepcopy(model, {id(tensor): tensor for _, tensor in _tensors(model)})
        drop(target, plan.depth.dropped)
    slices: dict[int, Any] = {id(tensor): _sliced(tensor, plan.axes[name], by) for name, tensor in _tensors(target)}
    surrogate = copy.deepcopy(target, slices)  # takes the slices for its tensors: a wide target is never copied
    paths = {path for path, _ in surrogate.named_modules()}
    set_sizes(surrogate, [each for each in plan.attributes if each.path in paths], by)
    found = roles(target, surrogate, fans, plan.uses)
    set_branches(found, plan.depth)
    scale_tied_heads(surrogate, found)
    _begin(surrogate, found)
    zeroed = zero_readouts(surrogate, found, plan.readouts, readout)
    return Shrunk(surrogate, found, plan.left, zeroed, plan.work)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def scale_tied_heads(surrogate: nn.Module, found: Mapping[str, Role]) -> None:
    """Let heads that are tied to an embedding multiply their results.

    Raises:
        ShrinkError: such a head is of a class of its own.
    """
    names = {id(p): name for name, p in surrogate.named_parameters()}
    for path, module in surrogate.named_modules():
        name = names.get(id(module._parameters.get("weight")), "") if isinstance(module, nn.Linear) else ""
        if name and found[name].tied:
            assert isinstance(module, nn.Linear)  # it has a name
            if type(module) is not nn.Linear:
                raise ShrinkError(
                    f"module '{path}' ({type(module).__name__}) is tied to an embedding; allowed: nn.Linear there, "
                    "whose results the surrogate multiplies"
                )
            make_tied(module, 1 / found[name].r_out)


@torch.no_grad()
def zero_readouts(
    model: nn.Module, found: Mapping[str, Role], readouts: Sequence[str], readout: str
) -> tuple[str, ...]:
    """Let those of the last layers whose inputs shrink begin at zero, if `readout` says so, and return them."""
    zeroed = tuple(name for name in readouts if name in found and found[name].kind == "output" and readout == "zero")
    for name in zeroed:
        model.get_parameter(name).zero_()
    return zeroed


@torch.no_grad()
def _begin(surrogate: nn.Module, found: Mapping[str, Role]) -> None:
    """Give slices the size of the surrogate's initial values; what puts outputs out keeps their size."""
    for name, p in surrogate.named_parameters():
        p.mul_(initial_factor(found[name], keeps=True))


def try_out(target: nn.Module, made: Shrunk, batch: Any) -> None:
    """Run a surrogate forward and backward on a batch.

    Raises:
        ShrinkError: that fails, or gives outputs of other shapes.
    """
    expected = _outputs(target, batch, "the target's forward fails")
    trial = copy.deepcopy(made.model)
    for p in trial.parameters():
        p.grad = None
    found = _outputs(trial, batch, "the surrogate's forward fails, though the target's does not")
    if [t.shape for t in expected] != [t.shape for t in found]:
        raise ShrinkError(
            f"the surrogate's outputs have the shapes {[list(t.shape) for t in found]}, the target's "
            f"{[list(t.shape) for t in expected]}; allowed: outputs that no size in the model changes"
        )
    loss = sum((t.float().sum() for t in found if t.requires_grad), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()


def _outputs(model: nn.Module, batch: Any, what: str) -> list[Tensor]:
    trial = copy.deepcopy(model)
    with torch.random.fork_rng():
        try:
            made = run(trial, copied(batch))
        except Exception as error:
            raise ShrinkError(
                f"{what}: {in_words(error)}; allowed: name the attributes that count what shrinks, as in "
                "divide=('n_head',), or write model(self, params, shrink)"
            ) from error
    return [each for each in tree_leaves(made) if isinstance(each, Tensor)]


def _check_settings(by: Any, readout: str) -> None:
    if not isinstance(by, int) or isinstance(by, bool) or by < 2:
        raise ShrinkError(f"by={by!r}; allowed: a whole number, 2 or more")
    if readout not in READOUTS:
        raise ShrinkError(f"readout={readout!r}; allowed: {READOUTS_ALLOWED}")


def _sliced(tensor: Tensor, axes: Sequence[Axis], by: int) -> Tensor:
    made = tensor.detach()
    for number, axis in enumerate(axes):
        if new_size(axis, by) != axis.size:
            made = made.index_select(number, index_of(axis, by).to(made.device))
    made = made.clone()
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _warn(plan: Plan, made: Shrunk) -> None:
    for text in warnings_about(made.roles, plan.left, made.work):
        warnings.warn(text, ShrinkWarning, stacklevel=3)


def _share_that_stays(role: Role, found: Mapping[str, Role]) -> float:
    """The share of a surrogate's inputs that have not shrunk, where others have by the factor of most parameters."""
    if role.r_in == 1 or role.tied:
        return 0.0
    whole = mode(each.r_in for each in found.values() if each.r_in != 1)
    return (role.r_in - whole) / (1 - whole) / role.r_in


def warnings_about(found: Mapping[str, Role], left: Sequence[Left], work: tuple[int, int]) -> Iterator[str]:
    """Yield what may keep a surrogate from telling much about its target."""
    narrow = {
        (role.shape[axis], name)
        for name, role in found.items()
        for axis in range(len(role.shape))
        if role.shape[axis] < role.target_shape[axis] and role.shape[axis] < NARROW
    }
    if narrow:
        size, name = min(narrow)
        yield (
            f"'{name}' has only {size} units in the surrogate; below {NARROW}, rates transfer less well; allowed: a "
            "smaller factor"
        )
    mixed = [(r, name) for name, role in found.items() if (r := _share_that_stays(role, found)) > MIXED]
    if mixed:
        share, name = max(mixed)
        yield (
            f"of the inputs of '{name}' in the surrogate, {share:.0%} are of sizes that stay, beside others that "
            "shrink: it has one rate for both, at which those that stay move it further than in the target; allowed: "
            "a layer of its own for these inputs, whose outputs are added"
        )
    before, after = work
    if after * 2 > before:
        stays = [str(each) for each in left if "an axis of the" not in each.reason][:2]
        yield (
            f"the surrogate multiplies {after / max(before, 1):.0%} as often as its target, because most of it stays "
            f"as it is{': ' if stays else ''}{'; '.join(stays)}"
        )
