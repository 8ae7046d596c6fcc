"""What the batches of an epoch have been so far, so that a trial that resumes in its middle recognizes them."""

import hashlib
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trials.training.inputs.trees import is_tuple_of_tensors

NUMBERS = 64
"""So many numbers of each tensor are compared, at places that look random: all of them might take as long as a step."""

_FAR = 2654435761
"""A prime: its multiples are spread evenly over any length."""


class BatchesSeen:
    """The batches that were read of an epoch, one after another; `in_full`: by all of their numbers."""

    def __init__(self, in_full: bool = False) -> None:
        self._hash, self._most = hashlib.blake2b(digest_size=16), None if in_full else NUMBERS
        self._is_known = True

    def add(self, batch: Any) -> None:
        """Add the next one. Of tensors on a device nothing is known: to read them would make the host wait for it."""
        for leaf in batch if is_tuple_of_tensors(batch) else tree_flatten(batch)[0]:
            if not isinstance(leaf, Tensor):
                self._hash.update(repr(leaf).encode())
            elif not leaf.is_cpu or leaf.layout is not torch.strided:
                self._is_known = False
            else:
                self._hash.update(_form(leaf.dtype, leaf.shape) + _chosen(leaf, self._most))

    @property
    def mark(self) -> str:
        """A text that is the same for the same batches, in all processes; empty: it is not known what they are."""
        return self._hash.hexdigest() if self._is_known else ""


@lru_cache(maxsize=256)
def _form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{[*shape]}".encode()


def _chosen(tensor: Tensor, most: int | None) -> bytes:
    count = tensor.numel()
    if not count:
        return b""
    flat: NDArray[Any]
    try:
        flat = tensor.numpy().reshape(-1)
    except (TypeError, RuntimeError):  # NumPy lacks that type, or it is the conjugate of another
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((count,), (1,)).view(torch.uint8).numpy().reshape(count, -1)  # one may have any stride
    return (flat if most is None or count <= most else flat[_places(count)]).tobytes()


@cache
def _places(length: int) -> NDArray[np.int64]:
    return np.arange(NUMBERS) * _FAR % length
