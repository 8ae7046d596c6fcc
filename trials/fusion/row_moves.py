"""Rows of stacked tensors ``[K, *shape]`` leave, part and join, one tensor after another, each giving its memory back.

So a group that changes needs memory for the rows of one tensor beside its own, never for a second copy of itself. What
is given back is zero wherever it is held, as in layers: let them take the new tensors before they are used again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def taken(tensor_K: Tensor, rows: Sequence[int]) -> Tensor:
    """Return `rows` alone, in that order. `tensor_K` is given back."""
    found = tensor_K.detach()[list(rows)]
    give_back(tensor_K)
    return found


def joined(tensor_K: Tensor, more_K: Tensor) -> Tensor:
    """Return the rows of both. Both are given back."""
    found = torch.cat([tensor_K.detach(), more_K.detach()])
    for tensor in (tensor_K, more_K):
        give_back(tensor)
    return found


def parted(tensor_K: Tensor, stay: Sequence[int], leave: Sequence[int], most_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the rows that `stay` and those that `leave`, which are all. `tensor_K` is given back.

    If it has more than `most_bytes`, both lie in its memory still, which is free once neither needs it.
    """
    rows_K = tensor_K.detach()
    if tensor_K.nbytes <= most_bytes:
        found = rows_K[list(stay)], rows_K[list(leave)]
        give_back(tensor_K)
        return found
    _sort(rows_K, [*stay, *leave])
    return rows_K[: len(stay)], rows_K[len(stay) :]


def give_back(tensor: Tensor) -> None:
    """Make a tensor that is not used any more one zero in its old shape, whoever holds it, so that its memory is free.

    The memory stays while another tensor lies in it: to free it all the same would end the process at the next read.
    """
    tensor.data = tensor.new_zeros(()).expand(tensor.shape)


def _sort(tensor_K: Tensor, order: Sequence[int]) -> None:
    """Put row ``order[i]`` where row i is, in place, with room for one row."""
    begun: set[int] = set()
    for first in range(len(order)):
        if first in begun or order[first] == first:
            continue
        spare, row = tensor_K[first].clone(), first
        while order[row] != first:
            begun.add(row)
            tensor_K[row] = tensor_K[order[row]]
            row = order[row]
        begun.add(row)
        tensor_K[row] = spare
