"""Blocks with functions: whose result depends on autocast, that work in place, or that are compiled."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.random_models.blocks import block


@block("float32")
def in_float32(self: Any, x: Tensor) -> Tensor:
    return self.inner(x.to(self.scale.dtype))


@block("layer norm")
def normed(self: Any, x: Tensor) -> Tensor:
    return functional.layer_norm(self.inner(self.a(x)), x.shape[-1:], self.scale) + self.b(x)


@block("softmax in float32")
def softened(self: Any, x: Tensor) -> Tensor:
    return self.inner(functional.softmax(self.a(x), -1, dtype=self.scale.dtype)) * 3


@block("types that mix")
def mixed(self: Any, x: Tensor) -> Tensor:
    return self.a(x) * self.scale + self.inner(x) * self.scale.mean()


@block("normalize")
def normalized(self: Any, x: Tensor) -> Tensor:
    return self.inner(functional.normalize(self.a(x), dim=-1)) * 2


@block("in place")
def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y.add_(1)
    y *= 0.5
    return self.inner(functional.relu(y, inplace=True))


@block("an alias")
def aliased(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) + 0.5
    alias = y
    y *= self.inner(x)
    return alias + y


@block("a part in place")
def partly(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x).clone()
    y[..., 0] = 0.5 * y[..., -1] + 1
    return self.a(y)


@block("its input in place", refused=False)
def of_input(self: Any, x: Tensor) -> Tensor:
    y = x + 0.0
    y.mul_(self.scale.to(y.dtype)).sub_(0.1)
    return self.inner(y)


@torch.jit.script
def scripted(x: Tensor, scale: float) -> Tensor:
    if x.ndim > 9:
        return x
    return x.tanh() * scale


@block("a scripted function")
def by_script(self: Any, x: Tensor) -> Tensor:
    return self.inner(scripted(self.a(x), 1.5))


@torch.jit.script
def scripted_branch(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x - 1


@block("a scripted branch")
def by_scripted_branch(self: Any, x: Tensor) -> Tensor:
    return self.a(scripted_branch(self.inner(x)))


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else x - 1


compiled = torch.compile(branching, backend="eager", dynamic=True)
compiled_smoothly = torch.compile(lambda x, y: x.tanh() + y * 2, backend="aot_eager", dynamic=True)


@block("a compiled branch")
def by_compiled(self: Any, x: Tensor) -> Tensor:
    return self.inner(compiled(self.a(x)))


@block("a compiled function")
def by_compiled_smoothly(self: Any, x: Tensor) -> Tensor:
    return self.inner(compiled_smoothly(self.a(x), x))


def compile_own(m: Any, n: int) -> None:
    m.compiled = torch.compile(nn.Sequential(nn.Linear(len(m.scale), len(m.scale)), nn.Tanh()), backend="eager")


@block("a compiled layer", compile_own)
def with_compiled(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.compiled(x))


@block("a layer compiled in place", lambda m, n: m.a.compile(backend="eager"))
def compiled_in_place(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.a(x))


@block("several inputs", lambda m, n: setattr(m, "joint", Joint(m.inner)))
def jointly(self: Any, x: Tensor) -> Tensor:
    y, parts = self.joint(self.a(x), other={"x": x, "y": self.b(x)})
    return y + parts["sum"][0]


class Joint(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, other: dict[str, Tensor], scale: float = 0.5) -> tuple[Tensor, dict[str, Any]]:
        return self.inner(x) * scale, {"sum": (other["x"] + other["y"], scale)}


@block("derivatives of a function")
def by_func(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) + torch.func.grad(lambda z: self.a(z).tanh().sum())(x)
