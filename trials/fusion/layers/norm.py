"""Normalization layers.

Shapes: K trials, B examples, C channels, D features.
"""

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.layers.memory_order import as_ordered, kept_order
from trials.fusion.layers.precision import type_of, widened
from trials.fusion.registry import FuseError, Layer, leading, lift, rule
from trials.fusion.rows import Rows
from trials.fusion.shared_base import only


class _Affine(Layer):
    """Shared by the rules here: a scale and a shift per trial, both optional."""

    varying: ClassVar[tuple[str, ...]] = ("eps",)
    function: ClassVar[Callable[..., Tensor]]
    """PyTorch's own, whose type the result has under autocast."""
    weight_K: Tensor | None
    bias_K: Tensor | None
    size: int
    eps_K: list[float]
    eps: float | None  # that of all trials, or None if they differ

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_K = rows.get(self.path, "weight")
        self.bias_K = rows.get(self.path, "bias")
        self.size = rows.size
        self.eps_K = rows.vector(self.path, "eps")
        self.eps = same(self.eps_K)
        self.is_recordable = all(_are_same(rows.vector(self.path, name)) for name in self.varying)

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Any shape to the same: by a formula, rounded once at the end, as in PyTorch's kernel."""
        y, per_trial = self.formula(widened(x), per_trial, training)
        return y.to(type_of(type(self).function, x)), per_trial

    @abc.abstractmethod
    def formula(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """Like `run`, for `x` of at least float32."""

    def affine(self, xhat: Tensor, shape: list[int], per_trial: bool) -> tuple[Tensor, bool]:
        """Scale and shift; `shape` is that of the weights with the axes that they broadcast over."""
        if self.weight_K is None:
            return xhat, per_trial
        weight, bias = only(self.weight_K), only(self.bias_K)
        if weight is not None and (bias is not None or self.bias_K is None):
            shape = [1, *shape[1:]]
            y = xhat * weight.view(shape) if bias is None else torch.addcmul(bias.view(shape), xhat, weight.view(shape))
            return y if per_trial else y.squeeze(0), per_trial
        if self.bias_K is None:
            return xhat * self.weight_K.view(shape), True
        return torch.addcmul(self.bias_K.view(shape), xhat, self.weight_K.view(shape)), True

    def over_last(self, x: Tensor, per_trial: bool, shape: Sequence[int]) -> list[int]:
        """The weights' shape where they lie over the last axes of `x`."""
        return [self.size, *[1] * (x.ndim - per_trial - len(shape)), *shape]


def same(values: list[float]) -> float | None:
    """The one value of all trials, or None if they differ."""
    return values[0] if _are_same(values) else None


def _are_same(values: list[float]) -> bool:
    return values.count(values[0]) == len(values)


def standardise(x: Tensor, axes: tuple[int, ...], eps_K: list[float]) -> Tensor:
    """``x_K...`` minus its mean over `axes`, divided by its deviation; every trial has its own `eps`."""
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + leading(eps_K, x, x.ndim))


