"""Stochastic depth: whole examples of a residual branch are dropped (Huang et al. 2016), in the layers of libraries."""

from typing import ClassVar

from torch import Tensor, nn

from trials.fusion.layers.dropout import Masks
from trials.fusion.registry import FuseError, Layer, lift, rule_named
from trials.fusion.rows import Rows


class _DropPath(Layer):
    """Stochastic depth of K trials.

    Attributes:
        rate: the name of the attribute with the probability that an example is dropped.
        drawn_ndim: over how many leading axes, K among them, what is drawn varies.
        scales: whether examples that stay are scaled by 1 / (1 - rate).
    """

    rate: ClassVar[str]
    drawn_ndim = 2
    scales = True
    may_share = True

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`.

        Raises:
            FuseError: a rate is 1, with which these layers draw, and dropout does not.
        """
        rates_K = rows.vector(self.path, self.rate)
        if any(rate >= 1 for rate in rates_K):
            raise FuseError(f"module '{self.label}': {self.rate}={max(rates_K)}; allowed: below 1")
        self.size = rows.size
        self.masks = Masks(rates_K, rows.generators, rows.again)
        self.shares_in_some = self.masks.shares_in_some

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``[B, ...]``; in training, a shared input becomes one per trial, since what is dropped differs."""
        if not training or not self.masks.any:
            return x, per_trial
        return self.masks.drop(lift(x, per_trial, self.size), self.drawn_ndim, scales=self.scales), True


@rule_named("timm.layers.drop.DropPath")
class FusedDropPath(_DropPath):
    """`timm`'s."""

    varying = ("drop_prob",)
    rate = "drop_prob"

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.scales = bool(module.scale_by_keep)


@rule_named("torchvision.ops.stochastic_depth.StochasticDepth")
class FusedStochasticDepth(_DropPath):
    """`torchvision`'s."""

    varying = ("p",)
    rate = "p"

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.drawn_ndim = 2 if module.mode == "row" else 1
