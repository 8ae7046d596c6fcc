"""Tensors of subclasses, which may do other things than a rule does with their numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from tests.support.fused_and_solo import Batch, Solo, ToyStudy, assert_same_trial, close, members
from tests.support.two_layers import Forward, TwoLayers, assert_fused_is_alone, batches
from trials import TrialGroup
from trials.gate.base import OpenGate


class Doubling(Tensor):
    """Layers and activations of such a tensor are twice what they would be."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func in (functional.linear, functional.relu) else found


def doubling(x: Tensor) -> Tensor:
    return x.as_subclass(Doubling)


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def biased(m: TwoLayers, x: Tensor) -> Tensor:
    y = m.a(x)[None]
    return m.b(functional.scaled_dot_product_attention(y, y, y, attn_mask=causal_lower_right(5, 5))[0])


FORWARDS: dict[str, Forward] = {
    "a bias of PyTorch's": biased,
    "into a layer": lambda m, x: m.b(plain(m.a(doubling(x)))),
    "into a layer, untraced": lambda m, x: m.b(plain(m.a(doubling(x)))) if x.any() else x,
    "into a function": lambda m, x: m.b(plain(functional.relu(doubling(m.a(x))))),
    "a constant": lambda m, x: m.b(m.a(x) + plain(functional.relu(doubling(torch.arange(4.0))))),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_made_in_the_forward(name: str, size: int) -> None:
    assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(FORWARDS[name]).double(), batches=batches()), size)


class OwnBatches(ToyStudy):
    def trial_batches(self, params: dict[str, Any], number: int, epoch: int) -> Iterable[Batch]:
        return [(x.roll(number, 0), y.roll(number, 0)) for x, y in self.data]


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, plain(functional.relu(targets)))


@pytest.mark.parametrize("kind", [ToyStudy, OwnBatches])
@pytest.mark.parametrize("where", [0, 1], ids=["inputs", "targets"])
@pytest.mark.parametrize("forward", [lambda m, x: m.b(plain(m.a(x))), lambda m, x: m.b(plain(m.a(x)) * x.any())])
def test_in_batches(forward: Forward, where: int, kind: Callable[..., ToyStudy]) -> None:
    kinds = [doubling, plain] if where == 0 else [plain, doubling]
    data = [(kinds[0](x), kinds[1](torch.rand(5, 4).double())) for x, _ in batches()]
    study = kind(lambda n: TwoLayers(forward).double(), batches=data)
    study.loss = squares  # type: ignore[method-assign]
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    for batch in group.batches(0):
        group.train_step(*batch)
    for row in range(3):
        solo = Solo(study, row)
        own = study.trial_batches(solo.params, row, 0)
        for x, y in study.data if own is None else own:
            solo.step(x, y)
        close(group.losses_K()[row].item(), solo.loss, "loss")
        assert_same_trial(group, row, solo)