@rule(nn.LayerNorm)
class FusedLayerNorm(_Affine):
    """`nn.LayerNorm` of K trials."""

    function = functional.layer_norm

    def __init__(self, module: nn.LayerNorm, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.shape = tuple(module.normalized_shape)

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KB...D`` or ``x_B...D`` to the same; statistics over the last axes."""
        if self.size > 1:
            weight, bias = only(self.weight_K), only(self.bias_K)
            if self.eps is not None and weight is not None and (bias is not None or self.bias_K is None):
                return functional.layer_norm(x, self.shape, weight, bias, self.eps), per_trial
            return super().run(x, per_trial, training)
        weight, bias = (None if t is None else t.squeeze(0) for t in (self.weight_K, self.bias_K))
        y = functional.layer_norm(x, self.shape, weight, bias, self.eps_K[0])
        return (y if per_trial else y.unsqueeze(0)), True

    def formula(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """See `_Affine`."""
        if self.eps is not None:
            xhat = functional.layer_norm(x, self.shape, eps=self.eps)
        else:
            x, per_trial = lift(x, per_trial, self.size), True
            xhat = standardise(x, tuple(range(-len(self.shape), 0)), self.eps_K)
        return self.affine(xhat, self.over_last(x, per_trial, self.shape), per_trial)


@rule(nn.RMSNorm)
class FusedRMSNorm(_Affine):
    """`nn.RMSNorm` of K trials."""

    function = functional.rms_norm

    def __init__(self, module: nn.RMSNorm, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.shape = tuple(module.normalized_shape)
        self.default_eps = module.eps is None

    def formula(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KB...D`` or ``x_B...D`` to the same; mean square over the last axes."""
        if self.eps is not None or self.default_eps:
            xhat = functional.rms_norm(x, self.shape, eps=self.eps)
        else:
            x, per_trial = lift(x, per_trial, self.size), True
            square = x.square().mean(tuple(range(-len(self.shape), 0)), keepdim=True)
            xhat = x * torch.rsqrt(square + leading(self.eps_K, x, x.ndim))
        return self.affine(xhat, self.over_last(x, per_trial, self.shape), per_trial)


@rule(nn.GroupNorm)
class FusedGroupNorm(_Affine):
    """`nn.GroupNorm` of K trials: statistics are per example, so K becomes part of the batch."""

    function = functional.group_norm

    def __init__(self, module: nn.GroupNorm, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.groups, self.channels = module.num_groups, module.num_channels

    def formula(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KBC...`` or ``x_BC...`` to the same."""
        if self.eps is not None:
            flat = x.flatten(0, 1) if per_trial else x
            xhat = functional.group_norm(flat, self.groups, eps=self.eps).view(x.shape)
        else:
            x, per_trial = lift(x, per_trial, self.size), True
            x_KBGN = x.unflatten(2, (self.groups, -1)).flatten(3)
            xhat = standardise(x_KBGN, (3,), self.eps_K).reshape(x.shape)
        spatial = [1] * (x.ndim - 2 - per_trial)
        return self.affine(xhat, [self.size, 1, self.channels, *spatial], per_trial)


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class FusedBatchNorm(_Affine):
    """Batch normalisation of K trials: the trials' channels side by side, K·C of them.

    `momentum` and `eps` may differ between trials; then the statistics are computed here, by the same formulas.
    """

    varying = ("eps", "momentum")
    function = functional.batch_norm
    mean_KC: Tensor | None
    var_KC: Tensor | None
    count_K: Tensor | None

    def __init__(self, module: nn.BatchNorm1d, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.axes = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}[type(module)]
        self.channels = module.num_features
        self.cumulative = module.momentum is None

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        super().bind(rows)
        self.mean_KC = rows.get(self.path, "running_mean")
        self.var_KC = rows.get(self.path, "running_var")
        self.count_K = rows.get(self.path, "num_batches_tracked")
        self.momentum_K = rows.vector(self.path, "momentum")
        self.momentum = same(self.momentum_K)

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KBC...`` or ``x_BC...`` to ``y_KBC...``."""
        if x.ndim - per_trial not in self.axes:
            shape = list(x.shape[1:] if per_trial else x.shape)
            raise FuseError(f"module '{self.label}': input of shape {shape}; allowed: {self.axes} axes")
        x = lift(x, per_trial, self.size)
        order = kept_order(x[0])
        if training and self.count_K is not None:
            self.count_K.add_(1)
        # the cumulative mean (momentum None) differs between trials that started at different times
        if self.eps is None or self.momentum is None:
            y, own = super().run(x, True, training)
        else:
            y, own = self._parted(self._plain(self._folded(x), training, self.momentum, self.eps)), True
        return as_ordered(y, order), own

    def formula(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """See `_Affine`."""
        xhat = self._parted(self._varied(self._folded(x), training))
        return self.affine(xhat, [self.size, 1, self.channels, *[1] * (x.ndim - 3)], True)

    def _folded(self, x_KBC: Tensor) -> Tensor:
        return x_KBC.transpose(0, 1).flatten(1, 2)

    def _parted(self, x_BM: Tensor) -> Tensor:
        return x_BM.unflatten(1, (self.size, self.channels)).transpose(0, 1)

    def _plain(self, x_BM: Tensor, training: bool, momentum: float, eps: float) -> Tensor:
        """M = K·C channels, scale and shift included."""
        return functional.batch_norm(
            x_BM,
            _flat(self.mean_KC),
            _flat(self.var_KC),
            None if self.weight_K is None else self.weight_K.reshape(-1),
            None if self.bias_K is None else self.bias_K.reshape(-1),
            training or self.mean_KC is None,
            momentum,
            eps,
        )

    def _varied(self, x_BM: Tensor, training: bool) -> Tensor:
        """M = K·C channels; `eps`, or the weight of the new statistics, differs between trials."""
        shape = (1, -1, *[1] * (x_BM.ndim - 2))
        eps_KC = leading(self.eps_K, x_BM, 2).expand(self.size, self.channels)
        if training or self.mean_KC is None:
            axes = (0, *range(2, x_BM.ndim))
            count = x_BM.numel() // x_BM.shape[1]
            if count < 2:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {x_BM.shape}")
            var_M, mean_M = torch.var_mean(x_BM, axes, correction=0)
            if training and self.mean_KC is not None and self.var_KC is not None:
                weight_K = self._weight_of_new(x_BM)
                self.mean_KC.lerp_(mean_M.detach().view(self.size, -1), weight_K)
                self.var_KC.lerp_(var_M.detach().view(self.size, -1) * (count / (count - 1)), weight_K)
        else:
            assert self.var_KC is not None  # comes with mean_KC
            mean_M, var_M = self.mean_KC.view(-1), self.var_KC.view(-1)
        scale_M = torch.rsqrt(var_M + eps_KC.reshape(-1))
        return (x_BM - mean_M.view(shape)) * scale_M.view(shape)

    def _weight_of_new(self, like: Tensor) -> Tensor:
        if self.cumulative and self.count_K is not None:
            return self.count_K.to(like.dtype).reciprocal().view(-1, 1)
        return leading(self.momentum_K, like, 2)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class FusedInstanceNorm(_Affine):
    """Instance normalisation of K trials.

    Statistics are per example, so K becomes part of the batch.
    """

    varying = ("eps", "momentum")
    function = functional.instance_norm
    mean_KC: Tensor | None
    var_KC: Tensor | None

    def __init__(self, module: nn.InstanceNorm1d, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.axes = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}[type(module)]
        self.channels = module.num_features

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        super().bind(rows)
        self.mean_KC = rows.get(self.path, "running_mean")
        self.var_KC = rows.get(self.path, "running_var")
        self.momentum_K = [momentum or 0.0 for momentum in rows.vector(self.path, "momentum")]

    def formula(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KBC...`` or ``x_BC...`` (or a single example) to the same."""
        ndim = x.ndim - per_trial
        if ndim == self.axes + 1:
            y, per_trial = self.formula(x.unsqueeze(int(per_trial)), per_trial, training)
            return y.squeeze(int(per_trial)), per_trial
        if ndim != self.axes + 2:
            shape = list(x.shape[1:] if per_trial else x.shape)
            raise FuseError(f"module '{self.label}': input of shape {shape}; allowed: {self.axes} axes and channels")
        spatial = tuple(range(-self.axes, 0))
        if self.mean_KC is not None and self.var_KC is not None:
            x, per_trial = lift(x, per_trial, self.size), True
            xhat = self._tracked(x, spatial, training, self.mean_KC, self.var_KC)
        elif self.eps is not None:
            xhat = functional.instance_norm(x.flatten(0, 1) if per_trial else x, eps=self.eps).view(x.shape)
        else:
            x, per_trial = lift(x, per_trial, self.size), True
            xhat = standardise(x, spatial, self.eps_K)
        return self.affine(xhat, [self.size, 1, self.channels, *[1] * self.axes], per_trial)

    def _tracked(
        self, x_K: Tensor, spatial: tuple[int, ...], training: bool, mean_KC: Tensor, var_KC: Tensor
    ) -> Tensor:
        """Running statistics are the mean over the batch of each example's own."""
        if not training:
            shape = (self.size, 1, self.channels, *[1] * self.axes)
            return (x_K - mean_KC.view(shape)) * torch.rsqrt(var_KC.view(shape) + leading(self.eps_K, x_K, x_K.ndim))
        count = x_K[0, 0, 0].numel()
        if count < 2:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {x_K.shape[1:]}")
        var, mean = torch.var_mean(x_K, spatial, correction=0, keepdim=True)
        weight_K = leading(self.momentum_K, mean_KC, 2)
        mean_KC.lerp_(mean.detach().flatten(2).mean(1), weight_K)
        var_KC.lerp_(var.detach().flatten(2).mean(1) * (count / (count - 1)), weight_K)
        return (x_K - mean) * torch.rsqrt(var + leading(self.eps_K, x_K, x_K.ndim))


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.view(-1)
