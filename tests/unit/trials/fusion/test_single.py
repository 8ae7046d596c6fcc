"""A trial group of one trial, whose layers run as PyTorch's own do, and forwards that are traced for that."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import Solo, ToyStudy, assert_fused_is_solo, assert_same_trial, members
from tests.support.toy_models import Branching, DataDependent
from trials import TrialGroup
from trials.gate.base import OpenGate


class Attention(nn.Module):
    """Takes parts of a chunk one after another, and makes positions of the length of its input."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.places, self.qkv = nn.Embedding(8, 4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        q, k, v, *_ = [part * 2 for part in self.qkv(x).chunk(self.parts, dim=-1)]
        return functional.scaled_dot_product_attention(q, k, v)[:, -1]


class Noisy(nn.Module):
    """Draws from the global stream, and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
            x = x + torch.randn(x.shape, dtype=x.dtype)
        return self.norm(self.layer(x))


class Last(nn.Module):
    """A recurrent layer, and what follows its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        return self.out(y[:, -1])


class Counting(nn.Module):
    """Tied layers; it counts its parameters, by its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * sum(p.square().sum().exp() for p in self.parameters())


MODELS: dict[str, Any] = {
    "layers": (lambda n: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3)), (6, 4)),
    "convolution": (lambda n: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten()), (5, 2, 6, 6)),
    "three parts": (lambda n: Attention(3), (3, 6, 4)),
    "fewer parts than asked for": (lambda n: Attention(7), (3, 6, 4)),
    "recurrent": (lambda n: Last(nn.LSTM(4, 5, 2, batch_first=True, dropout=0.3)), (2, 3, 4)),
    "looks at data": (lambda n: nn.Sequential(nn.Linear(6, 6), DataDependent()), (3, 6)),
    "branches": (lambda n: Branching(True), (4, 3)),
    "draws and counts": (lambda n: Noisy(), (6, 4)),
    "counts tied parameters": (lambda n: Counting(), (6, 4)),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_group_of_any_size_is_solo(name: str, size: int) -> None:
    make, shape = MODELS[name]
    assert_fused_is_solo(make, [torch.randn(shape), torch.randn(shape)], size=size)


@pytest.mark.parametrize("name", ["layers", "recurrent", "looks at data"])
def test_one_that_is_left_goes_on(name: str) -> None:
    make, shape = MODELS[name]
    batches = [(torch.randn(shape).double(), torch.zeros(shape[0])) for _ in range(4)]
    study = ToyStudy(lambda n: make(n).double(), "adamw", batches)
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solo = Solo(study, 1)
    for step, (x, y) in enumerate(batches):
        if step == 2:
            group.keep([1])
        group.train_step(x, y)
        solo.step(x, y)
    assert_same_trial(group, 0, solo)


def test_parts_of_a_chunk_are_traced() -> None:
    group = assert_fused_is_solo(MODELS["three parts"][0], [torch.randn(3, 6, 4)])
    assert group.ways() == [("places.Embedding", "rule FusedEmbedding"), ("qkv.Linear", "rule FusedLinear")]
