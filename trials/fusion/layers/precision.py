"""Types under autocast, which knows PyTorch's functions, but no formula that computes the same.

A rule that computes by a formula does so in float32 where PyTorch's kernel does inside, and gives the kernel's type.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_EXAMPLES: dict[Callable[..., Tensor], tuple[Any, ...]] = {
    functional.layer_norm: ((2,),),
    functional.rms_norm: ((2,),),
    functional.group_norm: (1,),
    functional.instance_norm: (),
    functional.batch_norm: (None, None, None, None, True),
    functional.prelu: (torch.zeros(1),),
}
"""PyTorch's functions that a formula replaces -> what to call them with behind a tensor of shape [2, 2, 2]."""


def widened(x: Tensor) -> Tensor:
    """`x` in the precision in which PyTorch's kernels compute."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def type_of(function: Callable[..., Tensor], x: Tensor) -> torch.dtype:
    """The type that PyTorch's `function` gives for `x`: under autocast the function and the device decide."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype
    return _tried(function, x.dtype, device, torch.get_autocast_dtype(device))


@cache
def _tried(function: Callable[..., Tensor], given: torch.dtype, device: str, _autocast: torch.dtype) -> torch.dtype:
    """Call it under the autocast that is on now."""
    others = (other.to(device, given) if isinstance(other, Tensor) else other for other in _EXAMPLES[function])
    return function(torch.zeros(2, 2, 2, dtype=given, device=device), *others).dtype
