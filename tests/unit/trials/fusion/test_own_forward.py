"""Models whose `forward`, or what belongs to it, is not that of their class, or not all that a call runs."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import TwoLayers, assert_fused_is_alone, batches, plain
from trials import FuseError
from trials.fusion.registry import replaced_function


def patched(factor: float) -> TwoLayers:
    """A model with another forward than its class has."""
    model = TwoLayers(plain).double()

    def forward(x: Tensor) -> Tensor:
        return model.b(model.a(x).relu()) * factor

    model.forward = forward  # type: ignore[method-assign]
    return model


def around(inside: nn.Module) -> nn.Module:
    return nn.Sequential(inside, nn.Linear(4, 4)).double()


@pytest.mark.parametrize("is_inside", [False, True])
def test_it_is_what_all_trials_run(is_inside: bool) -> None:
    torch.manual_seed(0)
    study = ToyStudy(lambda n: around(patched(2.0)) if is_inside else patched(2.0), batches=batches())
    assert_fused_is_alone(study, 3)


@pytest.mark.parametrize("is_inside", [False, True])
def test_trials_with_different_ones_are_not_fused(is_inside: bool) -> None:
    study = ToyStudy(lambda n: around(patched(n + 1)) if is_inside else patched(n + 1), batches=batches())
    with pytest.raises(FuseError, match="forward is code of its own"):
        assert_fused_is_alone(study, 2)


def test_method_that_a_layers_forward_calls() -> None:
    def normalized(n: int) -> nn.Module:
        layer = nn.Conv1d(1, 4, 4)
        own = {"_conv_forward": lambda x, weight, bias: nn.functional.conv1d(x, weight / weight.norm(), bias)}
        vars(layer).update(own)
        return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten()).double()

    assert_fused_is_alone(ToyStudy(normalized, batches=batches()), 3)


def test_method_of_a_layers_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(self: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.conv1d(x, weight * 2, bias)

    monkeypatch.setattr(nn.Conv1d, "_conv_forward", doubled)

    def make(n: int) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 4), nn.Flatten()).double()

    assert_fused_is_alone(ToyStudy(make, batches=batches()), 3)


class Called(TwoLayers):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2


@pytest.mark.parametrize("is_inside", [False, True])
def test_call_of_its_own(is_inside: bool) -> None:
    def make(n: int) -> nn.Module:
        return around(Called(plain)) if is_inside else Called(plain).double()

    assert_fused_is_alone(ToyStudy(make, batches=batches()), 3)


linear, dropout = nn.functional.linear, nn.functional.dropout
attention = nn.functional.scaled_dot_product_attention
REPLACED: dict[str, Any] = {
    "linear": lambda x, weight, bias=None: linear(x, weight, bias) * 2,
    "dropout": lambda x, p=0.5, training=True, inplace=False: dropout(x, p, training) + 1,
    "scaled_dot_product_attention": lambda q, k, v: attention(q, k, v) * 2,
}


def attending(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.drop(m.a(x))[:, None]
    return m.b(nn.functional.scaled_dot_product_attention(y, y, y)[:, 0])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", REPLACED)
def test_function_of_pytorch(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster attention is often set so."""
    monkeypatch.setattr(nn.functional, name, REPLACED[name])
    assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(attending).double(), batches=batches()), size)


REPLACED_FIRST = """
from torch.nn import functional

linear = functional.linear
functional.linear = lambda *args: linear(*args)
from trials.fusion.registry import replaced_function
print(replaced_function())
"""


def test_function_that_was_replaced_before_this_package_was_loaded() -> None:
    command = [sys.executable, "-c", REPLACED_FIRST]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.strip()
    assert said == "torch.nn.functional.linear is not PyTorch's own here"


def test_function_that_computes_nothing_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert not replaced_function()
