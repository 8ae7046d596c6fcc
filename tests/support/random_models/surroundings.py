"""Blocks with calls in other surroundings than the forward's, or with a backward of their own."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.support.random_models.blocks import block


@block("no_grad")
def no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.inner(x)
    return self.a(x) + y


@torch.no_grad()
def without_gradients(layer: nn.Module, x: Tensor) -> Any:
    return layer(x)


@block("no_grad, decorated")
def decorated(self: Any, x: Tensor) -> Tensor:
    return self.a(x).tanh() * without_gradients(self.inner, x)


@block("no_grad in a manager")
def managed(self: Any, x: Tensor) -> Tensor:
    with frozen():
        y = self.a(x)
    return self.inner(y + self.scale)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    with torch.no_grad():
        yield


@block("enable_grad in no_grad")
def enabled(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.a(x)
        with torch.enable_grad():
            z = self.inner(x)
    return y + z.tanh()


@block("set_grad_enabled")
def switched(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not self.training):
        y = self.inner(x)
    return self.a(y.tanh())


@block("set_grad_enabled, called")
def called(self: Any, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = self.inner(x)
    torch.set_grad_enabled(before)
    return self.b(y).sigmoid() + self.a(x)


@block("inference_mode")
def inferred(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = self.inner(x).tanh()
    return self.a(x) + y


@block("autocast off")
def uncast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.a(x.to(self.scale.dtype))
    return self.inner(y)


@torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator]
def lowered(layer: nn.Module, x: Tensor) -> Any:
    return layer(x)


@block("autocast on")
def cast(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) + lowered(self.a, x)


@block("hooks on saved tensors")
def hooked(self: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
        y = self.a(x).tanh()
    return self.inner(y)


@block("detach")
def detached(self: Any, x: Tensor) -> Tensor:
    return self.a(self.inner(x).detach())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Scaled(torch.autograd.Function):
    """Not the gradient of its forward; looks at what is needed, and keeps what is not an input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh(), scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y, scale = ctx.saved_tensors
        of_scale = (gradients[0] * y).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return 0.5 * gradients[0] * scale, None if of_scale is None else of_scale.to(scale.dtype)


class Halved(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -0.5 * gradients[0]


@block("straight-through")
def straight(self: Any, x: Tensor) -> Tensor:
    return self.inner(Straight.apply(self.a(x) * 5) / 5)


@block("a backward of its own")
def scaled(self: Any, x: Tensor) -> Tensor:
    return self.a(Scaled.apply(self.inner(x), self.scale))


@block("a backward for vmap")
def halved(self: Any, x: Tensor) -> Tensor:
    return self.a(Halved.apply(self.inner(x)))


@block("checkpoint")
def recomputed(self: Any, x: Tensor) -> Tensor:
    return self.a(checkpoint(lambda z: self.inner(z).tanh(), x, use_reentrant=False))


@block("derivatives")
def derived(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.a(z).tanh().sum(), z, create_graph=True)
    return self.inner(x) + gradient
