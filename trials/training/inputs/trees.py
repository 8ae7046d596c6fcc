"""Batches as trees: tensors and plain values in nested containers."""

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trials.fusion.errors import FuseError
from trials.pinned_memory import in_pinned_memory

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


def as_plain(tree: Any, source: str) -> Any:
    """Return `tree` with its mappings as dicts, such as the batches of a tokenizer of Hugging Face.

    Raises:
        FuseError: it has something that is neither a tensor nor a plain value. `source` gave it.
    """
    return tree if isinstance(tree, Tensor) else tree_map(partial(_as_plain, source), tree)


def _as_plain(source: str, leaf: Any) -> Any:
    if isinstance(leaf, (Tensor, *_PLAIN)):
        return leaf
    if isinstance(leaf, Mapping):
        return as_plain(dict(leaf), source)
    raise FuseError(
        f"{source} gave a batch with a {type(leaf).__name__}; allowed: tensors and plain values, in dicts, tuples "
        "and lists"
    )


def is_tuple_of_tensors(tree: Any) -> bool:
    """Whether `tree` is what most batches are: then there is no need to flatten it, which takes longer than a copy."""
    return type(tree) is tuple and all(isinstance(each, Tensor) for each in tree)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree`."""
    if isinstance(tree, Tensor):
        return [tree]
    leaves = tree if is_tuple_of_tensors(tree) else tree_flatten(tree)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` with its tensors changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if is_tuple_of_tensors(tree):
        return tuple(map(change, tree))
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def copied(tree: Any) -> Any:
    """Return `tree` with copies of its tensors."""
    return mapped(Tensor.clone, tree)


def row_of(tree: Any, row: int) -> Any:
    """Return what the trial in `row` has of `tree`, whose tensors all have the leading axis K."""
    return mapped(lambda tensor: tensor[row], tree)


def all_pinned(tree: Any) -> Any:
    """Return `tree` with its tensors in pinned memory, but for those on a device."""
    return mapped(lambda tensor: in_pinned_memory(tensor) if tensor.device.type == "cpu" else tensor, tree)


def form(tree: Any) -> Hashable:
    """Return a key that is equal for trees that differ only in the numbers in their tensors.

    The order of a dict's keys counts, because code may read it.
    """
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    leaves, spec = tree_flatten(tree)
    return spec, tuple(_form(leaf) for leaf in leaves)


def _form(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    # NaN equals itself here, and 0.0 is not -0.0; 1 is neither True nor 1.0
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf


def stacked(trees: Sequence[Any]) -> Any:
    """Return one tree from one for each trial, all of one form. Its tensors have the leading axis K."""
    if isinstance(trees[0], Tensor):
        return _stack(trees)
    leaves_K = [tree_flatten(tree)[0] for tree in trees]
    leaves = [_stack(own) if isinstance(own[0], Tensor) else own[0] for own in zip(*leaves_K, strict=True)]
    return tree_unflatten(leaves, tree_flatten(trees[0])[1])


def _stack(given: Sequence[Tensor]) -> Tensor:
    made = torch.stack(tuple(given))
    return in_pinned_memory(made) if given[0].is_pinned() else made


def examples(inputs: Any, targets: Any, per_trial: bool = False) -> int:
    """Return how many examples a batch has: the length of its first tensor that has an axis for them.

    Raises:
        FuseError: it has none.
    """
    axis = int(per_trial)
    for tensor in tensors((inputs, targets)):
        if tensor.ndim > axis:
            return tensor.shape[axis]
    raise FuseError("a batch has no tensor with an axis for its examples; allowed: at least one")
