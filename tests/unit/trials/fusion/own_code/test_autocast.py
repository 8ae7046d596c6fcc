"""Under autocast, types and precision do not depend on how many trials are fused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.autocast import assert_same_under_autocast, no_worse
from tests.support.fused_and_solo import OPTIMIZERS, Solo, ToyStudy, members
from tests.support.layer_cases import LAYERS, OF_EACH_KIND, batches, before, fresh
from tests.support.slow_cases import others_slow
from trials import TrialGroup
from trials.fusion.errors import RefusedError
from trials.fusion.own_code.autocast import REASON
from trials.fusion.scores.scalar import Scalar
from trials.gate.base import OpenGate

pytestmark = pytest.mark.filterwarnings(
    "ignore:Implicit dimension choice", "ignore:dropout2d. Received a 3D input", "ignore:Using a target size"
)

KINDS = (torch.bfloat16, torch.float16)
NO_HALF = ("RReLU", "rrelu", "LSTM")
"""PyTorch's own kernels lack float16 on CPUs."""


def case(name: str, first: bool) -> tuple[Callable[[int], nn.Module], Tensor]:
    shape, make = LAYERS[name]
    layers = (lambda n: [fresh(make(n))]) if first else (lambda n: [before(name), fresh(make(n))])
    return lambda n: nn.Sequential(*layers(n)), batches(*shape)[0]


SIZES = others_slow([1, 3], [3])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_layer(name: str, size: int) -> None:
    # how many numbers an RReLU draws depends on its input's signs, and a layer before it may round one of them away
    ways = assert_same_under_autocast(*case(name, first=name.startswith("RReLU")), size)
    assert all(way.startswith("rule") for _, way in ways), "none falls to another way in silence"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_everywhere(name: str, first: bool, kind: torch.dtype) -> None:
    if kind == torch.float16 and any(kernel in name for kernel in NO_HALF):
        pytest.skip("PyTorch lacks a kernel")
    changes_batch = first and "inplace=True" in name  # which all trials share
    for size in (1, 2, 3) if "of everything" in name else (1, 2, 5):
        with pytest.raises(RefusedError, match="changes its input in place") if changes_batch else nullcontext():
            assert_same_under_autocast(*case(name, first), size, kind)


