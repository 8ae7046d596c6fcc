"""A surrogate stays equal to its target where each of the target's units is a copy of one of its own."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.duplicated import error_of

EXACT = 1e-10
"""Of the largest change of an output."""

DIFFERENT = 1e-3
"""At least as different are surrogates with the target's own settings, or nothing was shown."""


def optimizers() -> dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]]:
    o = torch.optim
    return {
        "sgd": lambda ps: o.SGD(ps, lr=0.05),
        "sgd, momentum": lambda ps: o.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1),
        "sgd, dampening": lambda ps: o.SGD(ps, lr=0.05, momentum=0.9, dampening=0.3),
        "sgd, nesterov": lambda ps: o.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda ps: o.Adam(ps, lr=0.01, eps=1e-3),
        "adam, l2": lambda ps: o.Adam(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
        "adam, decoupled": lambda ps: o.Adam(ps, lr=0.01, eps=1e-3, weight_decay=0.5, decoupled_weight_decay=True),
        "adam, amsgrad": lambda ps: o.Adam(ps, lr=0.01, eps=1e-3, amsgrad=True),
        "adamw": lambda ps: o.AdamW(ps, lr=0.01, eps=1e-3, weight_decay=0.5),
        "nadam": lambda ps: o.NAdam(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
        "nadamw": lambda ps: o.NAdam(ps, lr=0.01, eps=1e-3, weight_decay=0.5, decoupled_weight_decay=True),
        "radam": lambda ps: o.RAdam(ps, lr=0.05, eps=1e-3, weight_decay=0.1),
        "radamw": lambda ps: o.RAdam(ps, lr=0.05, eps=1e-3, weight_decay=0.5, decoupled_weight_decay=True),
        "adamax": lambda ps: o.Adamax(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
        "rmsprop": lambda ps: o.RMSprop(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
        "rmsprop, centered": lambda ps: o.RMSprop(ps, lr=0.01, eps=1e-2, centered=True, momentum=0.9),
        "adagrad": lambda ps: o.Adagrad(ps, lr=0.02, eps=1e-3, lr_decay=0.1, weight_decay=0.1),
    }


def draws(*shape: int, count: int = 12, whole: int = 0) -> list[Tensor]:
    stream = torch.Generator().manual_seed(1)
    if whole:
        return [torch.randint(whole, shape, generator=stream) for _ in range(count)]
    return [torch.randn(*shape, generator=stream, dtype=torch.float64) for _ in range(count)]


def mlp(by: int) -> nn.Module:
    """Layers of uneven widths, of which the second does not shrink as much."""
    a, b, c = 32 // by, 16 // (2 if by > 1 else 1), 48 // by
    return nn.Sequential(
        *(nn.Linear(5, a), nn.Tanh(), nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh()),
        *(nn.Linear(b, c, bias=False), nn.GELU(), nn.Linear(c, 3)),
    )


class Attention(nn.Module):
    """A pre-norm Transformer's block over tokens, with heads of 4."""

    def __init__(self, by: int) -> None:
        super().__init__()
        width = 32 // by
        self.embed = nn.Embedding(11, width)
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, width // 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.relu(self.up(self.second(x))))
        logits: Tensor = self.head(x)
        return logits


HEADS = {
    ("attention.in_proj_weight", 0): 4,
    ("attention.in_proj_bias", 0): 4,
    ("attention.out_proj.weight", 1): 4,
}


def cnn(by: int) -> nn.Module:
    a, b = 8 // by, 16 // by
    return nn.Sequential(
        *(nn.Conv2d(2, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU()),
        *(nn.Conv2d(a, a, 3, padding=1, groups=a), nn.Conv2d(a, b, 1), nn.GroupNorm(2, b), nn.ReLU()),
        *(nn.ConvTranspose2d(b, a, 2, stride=2), nn.PReLU(a), nn.AvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(a * 9, 3)),
    )


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], by: int) -> None:
        super().__init__()
        self.rnn = kind(5, 32 // by, num_layers=2, batch_first=True)
        self.head = nn.Linear(32 // by, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(x)[0])
        return y


@pytest.mark.parametrize("name", optimizers())
def test_mlp(name: str) -> None:
    exact, plain = error_of(mlp, optimizers()[name], draws(6, 5))
    assert exact < EXACT
    assert plain > DIFFERENT


MODELS: dict[str, tuple[Callable[[int], nn.Module], list[Tensor], dict[tuple[str, int], int]]] = {
    "attention": (Attention, draws(3, 6, whole=11), HEADS),
    "cnn": (cnn, draws(4, 2, 6, 6), {("11.weight", 1): 9}),
    "lstm": (partial(Recurrent, nn.LSTM), draws(3, 4, 5), {}),
    "gru": (partial(Recurrent, nn.GRU), draws(3, 4, 5), {}),
    "rnn": (partial(Recurrent, nn.RNN), draws(3, 4, 5), {}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["sgd, momentum", "adam, l2", "adamw", "radamw"])
def test_models(model: str, name: str) -> None:
    make, batches, blocks = MODELS[model]
    exact, plain = error_of(make, optimizers()[name], batches, blocks)
    assert exact < EXACT
    assert plain > DIFFERENT


@pytest.mark.parametrize(("norm", "value"), [(0.2, None), (None, 0.002), (0.05, 0.004)])
@pytest.mark.parametrize("model", ["mlp", "attention"])
def test_clipping(model: str, norm: float | None, value: float | None) -> None:
    make, batches, blocks = MODELS[model] if model in MODELS else (mlp, draws(6, 5), {})
    for name in ("sgd, momentum", "adam"):
        exact, plain = error_of(make, optimizers()[name], batches, blocks, clip_norm=norm, clip_value=value)
        assert exact < EXACT
        assert plain > DIFFERENT


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_muon(adjust: str, decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch casts to bfloat16, which would hide all but gross errors."""
    from torch.optim import _muon

    def in_float64(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.size(0) > grad.size(1) else x

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_float64)

    def muon(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        matrices = [(name, p) for name, p in named if p.ndim == 2]
        return torch.optim.Muon(matrices, lr=0.02, weight_decay=decay, adjust_lr_fn=adjust)

    exact, plain = error_of(mlp, muon, draws(6, 5))
    assert exact < EXACT
    assert plain > DIFFERENT
