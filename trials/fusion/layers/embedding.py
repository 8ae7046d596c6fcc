"""Embeddings.

Shapes: K trials, B examples, V entries of the table, E numbers per entry.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.registry import FuseError, Layer, rule
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
        if (weight_VE := only(self.weight_KVE)) is not None:
            return functional.embedding(x, weight_VE), per_trial
        size, count, width = self.weight_KVE.shape
        # An index that is too large falls into the neighbour's part. If all trials share it, it is also too large
        # (or negative) for the last (or first) trial, and PyTorch reports it; otherwise it has to be looked for.
        if per_trial and bool(((x < 0) | (x >= count)).any()):
            raise FuseError(f"module '{self.path}' (Embedding): an index is outside 0..{count - 1}")
        offset = self.offset_K.view(size, *[1] * (x.ndim - 1 if per_trial else x.ndim))
        index, weight = x + offset, self.weight_KVE.view(size * count, width)
        if self.max_norm is not None:  # shortens the rows that are read, in place
            torch.embedding_renorm_(weight.detach(), index.contiguous(), self.max_norm, self.norm_type)
        y = functional.embedding(index, weight, scale_grad_by_freq=self.by_frequency)
        if self.padding is not None:
            # the row is read, but gets no gradient
            y = torch.where((x == self.padding).unsqueeze(-1), y.detach(), y)
        return y, True
