"""Whether a fused trial's step and the trial's step alone differ by more than rounding explains.

The bound is the model's own sensitivity, tensor by tensor: how much the trial alone changes when its input and its
parameters change by one rounding. Some models are chaotic there, and some gradients are zero but for rounding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from trials.training.audits.record import (
    BACK,
    GRADIENT,
    LAYER,
    LOSS,
    OUTPUT,
    SCALE,
    SCORE,
    SETTING,
    STATE,
    UPDATE,
    Key,
    Record,
)

SENSITIVITY = 32.0
"""A kernel rounds in each of its sums, where the nudged step rounds its operands once: of a sum of n terms of one size
that is up to sqrt(n) as much. Sums are blocked, and 32 is a thousand terms in a row."""

SENSITIVITY_16 = 4.0
"""The same where sums are finer than what is stored: of 16 bits, only the result is rounded, as in the nudged step."""

STORED, SUMMED = 4.0, 256.0
"""Roundings of a result as it is stored, and of the sums that led to it, in units of its own size. The second covers
sums of terms of one sign, to which nudges that cancel are blind. Types of 16 bits are summed in float32."""

SCALARS = 1e-10
"""Of an update: the numbers that optimizers compute in float64 cancel. RAdam's rectification loses six digits."""

TF32_EPS = 2.0**-10


@dataclass(frozen=True, slots=True)
class Precision:
    """The relative size of one rounding: of the model's arithmetic, and of its sums."""

    eps: float
    sum_eps: float

    @property
    def sensitivity(self) -> float:
        """How much of what nudges change is allowed."""
        return SENSITIVITY if self.sum_eps >= self.eps else SENSITIVITY_16

    @classmethod
    def of(cls, tensors: Iterable[Tensor], autocast: torch.dtype | None) -> "Precision":
        """That of a model of these tensors; the coarsest of them counts."""
        found = [autocast] if autocast is not None else []
        eps = [torch.finfo(t.dtype).eps for t in tensors if is_continuous(t)] or [torch.finfo(torch.float32).eps]
        eps += [torch.finfo(kind).eps for kind in found]
        if any(t.is_cuda for t in tensors) and (
            torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        ):
            eps.append(TF32_EPS)
        return cls(max(eps), min(max(eps), torch.finfo(torch.float32).eps))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor or number of both steps.

    Attributes:
        key: which.
        difference: the root mean square over its elements; infinite if it cannot be had of both.
        bound: what rounding explains.
        text: why there is no difference to compute; empty: there is.
    """

    key: Key
    difference: float
    bound: float
    text: str = ""

    @property
    def equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.bound


def is_continuous(tensor: Tensor) -> bool:
    """Whether its numbers are rounded."""
    return tensor.is_floating_point() or tensor.is_complex()


def compare(fused: Record, lone: Record, nudged: Sequence[Record], precision: Precision) -> list[Comparison]:
    """Compare all that both steps made, in the order of the step.

    Args:
        fused: of the trial among others.
        lone: of the trial alone.
        nudged: the same, with input and parameters changed by one rounding.
        precision: of the model.
    """
    keys = dict.fromkeys(lone.values)
    if lone.ended:  # and the rest is undone, or noise
        keys = dict.fromkeys(key for key in keys if key.kind in (LAYER, OUTPUT, LOSS))
    else:
        keys.update(dict.fromkeys(key for key in fused.values if key.kind not in (LAYER, BACK)))
    found: list[Comparison] = []
    for key in keys:
        ours, theirs = fused.values.get(key), lone.values.get(key)
        if key.kind in (LAYER, BACK) and (ours is None or theirs is None):
            continue  # one of them computes it within another layer
        if ours is None and theirs is None:
            continue
        if key.kind == GRADIENT:  # none and zeros differ in what the optimizer does, which is compared below
            ours, theirs = _or_zeros(ours, theirs), _or_zeros(theirs, ours)
        text = _unlike(key, ours, theirs)
        if text:
            found.append(Comparison(key, inf, 0.0, text))
            continue
        one, other = _numbers(ours), _numbers(theirs)
        if one is None or other is None:
            continue
        if lone.ended and not one.isfinite().all() and not other.isfinite().all():
            continue  # kernels differ in how far they spread what is not finite
        moved = [_apart(other, value) for record in nudged if (value := _numbers(record.values.get(key))) is not None]
        bound = precision.sensitivity * max(moved, default=0.0) + _rounding(key, theirs, lone.sizes.get(key), precision)
        found.append(Comparison(key, _apart(one, other), bound))
    return found


def _or_zeros(value: Any, like: Any) -> Any:
    return torch.zeros_like(like) if value is None else value


def _unlike(key: Key, ours: Any, theirs: Any) -> str:
    """Return how two values differ other than in numbers."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if ours.shape != theirs.shape and key.kind not in (LOSS, SCORE):
            return f"has shape {list(ours.shape)}, alone {list(theirs.shape)}"
        if ours.dtype != theirs.dtype and key.kind not in (LOSS, SCORE):
            return f"is {_short(ours.dtype)}, alone {_short(theirs.dtype)}"
        return ""
    if _numbers(ours) is not None and _numbers(theirs) is not None:
        return ""
    return "" if type(ours) is type(theirs) and ours == theirs else f"is {_shown(ours)}, alone {_shown(theirs)}"


def _numbers(value: Any) -> Tensor | None:
    """Return a value's numbers, in float64."""
    if isinstance(value, Tensor):
        return torch.view_as_real(value).double() if value.is_complex() else value.double()
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    return None


def _apart(one: Tensor, other: Tensor) -> float:
    """The size of the difference; what is not finite equals what is not finite."""
    return _rms(torch.where((one == other) | ~(one.isfinite() | other.isfinite()), 0.0, one - other))


def _rms(difference: Tensor) -> float:
    """The root mean square; infinite if some element is not finite."""
    if not difference.numel():
        return 0.0
    largest = float(difference.abs().max())
    if not largest < inf:
        return inf
    return largest and largest * float((difference / largest).square().mean().sqrt())


def _rounding(key: Key, value: Any, size: Tensor | None, precision: Precision) -> float:
    """Return what rounding the value itself, and the sums that made it, explains."""
    numbers = _numbers(value)
    if numbers is None or not numbers.isfinite().any():
        return 0.0
    numbers = numbers[numbers.isfinite()]
    if isinstance(value, Tensor) and not is_continuous(value):
        return 0.0
    if key.kind in (STATE, SETTING, SCALE) and numbers.numel() == 1 and float(numbers).is_integer():
        return 0.0  # it counts something
    size_of = _rms(numbers)
    scalars = SCALARS * size_of if key.kind == UPDATE else 0.0
    own = torch.finfo(value.dtype).eps if isinstance(value, Tensor) else 0.0
    eps = max(own, precision.eps)
    before = None if size is None or not is_continuous(size) else _numbers(size)
    stored = 0.0 if size is None or before is None else torch.finfo(size.dtype).eps * _rms(before)
    return size_of * (STORED * eps + SUMMED * min(eps, precision.sum_eps)) + STORED * stored + scalars


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "absent" if value is None else repr(value)
