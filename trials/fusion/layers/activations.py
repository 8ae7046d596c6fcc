"""Layers that act on each element, softmax and its kin, and PReLU.

Shapes: K trials, B examples, C channels.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.layers.memory_order import as_ordered, order_of
from trials.fusion.layers.precision import type_of
from trials.fusion.layers.shape import inner
from trials.fusion.registry import Layer, leading, lift, rule
from trials.fusion.rows import Rows


@rule(
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softsign,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Tanhshrink,
)
class FusedElementwise(Layer):
    """A layer that maps each element alone: the axis K changes nothing."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`. An in-place layer runs out of place; the tracer has checked that no code notices."""
        super().__init__(module, path)
        own: Any = copy.copy(module)
        if getattr(own, "inplace", False):
            own.inplace = False
        self.own, self.call = own, own.forward

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape to the same shape."""
        return self.call(x), per_trial


def _softplus(x: Tensor, beta: Tensor, threshold: Tensor) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.minimum(scaled, threshold).exp()) / beta)


_NUMBERS: dict[type[nn.Module], tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    nn.LeakyReLU: (("negative_slope",), lambda x, slope: torch.where(x > 0, x, x * slope)),
    nn.ELU: (("alpha",), lambda x, alpha: torch.where(x > 0, x, alpha * x.clamp(max=0).expm1())),
    nn.CELU: (("alpha",), lambda x, alpha: torch.where(x > 0, x, alpha * (x.clamp(max=0) / alpha).expm1())),
    nn.Softplus: (("beta", "threshold"), _softplus),
    nn.Hardtanh: (
        ("min_val", "max_val"),
        lambda x, low, high: torch.where((x > low) & (x < high), x, x.detach().clamp(low, high)),
    ),
    nn.Hardshrink: (("lambd",), lambda x, lambd: torch.where(x.abs() <= lambd, 0.0, x)),
    nn.Softshrink: (
        ("lambd",),
        lambda x, lambd: torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0)),
    ),
    nn.Threshold: (("threshold", "value"), lambda x, threshold, value: torch.where(x <= threshold, value, x)),
}
"""Layer type -> its numbers, and its formula on them, as PyTorch documents it."""


class FusedNumbered(FusedElementwise):
    """A layer that maps each element alone by a formula with numbers, which may differ between trials."""

    formula: Callable[..., Tensor]

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.size = rows.size
        self.vectors = [rows.vector(self.path, name) for name in self.varying]
        self.is_recordable = self.equal = all(values.count(values[0]) == len(values) for values in self.vectors)
        if self.equal:
            for name, values in zip(self.varying, self.vectors, strict=True):
                setattr(self.own, name, values[0])

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape to the same shape."""
        if self.equal:
            return self.call(x), per_trial
        x_K = lift(x, per_trial, self.size)
        return type(self).formula(x_K, *(leading(values, x_K, x_K.ndim) for values in self.vectors)), True


for _type, (_names, _formula) in _NUMBERS.items():
    rule(_type)(type(f"Fused{_type.__name__}", (FusedNumbered,), {"varying": _names, "formula": _formula}))


@rule(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)
class FusedAlongAxis(Layer):
    """A layer without parameters that works along one axis."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.call = _ALONG[type(module)]
        self.dim: int | None = -3 if isinstance(module, nn.Softmax2d) else module.dim  # type: ignore[assignment]

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape; GLU halves its axis."""
        dim = self.dim
        if dim is None:  # what PyTorch takes, with a warning
            dim = 0 if x.ndim - per_trial in (0, 1, 3) else 1
        return self.call(x, inner(dim) if per_trial else dim), per_trial


_ALONG: dict[type[nn.Module], Callable[[Tensor, int], Tensor]] = {
    nn.Softmax: torch.softmax,
    nn.Softmax2d: torch.softmax,
    nn.LogSoftmax: torch.log_softmax,
    nn.Softmin: lambda x, dim: torch.softmax(-x, dim),
    nn.GLU: functional.glu,
}


@rule(nn.PReLU)
class FusedPReLU(Layer):
    """`nn.PReLU` of K trials: each trial keeps its own slopes, one or one per channel."""

    weight_KC: Tensor

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KC = rows.require(self.path, "weight")

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KBC...`` or ``x_BC...`` to ``y_KBC...``."""
        ndim = x.ndim if per_trial else x.ndim + 1
        size, channels = self.weight_KC.shape
        # within a trial, channels are the second axis, or the only one
        shape = [size, *([1] if ndim > 2 else []), channels]
        weight = self.weight_KC.view(*shape, *[1] * (ndim - len(shape)))
        if torch.is_autocast_enabled(x.device.type):
            kind = type_of(functional.prelu, x)
            x, weight = x.to(kind), weight.to(kind)
        return torch.where(x > 0, x, weight * x), True


@rule(nn.RReLU)
class FusedRReLU(Layer):
    """`nn.RReLU` of K trials: in training, each trial draws the slopes of its negative elements from its own stream."""

    varying = ("lower", "upper")
    draws = True
    is_recordable = False

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.lower_K, self.upper_K = rows.vector(self.path, "lower"), rows.vector(self.path, "upper")
        self.generators = rows.generators

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape to the same shape."""
        x_K = lift(x, per_trial, len(self.generators))
        bounds = zip(self.lower_K, self.upper_K, strict=True)
        if not training:
            return torch.where(x_K > 0, x_K, x_K * leading([(a + b) / 2 for a, b in bounds], x_K, x_K.ndim)), True
        slope_K = torch.empty_like(x_K, memory_format=torch.contiguous_format)
        for drawn, own, (lower, upper), generator in zip(slope_K, x_K.detach(), bounds, self.generators, strict=True):
            alone = torch.ops.aten.rrelu_with_noise(own, drawn, lower, upper, True, generator)
        return as_ordered(x_K * slope_K, order_of(alone)), True
