"""Fully connected layers, of one input and of two."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.registry import JointLayer, Layer, rule
from trials.fusion.rows import Rows


@rule(nn.Linear)
class FusedLinear(Layer):
    """`nn.Linear` of K trials: one batched product, or one large product if the trials share the input."""

    weight_KOI: Tensor
    bias_KO: Tensor | None

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KOI = rows.require(self.path, "weight")
        self.bias_KO = rows.get(self.path, "bias")

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KB...I`` or ``x_B...I`` to ``y_KB...O``."""
        return (own if per_trial else shared)(x, self.weight_KOI, self.bias_KO), True


def own(x: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None) -> Tensor:
    """``x_K...I`` to ``y_K...O``."""
    size, out = weight_KOI.shape[:2]
    if size == 1:
        return _one(x, weight_KOI, bias_KO)
    x_KNI = x if x.ndim == 3 else x.reshape(size, -1, x.shape[-1])
    weight_KIO = weight_KOI.transpose(1, 2)
    y_KNO = torch.bmm(x_KNI, weight_KIO) if bias_KO is None else torch.baddbmm(bias_KO.unsqueeze(1), x_KNI, weight_KIO)
    return y_KNO if x.ndim == 3 else y_KNO.view(*x.shape[:-1], out)


def shared(x: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None) -> Tensor:
    """``x_...I``, the same for all trials, to ``y_K...O``."""
    size, out, width = weight_KOI.shape
    if size == 1:
        return _one(x, weight_KOI, bias_KO).unsqueeze(0)
    x_NI = x if x.ndim == 2 else x.reshape(-1, width)
    weight_IM = weight_KOI.reshape(size * out, width).t()  # M = K·O: one product, and no K copies of the input
    y_NM = torch.mm(x_NI, weight_IM) if bias_KO is None else torch.addmm(bias_KO.reshape(-1), x_NI, weight_IM)
    y_KNO = y_NM.view(-1, size, out).transpose(0, 1)
    return y_KNO if x.ndim == 2 else y_KNO.reshape(size, *x.shape[:-1], out)


def _one(x: Tensor, weight_1OI: Tensor, bias_1O: Tensor | None) -> Tensor:
    """One trial's ``x_...I`` to ``y_...O``."""
    bias = None if bias_1O is None else bias_1O.squeeze(0)
    return functional.linear(x, weight_1OI.squeeze(0), bias)


@rule(nn.Bilinear)
class FusedBilinear(JointLayer):
    """`nn.Bilinear` of K trials."""

    weight_KOIJ: Tensor
    bias_KO: Tensor | None

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KOIJ = rows.require(self.path, "weight")
        self.bias_KO = rows.get(self.path, "bias")

    def run_joint(self, values: Sequence[Tensor], per_trial: Sequence[bool], training: bool) -> tuple[Tensor, bool]:
        """``[K]B...I`` and ``[K]B...J`` to ``y_KB...O``."""
        left, right = ("k...", "...")[not per_trial[0]], ("k...", "...")[not per_trial[1]]
        y = torch.einsum(f"{left}i,koij,{right}j->k...o", values[0], self.weight_KOIJ, values[1])
        if self.bias_KO is None:
            return y, True
        size, out = self.bias_KO.shape
        return y + self.bias_KO.view(size, *[1] * (y.ndim - 2), out), True
