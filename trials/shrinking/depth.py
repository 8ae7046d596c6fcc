"""Finds stacks of pre-norm residual blocks, and makes them shallower (CompleteP, arXiv 2505.01618, with α = 1).

CompleteP multiplies each branch of a stack of depth L by 1/L. Here that factor is part of the branch's last layer, so
that the forward stays as it is; `rules` has what follows for the rates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import nn

from trials.shrinking.axes.trace import Branch
from trials.shrinking.errors import ShrinkError
from trials.shrinking.fans import is_conv1d
from trials.shrinking.roles import BranchPart, Roles

MOST = 4
"""Stacks that are shallower than this have not been seen to transfer."""

_LAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Shallower:
    """What depth does to a model.

    Attributes:
        dropped: the paths of the blocks that the surrogate lacks.
        parts: parameter of a block that stays -> its part of its branch.
        ratio: the surrogate's depth ÷ the target's.
    """

    dropped: tuple[str, ...] = ()
    parts: Mapping[str, BranchPart] = field(default_factory=dict)
    ratio: float = 1.0


def shallower(model: nn.Module, by: int, branches: Sequence[Branch]) -> Shallower:
    """Find the stacks of `model` that can be made shallower.

    Args:
        model: the target.
        by: how many times shallower.
        branches: the residual branches that a forward has shown.

    Raises:
        ShrinkError: there is none, or one has blocks for which there is no rule.
    """
    if by == 1:
        return Shallower()
    if not isinstance(by, int) or isinstance(by, bool) or not 1 <= by <= MOST:
        raise ShrinkError(f"depth={by!r}; allowed: a whole number from 1 to {MOST}")
    dropped: list[str] = []
    parts: dict[str, BranchPart] = {}
    seen = []
    for paths in _stacks(model):
        seen.append(f"{len(paths)} in '{paths[0].rpartition('.')[0]}'")
        if len(paths) % by or len(paths) // by < 2:
            continue
        kept = paths[: len(paths) // by]
        for path in paths:
            found = dict(_parts(model, path, branches))
            parts.update(found if path in kept else {})
        dropped += paths[len(kept) :]
    if not dropped:
        raise ShrinkError(
            f"depth={by}: no stack of alike blocks can be divided by {by} with two left; found: "
            f"{', '.join(seen) or 'none'}; allowed: depth=1, or such a number of blocks in a ModuleList or Sequential"
        )
    return Shallower(tuple(dropped), parts, 1 / by)


def set_branches(found: Roles, depth: Shallower) -> None:
    """Note where in their branches parameters are among the roles of a model without the dropped blocks."""
    for name, own in depth.parts.items():
        found[name] = replace(found[name], branch=own, r_depth=depth.ratio)


def drop(model: nn.Module, dropped: Sequence[str]) -> None:
    """Remove blocks from a model."""
    for path in dropped:
        owner, _, name = path.rpartition(".")
        del model.get_submodule(owner)._modules[name]
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
            module.num_layers = len(module.layers)


def _stacks(model: nn.Module) -> Iterator[list[str]]:
    """The paths of blocks that follow one another and are alike, of two or more."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for _, run in groupby(module.named_children(), key=lambda named: _form(named[1])):
                paths = [f"{path}.{name}" if path else name for name, _ in run]
                if len(paths) > 1 and any(True for _ in model.get_submodule(paths[0]).parameters()):
                    yield paths


def _form(block: nn.Module) -> tuple[Any, ...]:
    return type(block), tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def _parts(model: nn.Module, path: str, branches: Sequence[Branch]) -> Iterator[tuple[str, BranchPart]]:
    """Where in its branch each parameter of a block is."""
    own = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()]
    inside = [branch for branch in branches if branch.inside & set(own)]
    for branch in inside:
        if not branch.last:
            raise ShrinkError(
                f"{branch.where}: a branch of '{path}' does not end in a Linear or convolution, so that it cannot be "
                "multiplied there; allowed: depth=1, or a last layer with nothing but dropout behind it"
            )
        for name in branch.last:
            owner = model.get_submodule(name.rpartition(".")[0])
            if not (isinstance(owner, _LAST) or is_conv1d(owner)):
                raise ShrinkError(
                    f"{branch.where}: a branch of '{path}' ends in {type(owner).__name__} ('{name}'), which undoes a "
                    "factor or has no rule of depth; allowed: depth=1, or a Linear or convolution as its last layer"
                )
    last = frozenset().union(*(branch.last for branch in inside))
    all_inside = frozenset().union(*(branch.inside for branch in inside))
    for name in own:
        if name not in all_inside:
            raise ShrinkError(
                f"parameter '{name}' is in no residual branch of its block, as in post-norm blocks; allowed: depth=1, "
                "or pre-norm blocks, x + layer(norm(x))"
            )
        yield name, "last" if name in last else "inner"
