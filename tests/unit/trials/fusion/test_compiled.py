"""Functions and layers compiled by `torch.compile` and `torch.jit` inside a forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import ToyStudy
from tests.support.random_models.surroundings import Straight
from tests.support.slow_cases import crossed
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

LOOP, VMAP, RULE = "loop over trials", "vmap", "rule"


def compiled(function: Callable[..., Any], backend: str = "eager") -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=True)
    return found


def frozen(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = layer(x)
    return y + x


def branch(x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else x - 1


def dropped(x: Tensor, training: bool) -> Tensor:
    return functional.dropout(x, 0.3, training)


def rounded(x: Tensor) -> Tensor:
    found: Tensor = Straight.apply(x * 3)
    return found


@torch.jit.script
def scripted(x: Tensor, scale: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * scale
    return x.tanh() + y


@torch.jit.script
def scripted_branch(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x - 1


@torch.jit.script
def scripted_dropout(x: Tensor, training: bool) -> Tensor:
    return torch.nn.functional.dropout(x, 0.3, training)


no_grad_inside, branch_inside, own_backward = compiled(frozen), compiled(branch), compiled(rounded)
dropout_inside, smooth = compiled(dropped), compiled(lambda x, y: x.tanh() + y * 2, "aot_eager")

FORWARDS: dict[str, tuple[Forward, str]] = {
    "smooth": (lambda m, x: m.b(smooth(m.a(x), x)), RULE),
    "with no_grad": (lambda m, x: m.b(no_grad_inside(m.a, x)), VMAP),
    "with a branch": (lambda m, x: m.b(branch_inside(m.a(x))), LOOP),
    "with dropout": (lambda m, x: m.b(dropout_inside(m.a(x), m.training)), RULE),
    "with a backward of its own": (lambda m, x: m.b(own_backward(m.a(x))), LOOP),
    "scripted": (lambda m, x: m.b(scripted(m.a(x), m.b.bias)), VMAP),
    "scripted, with a branch": (lambda m, x: m.b(scripted_branch(m.a(x))), LOOP),
    "scripted, with dropout": (lambda m, x: m.b(scripted_dropout(m.a(x), m.training)), LOOP),
}


@pytest.mark.parametrize(("name", "size"), crossed(FORWARDS, [1, 2], 2))
def test_function(name: str, size: int) -> None:
    forward, way = FORWARDS[name]
    found = assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), "sgd", batches()), size)
    assert size == 1 or found.startswith(way)


def compile_in_place(m: TwoLayers) -> None:
    m.a.compile(backend="eager")


def compile_apart(m: TwoLayers) -> None:
    m.held = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), backend="eager")


LAYERS: dict[str, tuple[Forward, Callable[[TwoLayers], None]]] = {
    "in place": (lambda m, x: m.b(m.a(x).tanh()), compile_in_place),
    "apart": (lambda m, x: m.b(m.held(x)), compile_apart),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    forward, extra = LAYERS[name]
    found = assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward, extra).double(), "sgd", batches()), 2)
    assert found.startswith(RULE)
