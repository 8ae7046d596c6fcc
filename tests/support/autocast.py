"""Fused models under autocast beside each model alone: the same types, and errors no larger than low precision."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import close
from trials.fused import FusedModule

RATIO, ULPS = 4, 2
"""How much larger a fused error may be than one alone, both against float64, beside some units of rounding."""


def no_worse(actual: Tensor, alone: Tensor, exact: Tensor, kind: torch.dtype, what: str) -> None:
    assert actual.dtype == alone.dtype, f"{what}: {actual.dtype}, alone {alone.dtype}"
    if not actual.dtype.is_floating_point:
        return close(actual, alone, what)
    error, error_alone = ((t.detach().double() - exact.detach()).abs().max().item() for t in (actual, alone))
    # gradients of float32 weights have passed through low precision too
    eps = torch.finfo(kind if what.startswith("gradient") else actual.dtype).eps
    limit = RATIO * error_alone + ULPS * eps * exact.abs().max().item()
    assert error <= limit, f"{what}: off by {error:.1e}, alone by {error_alone:.1e}"


def assert_same_under_autocast(
    make: Callable[[int], nn.Module], x: Tensor, size: int, kind: torch.dtype = torch.bfloat16
) -> list[tuple[str, str]]:
    """Compare output, gradients and buffers of one forward and backward in training. Returns the ways of computing."""

    def run(model: nn.Module, inputs: Tensor, under_autocast: bool) -> Tensor:
        if inputs.is_floating_point():  # some layers have no weights, and some work in place
            inputs = inputs.clone().requires_grad_() * 1
        with torch.autocast("cpu", kind, enabled=under_autocast):
            y = model(inputs)
        y = y[0] if isinstance(y, tuple) else y
        y.double().sin().sum().backward()
        return y

    models = []
    for number in range(size):
        torch.manual_seed(number)
        models.append(make(number))
    alone_K, exact_K = ([copy.deepcopy(model) for model in models] for _ in range(2))
    fused = FusedModule(models, [torch.Generator().manual_seed(number) for number in range(size)])
    y_K = run(fused, x, under_autocast=True)
    for row, (alone, exact) in enumerate(zip(alone_K, exact_K, strict=True)):
        torch.manual_seed(row)
        y = run(alone, x, under_autocast=True)
        torch.manual_seed(row)
        y_exact = run(exact.double(), x.double() if x.is_floating_point() else x, under_autocast=False)
        no_worse(y_K[row], y, y_exact, kind, f"row {row}: output")
        for name, parameter in alone.named_parameters():
            own, right = fused.get_parameter(f"trials.{name}").grad, exact.get_parameter(name).grad
            if parameter.grad is None or right is None:
                assert own is None
                continue
            assert own is not None
            no_worse(own[row], parameter.grad, right, kind, f"gradient in row {row}: {name}")
        for name, buffer in alone.named_buffers():
            own_K: Any = fused.get_buffer(f"trials.{name}")
            no_worse(own_K[row], buffer, exact.get_buffer(name), kind, f"row {row}: {name}")
    return fused.ways()
