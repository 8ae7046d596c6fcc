"""The user's own code between layers: what runs directly, under vmap, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import Solo, ToyStudy, assert_fused_is_solo, assert_same_trial, members
from tests.support.slow_cases import others_slow
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate

Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Some layers, a parameter and a buffer, and a forward given by the test."""

    def __init__(self, forward: Forward, n: int = 0) -> None:
        super().__init__()
        self.call = forward
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop = nn.Dropout(0.1 + 0.2 * n)
        self.relu = nn.ReLU(inplace=True)
        self.own = nn.Parameter(torch.randn(6))
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1,), 1.0 + n))
        self.plain = torch.full((6,), 2.0 + n, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def residual(m: Model, x: Tensor) -> Tensor:
    x = m.a(x)
    return x + m.b(torch.relu(x))


def by_size(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y.view(y.size(0), 2, 3).transpose(1, 2).reshape(y.shape[0], -1))


def attention(m: Model, x: Tensor) -> Tensor:
    q, k, v = m.a(x), m.b(x), x @ m.matrix
    weights = torch.softmax(q @ k.t() / 6**0.5, dim=-1)
    return torch.matmul(weights, v)


def split(m: Model, x: Tensor) -> Tensor:
    left, right = m.a(x).chunk(2, dim=-1)
    return torch.cat([left * torch.sigmoid(right), right[:, :2], x[:, :1] * left[:, :1]], dim=1)


def einsum(m: Model, x: Tensor) -> Tensor:
    return torch.einsum("bi,ij->bj", m.a(x), m.matrix)


def mode(m: Model, x: Tensor) -> Tensor:
    x = m.a(x)
    if m.training:
        x = 2 * m.b(x)
    return functional.dropout(x, 0.3, m.training)


FORWARDS: dict[str, Forward] = {
    "residual": residual,
    "sizes": by_size,
    "attention": attention,
    "split": split,
    "einsum": einsum,
    "another code in training": mode,
    "cat of trials": lambda m, x: torch.cat([m.a(x), m.b(x)], dim=-1),
    "cat along the batch": lambda m, x: torch.cat((m.a(x), m.b(x))),
    "cat with the shared input": lambda m, x: torch.cat([m.a(x), x], 1),
    "flatten": lambda m, x: torch.flatten(m.a(x).unsqueeze(-1), 1),
    "flatten method": lambda m, x: m.a(x).unsqueeze(1).flatten(1),
    "a layer twice": lambda m, x: m.a(torch.tanh(m.a(x))),
    "a layer twice, once on the input": lambda m, x: m.b(x) + m.b(m.a(x)),
    "own parameter": lambda m, x: m.a(x) * m.own + x * m.own,
    "own parameter first": lambda m, x: m.b(x + m.own),
    "buffer": lambda m, x: m.a(x) * m.scale.exp(),
    "plain tensor": lambda m, x: m.a(x) * m.plain,
    "constant": lambda m, x: m.a(x) * torch.arange(6.0),
    "scalars per trial": lambda m, x: m.a(x) * m.own.mean(),
    "vector and matrix": lambda m, x: m.a(x) + m.b(x)[0],
    "mean and softmax": lambda m, x: m.a(x).mean(1, keepdim=True) + m.b(x).softmax(0) + m.a(x).sum(dim=1).mean(),
    "permute": lambda m, x: m.a(x).permute(1, 0) + torch.transpose(m.b(x), 0, 1),
    "functional layers": lambda m, x: functional.layer_norm(functional.linear(m.a(x), m.matrix, m.own), (6,)),
    "dropout on the shared input": lambda m, x: m.a(m.drop(x)) + m.drop(m.b(x)),
    "functional dropout": lambda m, x: functional.dropout(functional.dropout(m.a(x), 0.4, m.training) + x, 0.0),
    "in place at the end of a line": lambda m, x: m.b(m.relu(m.a(x))),
    "functional in place": lambda m, x: functional.relu(m.a(x), inplace=True) * functional.elu(m.b(x), 0.5, True),
    "shapes as values": lambda m, x: m.a(x) * (m.a(x).shape[-1] / x.shape[0]) + m.b(x).ndim,
    "where and compare": lambda m, x: torch.where(m.a(x) > x, m.b(x), 0.5),
    "reads a layer's weight": lambda m, x: m.b(x) @ m.a.weight + m.a(x),
    "keyword call": lambda m, x: torch.add(input=m.a(input=x), other=m.b(x), alpha=2),
}


@pytest.mark.parametrize("name", others_slow(FORWARDS, [*FORWARDS][::2]))
def test_code_between_layers(name: str) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    assert_fused_is_solo(lambda n: Model(FORWARDS[name], n), [x])


def test_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mid, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.mid(self.table(x))))

    assert_fused_is_solo(lambda n: Tied(), [torch.tensor([[0, 3, 8]])])


def test_module_under_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(6)
            self.second = self.first
            self.linear = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.linear(self.first(x)))

    assert_fused_is_solo(lambda n: Twice(), [torch.randn(5, 6)])