class Code(nn.Module):
    """A forward given by the test. With `untraced` it assigns to a part of a tensor, which cannot be traced."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], untraced: bool, **layers: nn.Module) -> None:
        super().__init__()
        self.call, self.untraced = call, untraced
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        if self.untraced:
            copied = x.clone()
            copied[:] = x
            x = copied
        return self.call(self, x)


def heads(m: Code, x: Tensor) -> Any:
    return [layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (m.a, m.b, m.c)]


def attention(m: Code, x: Tensor) -> Tensor:
    q, k, v = heads(m, x)
    return (q @ k.mT / 2).softmax(-1) @ v


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer norm": lambda m, x: F.layer_norm(m.a(x), (8,), m.v),
    "group norm": lambda m, x: F.group_norm(m.a(x).transpose(1, 2), 2, m.v),
    "rms norm": lambda m, x: F.rms_norm(m.a(x), (8,), m.v),
    "prelu": lambda m, x: F.prelu(m.a(x), m.v[:1].abs()),
    "convolution": lambda m, x: F.conv1d(x, m.w[:, :7, None]),
    "linear": lambda m, x: F.linear(m.a(x), m.w, m.v),
    "addmm": lambda m, x: torch.addmm(m.v, m.a(x)[0], m.w),
    "baddbmm": lambda m, x: torch.baddbmm(m.v.expand(3, 7, 8), m.a(x), m.w.expand(3, 8, 8)),
    "einsum": lambda m, x: torch.einsum("bti,ij->btj", m.a(x), m.w),
    "distances": lambda m, x: torch.cdist(m.a(x), m.w.expand(3, 8, 8)),
    "cosine": lambda m, x: F.cosine_similarity(m.a(x), m.v, dim=-1),
    "normalized": lambda m, x: F.normalize(m.a(x), dim=-1),
    "cumulative sum": lambda m, x: m.a(x).cumsum(1),
    "deviation": lambda m, x: m.a(x).std(1),
    "softmax in float32": lambda m, x: F.softmax(m.a(x), -1, dtype=torch.float32),
    "types that mix": lambda m, x: torch.where(x > 0, m.a(x), m.v) + x * m.v.mean(),
    "cat of types": lambda m, x: torch.cat([m.a(x), x], 1),
    "attention by hand": attention,
    "attention": lambda m, x: F.scaled_dot_product_attention(*heads(m, x), is_causal=True),
    "attention with dropout": lambda m, x: F.scaled_dot_product_attention(*heads(m, x), dropout_p=0.2),
    "attention with weights": lambda m, x: F.scaled_dot_product_attention(*heads(m, x), attn_mask=m.w[:7, :7]),
    "dropout": lambda m, x: F.dropout(m.a(x), 0.3, m.training),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("untraced", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_code_between_layers(name: str, untraced: bool, size: int) -> None:
    x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(3))
    assert_same_under_autocast(lambda n: Code(CALLS[name], untraced), x, size)


MORE_LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "multi-head attention": (
        lambda: nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True),
        lambda m, x: m.layer(m.a(x), m.a(x), x)[0],
    ),
    "its kernel": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: m.layer(m.a(x), m.a(x), x, need_weights=False)[0],
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, activation="gelu", batch_first=True),
        lambda m, x: m.layer(m.a(x)),
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.2, activation="gelu", batch_first=True),
        lambda m, x: m.layer(m.a(x), x),
    ),
    "rnn": (lambda: nn.RNN(8, 5, 2, batch_first=True), lambda m, x: m.layer(m.a(x))[0]),
    "lstm": (lambda: nn.LSTM(8, 5, 2, dropout=0.2, batch_first=True), lambda m, x: m.layer(m.a(x))[0]),
    "gru": (lambda: nn.GRU(8, 5, bidirectional=True, batch_first=True), lambda m, x: m.layer(x)[1]),
    "rnn cell": (lambda: nn.RNNCell(8, 5), lambda m, x: m.layer(m.a(x[0]))),
    "lstm cell": (lambda: nn.LSTMCell(8, 5), lambda m, x: m.layer(m.a(x[0]))[1]),
    "cosine": (lambda: nn.CosineSimilarity(-1), lambda m, x: m.layer(m.a(x), x)),
    "distance": (lambda: nn.PairwiseDistance(), lambda m, x: m.layer(m.a(x), m.b(x))),
    "bilinear": (lambda: nn.Bilinear(8, 8, 5), lambda m, x: m.layer(x, x + 1)),
    "embedding": (
        lambda: nn.Embedding(5, 8, padding_idx=1),
        lambda m, x: m.a(m.layer((x[..., 0] > 0).long())),
    ),
    "bag": (lambda: nn.EmbeddingBag(5, 8), lambda m, x: m.a(m.layer((x[..., 0] > 0).long()))),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MORE_LAYERS)
def test_layer_of_several_inputs_or_parts(name: str, size: int) -> None:
    make, call = MORE_LAYERS[name]
    x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(3))
    assert_same_under_autocast(lambda n: Code(call, untraced=False, layer=make()), x, size)


@pytest.mark.parametrize(("untraced", "name"), [(False, "node 'layer_norm'"), (True, "layer_norm in Code")])
def test_what_runs_trial_by_trial_says_so(untraced: bool, name: str) -> None:
    ways = assert_same_under_autocast(lambda n: Code(CALLS["layer norm"], untraced), torch.randn(3, 7, 8), 2)
    assert ways[-1] == (name, REASON)


class OwnNorm(nn.BatchNorm1d):
    """Has no rule."""


NORMS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "momenta of their own": (lambda n: nn.BatchNorm1d(7, momentum=0.2 * (n + 1)), "rule FusedBatchNorm"),
    "a mean of all": (lambda n: nn.BatchNorm1d(7, momentum=None), "rule FusedBatchNorm"),
    "the user's own": (lambda n: OwnNorm(7, momentum=0.2), "loop over trials: "),
    "the user's own mean of all": (lambda n: OwnNorm(7, momentum=None), "loop over trials: "),
}


@pytest.mark.parametrize("untraced", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_batch_norm_that_falls_to_a_loop_says_so(name: str, untraced: bool) -> None:
    make, way = NORMS[name]
    ways = assert_same_under_autocast(
        lambda n: Code(lambda m, x: m.layer(m.a(x)), untraced, layer=make(n)), torch.randn(3, 7, 8), 3
    )
    assert [how for place, how in ways if "Norm" in place][-1].startswith(way)


CLASSES = torch.randint(3, (5, 32), generator=torch.Generator().manual_seed(1))


def one_hot(t: Tensor) -> Tensor:
    return F.one_hot(t, 3).float()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda y, t: F.cross_entropy(y, t),
    "smoothed": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1, ignore_index=1),
    "summed": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "weighted": lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([1.0, 2.0, 3.0])),
    "of probabilities": lambda y, t: F.cross_entropy(y, F.one_hot(t, 3).float()),
    "nll": lambda y, t: F.nll_loss(F.log_softmax(y, 1), t),
    "squares": lambda y, t: F.mse_loss(y, F.one_hot(t, 3).float()),
    "absolute": lambda y, t: F.l1_loss(y, F.one_hot(t, 3).float()),
    "huber": lambda y, t: F.huber_loss(y, F.one_hot(t, 3).float()),
    "with logits": lambda y, t: F.binary_cross_entropy_with_logits(y, F.one_hot(t, 3).float()),
    "divergence": lambda y, t: F.kl_div(y.log_softmax(1), F.one_hot(t, 3).float(), reduction="batchmean"),
    "gaussian": lambda y, t: F.gaussian_nll_loss(y, F.one_hot(t, 3).float(), y.detach().abs() + 1),
    "poisson": lambda y, t: F.poisson_nll_loss(y, F.one_hot(t, 3).float()),
    "hinge": lambda y, t: F.hinge_embedding_loss(y, 2 * F.one_hot(t, 3).float() - 1),
    "norm": lambda y, t: y.norm(),
    "accuracy": lambda y, t: (y.argmax(-1) == t).float().mean(),
    "mean": lambda y, t: y.mean(),
    "product": lambda y, t: (y @ y.t()).mean(),
    "addmm": lambda y, t: torch.addmm(torch.zeros(2), y.float(), torch.ones(3, 2)).sum(),
    "calls a helper": lambda y, t: F.cross_entropy(y, t) + F.poisson_nll_loss(y, one_hot(t)),
}


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str, size: int) -> None:
    for pure in (True, False):
        loss = LOSSES[name] if pure else (lambda y, t: LOSSES[name](y, t) * 1)
        for kind in (torch.bfloat16, torch.float32):
            y_K = torch.randn(size, 32, 3, generator=torch.Generator().manual_seed(size)).to(kind).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                actual_K = Scalar("Study.loss", loss)(
                    y_K, CLASSES[:size], [torch.Generator() for _ in range(size)], per_trial=True
                )
                alone_K = torch.stack([loss(y, t) for y, t in zip(y_K, CLASSES, strict=False)])
            exact_K = torch.stack([loss(y.float(), t) for y, t in zip(y_K, CLASSES, strict=False)])
            no_worse(actual_K, alone_K, exact_K.double(), torch.bfloat16, f"{name}, {kind}")
            if alone_K.requires_grad:
                alone, actual, exact = (torch.autograd.grad(v.sum(), y_K)[0] for v in (alone_K, actual_K, exact_K))
                no_worse(actual, alone, exact.double(), torch.bfloat16, f"gradient of {name}, {kind}")


def test_code_that_draws_in_a_call_is_not_run_with_all_trials_numbers() -> None:
    def draws(m: Code, x: Tensor) -> Tensor:
        q = m.a(x).transpose(0, 1)
        return F.multi_head_attention_forward(
            *(q, q, q, 8, 2, m.w.repeat(3, 1), None, None, None, False, 0.5, m.w, m.v), training=m.training
        )[0]

    ways = assert_same_under_autocast(lambda n: Code(draws, untraced=False), torch.randn(3, 7, 8), 2)
    assert any("loop over trials" in way for _, way in ways)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(optimizer: str) -> None:
    """Weights stay float32, and a few steps end where they do alone."""

    def make(n: int) -> nn.Module:
        layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        return nn.Sequential(*layers)

    data = [(x, torch.zeros(len(x))) for x in batches(7, 6)]
    study = ToyStudy(make, optimizer, data)
    study.autocast = torch.bfloat16
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos, exacts = ([Solo(study, number) for number in range(3)] for _ in range(2))
    for batch in data * 2:
        group.train_step(*batch)
        for alone, exact in zip(solos, exacts, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                alone.step(*batch)
            exact.step(*batch)
    for row, (alone, exact) in enumerate(zip(solos, exacts, strict=True)):
        for name, value in group.extract(row)[0].items():
            right = exact.model.state_dict()[name]
            no_worse(value, alone.model.state_dict()[name], right.double(), torch.bfloat16, f"gradient: {name}")
