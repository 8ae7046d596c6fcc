"""Changes each trial's gradients before its step: undoes loss scaling, and clips; or lets a trial take no step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trials.shrinking.rules import Multipliers


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients are limited to ``±limit_K``, if given, and then multiplied by ``factor_K``, both ``[K]``.

    With ``alive_K`` (``[K]``, bool), a trial whose entry is False takes no step. So only the device need know which.
    """

    factor_K: Tensor | None = None
    limit_K: Tensor | None = None
    alive_K: Tensor | None = None

    def apply(self, gradient: Tensor) -> Tensor:
        """The changed gradient, ``[K, *shape]`` like the given one."""
        if self.limit_K is not None:
            limit = _leading(self.limit_K, gradient)
            gradient = gradient.clamp(-limit, limit)
        return gradient if self.factor_K is None else gradient * _leading(self.factor_K, gradient)

    def scaled(self, scales: Multipliers) -> "Gradients":
        """The same for a parameter with these multipliers."""
        if self.limit_K is None or scales.clip_value == 1:
            return self
        return replace(self, limit_K=self.limit_K * scales.clip_value)

    def of(self, rows: slice) -> "Gradients":
        """The same for the trials in `rows` alone."""
        return Gradients(*(None if own is None else own[rows] for own in (self.factor_K, self.limit_K, self.alive_K)))


def norms_K(gradients: Sequence[Tensor], change: Gradients, scales: Sequence[Multipliers] = ()) -> Tensor:
    """Each trial's norm over all its changed gradients (each ``[K, *shape]``), as for `clip_grad_norm_`.

    Surrogates have `scales`, one for each gradient.
    """
    if scales:
        parts = [
            torch.linalg.vector_norm(change.scaled(own).apply(_flat(g)), dim=1) * own.clip_norm
            for g, own in zip(gradients, scales, strict=True)
        ]
    else:
        parts = [torch.linalg.vector_norm(change.apply(_flat(g)), dim=1) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def overflowed_K(gradients: Sequence[Tensor]) -> Tensor:
    """Which trials have a gradient that is not finite (``[K]``, bool)."""
    flat = [_flat(g) for g in gradients if g.numel()]
    largest = torch.stack([torch.linalg.vector_norm(g, float("inf"), dim=1) for g in flat])
    return ~torch.isfinite(largest).all(0)


def _flat(gradient: Tensor) -> Tensor:
    return gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]


def _leading(vector_K: Tensor, like: Tensor) -> Tensor:
    return vector_K.to(like).view(-1, *[1] * (like.ndim - 1))
