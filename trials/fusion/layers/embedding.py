"""Embeddings.

Shapes: K trials, B examples, V entries of the table, E numbers per entry.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.registry import FuseError, Layer, call_rule, rule
from trials.fusion.rows import Rows
from trials.fusion.shared_base import only


@rule(nn.Embedding)
class FusedEmbedding(Layer):
    """`nn.Embedding` of K trials: one table of K·V rows, and each trial's indices moved to its part."""

    weight_KVE: Tensor
    offset_K: Tensor

    def __init__(self, module: nn.Embedding, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.padding, self.max_norm, self.norm_type = module.padding_idx, module.max_norm, module.norm_type
        self.by_frequency = module.scale_grad_by_freq

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KVE = rows.require(self.path, "weight")
        self.offset_K = torch.arange(rows.size, device=self.weight_KVE.device) * self.weight_KVE.shape[1]

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Indices ``x_B...`` or ``x_KB...`` to ``y_KB...E``; without the axis K if neither indices nor table have it.

        Raises:
            FuseError: an index that only some trials have lies outside the table.
        """
        # to look for such an index, or for those that occur, waits for the device
        self.is_recordable = not (per_trial or self.max_norm is not None or self.by_frequency)
        if (weight_VE := only(self.weight_KVE)) is not None:
            return functional.embedding(x, weight_VE), per_trial
        settings = self.padding, self.max_norm, self.norm_type, self.by_frequency
        return _embedded(x, per_trial, self.weight_KVE, self.offset_K, *settings, f"module '{self.path}' (Embedding)")


@call_rule(functional.embedding)
def _embedding(
    values: Sequence[Any], per_trial: Sequence[bool], generators: list[torch.Generator]
) -> tuple[Tensor, bool]:
    """`functional.embedding`, whose derivative under `vmap` takes padding for any other entry."""
    x, weight, padding, max_norm, norm_type, by_frequency, sparse = values
    if not per_trial[1]:
        return functional.embedding(*values), per_trial[0]
    if sparse or (max_norm is not None and not weight.is_contiguous()):
        raise FuseError("a call of embedding has sparse=True, or max_norm for a table that is a view; allowed: neither")
    count = weight.shape[1]
    offset_K = torch.arange(len(generators), device=weight.device) * count
    entry = padding + count if padding is not None and padding < 0 else padding
    settings = entry, max_norm, norm_type, by_frequency
    return _embedded(x, per_trial[0], weight, offset_K, *settings, "a call of embedding")


def _embedded(
    x: Tensor,
    per_trial: bool,
    weight_KVE: Tensor,
    offset_K: Tensor,
    padding: int | None,
    max_norm: float | None,
    norm_type: float,
    by_frequency: bool,
    name: str,
) -> tuple[Tensor, bool]:
    size, count, width = weight_KVE.shape
    # An index that is too large falls into the neighbour's part. If all trials share it, it is also too large
    # (or negative) for the last (or first) trial, and PyTorch reports it; otherwise it has to be looked for.
    if per_trial and bool(((x < 0) | (x >= count)).any()):
        raise FuseError(f"{name}: an index is outside 0..{count - 1}")
    offset = offset_K.view(size, *[1] * (x.ndim - 1 if per_trial else x.ndim))
    index, weight = x + offset, weight_KVE.reshape(size * count, width)
    if max_norm is not None:  # shortens the rows that are read, in place
        torch.embedding_renorm_(weight.detach(), index.contiguous(), max_norm, norm_type)
    y = functional.embedding(index, weight, scale_grad_by_freq=by_frequency)
    if padding is not None:
        # the row is read, but gets no gradient
        y = torch.where((x == padding).unsqueeze(-1), y.detach(), y)
    return y, True
