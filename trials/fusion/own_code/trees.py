"""Takes nested containers of tensors apart around a `vmap`, and stacks them after a loop."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

from trials.fusion.errors import FuseError
from trials.fusion.layers.memory_order import as_ordered, order_of

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


PLAIN_KINDS = (Tensor, nn.Parameter)
"""The classes of tensors that do nothing of their own."""


class Hidden:
    """Stands for an output that is neither a tensor nor a plain value, because each trial has its own."""

    def __init__(self, what: str) -> None:
        """`what` describes the output and its owner."""
        self._what = what

    def __getattr__(self, name: str) -> Any:
        """Refuse all but what copying and printing look for."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise FuseError(
            f"{self._what} cannot be returned for several trials at once; allowed: tensors and plain values"
        )


def know(value: Any) -> None:
    """Let PyTorch take the dataclasses in `value` apart, and make them again, as it does tuples and dicts."""
    while kinds := {type(leaf) for leaf in tree_leaves(value) if _is_plain_dataclass(leaf)}:
        for kind in kinds:
            _register(kind)


def _is_plain_dataclass(leaf: Any) -> bool:
    """Whether all that an object has is made of its fields, by the `__init__` that dataclasses get."""
    kind = type(leaf)  # isinstance would ask a value of a trace for its class
    if not dataclasses.is_dataclass(kind) or issubclass(kind, nn.Module):
        return False
    fields = dataclasses.fields(kind)
    takes = inspect.signature(kind).parameters
    return list(takes) == [field.name for field in fields] and {*getattr(leaf, "__dict__", takes)} <= {*takes}


def _register(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    register_pytree_node(
        kind,
        lambda value: ([getattr(value, name) for name in names], None),
        lambda values, _: kind(**dict(zip(names, values, strict=True))),
    )


def apart(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors in `value`, and a function that rebuilds it with others."""
    if isinstance(value, Tensor):
        return [value], _first
    leaves, spec = tree_flatten(value)
    at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def together(tensors: Sequence[Tensor]) -> Any:
        filled = list(rest)
        for index, tensor in zip(at, tensors, strict=True):
            filled[index] = tensor
        return tree_unflatten(filled, spec)

    return [leaves[index] for index in at], together


def refuse_own_kinds(value: Any) -> None:
    """Refuse tensors of a subclass: it may do other things, such as the masks of ``torch.nn.attention.bias``.

    Raises:
        FuseError: there is one.
    """
    if type(value) is Tensor:
        return
    for tensor in apart(value)[0]:
        if type(tensor) not in PLAIN_KINDS:
            raise FuseError(f"a tensor is of the class {type(tensor).__name__}, of which rules know nothing")


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def heads(output: Any) -> list[Tensor]:
    """Return the tensors of a layer's output that have a gradient, one for each node of the graph."""
    tensors = [output] if isinstance(output, Tensor) else apart(output)[0]
    return list({id(tensor.grad_fn): tensor for tensor in tensors if tensor.grad_fn is not None}.values())


def hide_objects(value: Any, owner: str) -> Any:
    """Return `value` with `Hidden` for everything that may belong to one trial alone."""
    know(value)

    def hide(leaf: Any) -> Any:
        return leaf if isinstance(leaf, (Tensor, *_PLAIN)) else Hidden(f"the {type(leaf).__name__} of {owner}")

    return tree_map(hide, value)


def dims_of(value: Any, per_trial: bool) -> Any:
    """Return a tree like `value` of `vmap` dimensions: 0 for tensors with the axis K, None for all else."""
    if isinstance(value, Tensor):
        return 0 if per_trial else None
    return tree_map(lambda leaf: 0 if per_trial and isinstance(leaf, Tensor) else None, value)


def of_row(value: Any, dims: Any, row: int) -> Any:
    """Return what one trial has of `value`, whose tensors have the axis K where `dims` says so; see `dims_of`."""
    leaves, spec = tree_flatten(value)
    owned = tree_flatten(dims)[0]
    return tree_unflatten([leaf if dim is None else leaf[row] for leaf, dim in zip(leaves, owned, strict=True)], spec)


def expand(value: Any, size: int) -> Any:
    """Return `value` with a leading axis K = `size` on its tensors, without a copy."""
    return tree_map(lambda leaf: leaf.expand(size, *leaf.shape) if isinstance(leaf, Tensor) else leaf, value)


def _stacked(tensors_K: Sequence[Tensor]) -> Tensor:
    """Stack the trials' tensors, and keep the order in which each lies in memory, for a dropout draws in it."""
    stacked_K, first = torch.stack(list(tensors_K)), tensors_K[0]
    return as_ordered(stacked_K, order_of(first)) if first.layout is torch.strided else stacked_K


def stack(values_K: Sequence[Any], owner: str) -> Any:
    """Stack the trials' values into one, whose tensors have a leading axis K.

    Raises:
        FuseError: they differ in structure, or a tensor in shape.
    """
    parts = [apart(hide_objects(value, owner)) for value in values_K]
    if len(parts) == 1:
        return parts[0][1]([tensor.unsqueeze(0) for tensor in parts[0][0]])
    specs = {tree_flatten(value)[1] for value in values_K}
    shapes = {tuple((tensor.shape, tensor.dtype) for tensor in tensors) for tensors, _ in parts}
    if len(specs) > 1 or len(shapes) > 1:
        raise FuseError(f"{owner} gives tensors of different shapes for different trials; allowed: equal ones")
    tensors = [_stacked(own) for own in zip(*(tensors for tensors, _ in parts), strict=True)]
    leaves_K = [tree_flatten(hide_objects(value, owner))[0] for value in values_K]
    plain = [leaf for leaf in zip(*leaves_K, strict=True) if not isinstance(leaf[0], (Tensor, Hidden))]
    for own in plain:
        if any(leaf != own[0] for leaf in own):
            raise FuseError(f"{owner} gives {own[0]!r} for one trial and another value for the next; allowed: tensors")
    return parts[0][1](tensors)