def test_frozen_and_unused_parameters() -> None:
    def make(n: int) -> nn.Module:
        model = Model(lambda m, x: m.b(m.a(x)), n)
        model.a.requires_grad_(False)
        return model

    assert_fused_is_solo(make, [torch.randn(5, 6)])


def test_input_with_a_default() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor | None = None, times: int = 2) -> Tensor:
            y = self.a(x) * times
            return y if mask is None else y * mask

    assert_fused_is_solo(lambda n: Masked(), [torch.randn(5, 6)])


def test_frozen_statistics_stay_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.a(x))

    group = assert_fused_is_solo(lambda n: Frozen(), [torch.randn(5, 6)])
    assert group.extract(0)[0]["norm.num_batches_tracked"] == 0


def noisy(m: Model, x: Tensor) -> Tensor:
    return functional.rrelu(m.a(x), training=m.training)


def branching(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return y if y.sum() > 0 else m.b(y)


def assigning(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 0] = 0
    return y


def reused(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.relu(y) + y


def reused_through_dropout(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.relu(functional.dropout(y, 0.5, m.training)) + y


def reused_view(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.relu(y.flatten(1)) + y


def augmented(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y
    y += 1
    return z * 2


def counting(m: Model, x: Tensor) -> Tensor:
    if m.training:
        scale = m.scale.view(1)
        scale += 1
    return m.a(x) * m.scale


def to_number(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return y * y.mean().item() + m.drop(m.b(x))


def masked(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y[y > 0].sum() * y)


BY_OTHER_WAYS: dict[str, tuple[Forward, str]] = {
    "random numbers": (noisy, "loop over trials: .*rrelu"),
    "branch on data": (branching, "loop over trials: .*asks for values"),
    "assignment": (assigning, "vmap: model Model cannot be traced"),
    "in-place method": (lambda m, x: m.a(x).relu_(), "vmap: node 'relu_'.*in place"),
    "in-place layer whose input is used": (reused, "vmap: node 'relu' changes in place what node 'add' also reads"),
    "in-place layer whose input's view is used": (
        reused_view,
        "vmap: node 'flatten' changes in place what node 'add' also reads",
    ),
    "in-place layer behind dropout, which may do nothing": (
        reused_through_dropout,
        "vmap: node 'dropout' changes in place what node 'add' also reads",
    ),
    "augmented assignment to what another name holds": (augmented, "rule FusedLinear"),
    "augmented assignment to a buffer": (counting, "vmap: node .*changes 'scale' in place"),
    "a number out of a tensor": (to_number, "loop over trials: .*item"),
    "boolean mask": (masked, "loop over trials: .*dynamic shape"),
}


@pytest.mark.parametrize("name", BY_OTHER_WAYS)
def test_code_that_needs_another_way(name: str) -> None:
    forward, way = BY_OTHER_WAYS[name]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    group = assert_fused_is_solo(lambda n: Model(forward, n), [x], "sgd")
    assert torch.equal(before, torch.get_rng_state())
    assert re.search(way, "\n".join(how for _, how in group.ways()))


def test_a_mark_on_a_parameter_does_not_cost_vmap() -> None:
    def marked(n: int) -> Model:
        made = Model(assigning, n)
        vars(made.a.weight)["_is_initialized"] = True  # as transformers marks each
        return made

    group = assert_fused_is_solo(marked, [torch.randn(5, 6, generator=torch.Generator().manual_seed(1))], "sgd")
    assert any(how.startswith("vmap: model Model") for _, how in group.ways())


def test_outputs_of_different_shapes_are_refused() -> None:
    study = ToyStudy(lambda n: Model(lambda m, x: torch.nonzero(m.scale > 1).float() * m.own[0], n))
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(FuseError, match="module 'Model' gives tensors of different shapes for different trials"):
        group.train_step(torch.randn(5, 6), torch.zeros(5))


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "padding from the end": {"padding_idx": -8},
    "rows that are shortened": {"padding_idx": 2, "max_norm": 1.0},
    "by frequency": {"scale_grad_by_freq": True},
}


class Looking(nn.Module):
    """Looks up rows by the function, in a graph or in code that is not traced."""

    def __init__(self, options: dict[str, Any], traced: bool) -> None:
        super().__init__()
        self.options, self.traced = options, traced
        self.table, self.last = nn.Parameter(3 * torch.randn(10, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and len(x) < 1:
            return x
        return self.last(functional.embedding(x, self.table, **self.options))


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("per_trial", [False, True])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding_by_its_function(name: str, per_trial: bool, traced: bool) -> None:
    stream = torch.Generator().manual_seed(1)
    batches_K = [torch.randint(10, (3, 5, 4), generator=stream) for _ in range(3)]
    study = ToyStudy(lambda n: Looking(EMBEDDINGS[name], traced).double(), "sgd")
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Solo(study, number) for number in range(3)]
    for x_K in batches_K:
        x, y = (x_K, torch.zeros(3, 5)) if per_trial else (x_K[0], torch.zeros(5))
        group.train_step(x, y, per_trial)
        for row, solo in enumerate(solos):
            solo.step(x_K[row if per_trial else 0], torch.zeros(5))
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
