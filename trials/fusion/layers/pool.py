"""Pooling of random regions, and max unpooling. All other pooling is in `per_example`."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.layers.per_example import fold, ranks
from trials.fusion.registry import JointLayer, Layer, lift, rule
from trials.fusion.rows import Rows

_UNPOOLED = ranks("MaxUnpool")
_FRACTIONAL = ranks("FractionalMaxPool", axes=(2, 3))


@rule(*_UNPOOLED)
class FusedMaxUnpool(JointLayer):
    """Max unpooling of K trials; indices count within an example, so K becomes part of the batch."""

    def __init__(self, module: nn.Module, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.call = copy.copy(module).forward
        self.batched_ndim = _UNPOOLED[type(module)]

    def run_joint(self, values: Sequence[Any], per_trial: Sequence[bool], training: bool) -> tuple[Tensor, bool]:
        """Values, indices and, if given, the output's size."""
        x, indices, output_size = values
        if not any(per_trial[:2]):
            return self.call(x, indices, output_size), False
        size = (x if per_trial[0] else indices).shape[0]
        x, indices = lift(x, per_trial[0], size), lift(indices, per_trial[1], size)
        if x.ndim <= self.batched_ndim:
            return self.call(x, indices, output_size), True
        return self.call(x.flatten(0, 1), indices.flatten(0, 1), output_size).unflatten(0, x.shape[:2]), True


@rule(*_FRACTIONAL)
class FusedFractionalMaxPool(Layer):
    """Fractional max pooling of K trials: each draws its regions from its own stream, in both modes."""

    is_recordable = False

    samples: Tensor | None

    def __init__(self, module: nn.FractionalMaxPool2d, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self.module = copy.deepcopy(module)  # its samples are set below
        self.batched_ndim = _FRACTIONAL[type(module)]

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.generators = rows.generators
        self.samples = rows.get(self.path, "_random_samples")

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Any, bool]:
        """``x_KBC...`` or ``x_BC...`` to ``y_KBC...``, and perhaps indices within each channel."""
        x_K = lift(x, per_trial, len(self.generators))
        single = x_K.ndim == self.batched_ndim
        samples = self.samples
        if samples is None:
            axes = self.batched_ndim - 2
            shape = (1 if single else x_K.shape[1], x_K.shape[-axes - 1], axes)
            drawn = [torch.rand(shape, generator=g, dtype=x.dtype, device=x.device) for g in self.generators]
            samples = torch.stack(drawn)
        self.module._random_samples = samples.flatten(0, 1)
        return fold(x_K, self.batched_ndim, self.module.forward), True
