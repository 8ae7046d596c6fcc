"""Models that benchmarks of fusion train: K of them fused, and one alone in plain PyTorch."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials import Study, TrialGroup, build_member
from trials.gate.base import OpenGate

BATCH = 32
MOST_FUSED = 128


class _LeNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        self.head = nn.Sequential(nn.Linear(50 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """``x_B1HW``, 28 × 28."""
        return self.head(self.features(x))


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.shortcut = nn.Sequential() if inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """ResNet-18 for images of 32 × 32; the full width is 64."""
    widths = (width, width, 2 * width, 4 * width, 8 * width)
    blocks = [_Block(widths[s + b], widths[s + 1], 1 + (s > 0 and not b)) for s in range(4) for b in range(2)]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class _GPTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(b, t, 2, d // 2).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class _GPT(nn.Module):
    """Classifies by the last token, so that one loss serves all models here."""

    def __init__(self, width: int, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(_GPTBlock(width), _GPTBlock(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(self.tokens(x) + places).mean(1))


def gpt(width: int, length: int) -> nn.Module:
    """A GPT for up to `length` tokens of 64 kinds."""
    return _GPT(width, length)


class _LSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


def lstm(width: int) -> nn.Module:
    """One LSTM for sequences of 8 features."""
    return _LSTM(width)


def mlp(width: int) -> nn.Module:
    """Five layers for 64 features."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp_32": (lambda: mlp(32), lambda: torch.randn(BATCH, 64)),
    "mlp_128": (lambda: mlp(128), lambda: torch.randn(BATCH, 64)),
    "lenet_4": (lambda: _LeNet(4), lambda: torch.randn(BATCH, 1, 28, 28)),
    "lenet_8": (lambda: _LeNet(8), lambda: torch.randn(BATCH, 1, 28, 28)),
    "gpt_16": (lambda: _GPT(16), lambda: torch.randint(64, (BATCH, 16))),
    "gpt_64": (lambda: _GPT(64), lambda: torch.randint(64, (BATCH, 16))),
    "resnet18_4": (lambda: resnet18(4), lambda: torch.randn(BATCH, 3, 32, 32)),
    "resnet18_8": (lambda: resnet18(8), lambda: torch.randn(BATCH, 3, 32, 32)),
    "lstm_16": (lambda: _LSTM(16), lambda: torch.randn(BATCH, 16, 8)),
    "lstm_64": (lambda: _LSTM(64), lambda: torch.randn(BATCH, 16, 8)),
}
"""Name and width -> how to make the model, and a batch for it."""
QUICK_MODELS = ("mlp_32", "lenet_4", "gpt_16", "resnet18_4", "lstm_16")


class Classes(Study):
    """Every model here classifies, with AdamW."""

    trials, epochs = MOST_FUSED, 1

    def __init__(self, name: str) -> None:
        self._make, batch = MODELS[name]
        torch.manual_seed(0)
        self.batch = batch(), torch.randint(10, (BATCH,))

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw a learning rate."""
        return {"lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True)}

    def model(self, params: dict[str, Any]) -> nn.Module:
        """Make the model of this study."""
        return self._make()

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=params["lr"])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(outputs, targets)

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        """The one batch, over and over."""
        return [self.batch]

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The same batch."""
        return [self.batch]

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Accuracy."""
        return (outputs.argmax(-1) == targets).float().mean()


class Alone:
    """One trial in plain PyTorch; `fused_optimizer`: with its fused AdamW, which a study must ask for."""

    def __init__(self, study: Classes, *, fused_optimizer: bool = False) -> None:
        member = build_member(study, 0, {"lr": 1e-3})
        self._study, self.model = study, member.model
        self._optimizer = study.optimizer(member.params, member.model)
        if fused_optimizer:
            self._optimizer = torch.optim.AdamW(member.model.parameters(), lr=member.params["lr"], fused=True)

    def step(self) -> None:
        """Train on the batch."""
        inputs_B, targets_B = self._study.batch
        self._optimizer.zero_grad()
        self._study.loss(self.model(inputs_B), targets_B).backward()
        self._optimizer.step()


class Together:
    """K trials fused."""

    def __init__(self, study: Classes, size: int) -> None:
        members = [build_member(study, row, {"lr": 1e-3 / (1 + row)}) for row in range(size)]
        self._batch, self.group = study.batch, TrialGroup(study, members, OpenGate())

    def step(self) -> None:
        """Train on the batch."""
        self.group.train_step(*self._batch)


def alternate(
    alone: Callable[[], None], fused: Callable[[], None], size: int, seconds: float
) -> list[tuple[float, float]]:
    """(K solo steps, one fused step) in seconds, from blocks of steps in turn; at least six pairs."""
    for step in (alone, fused, fused):
        step()
    solo_steps, fused_steps = _count(alone, 0.02), _count(fused, 0.02)
    pairs: list[tuple[float, float]] = []
    end_s = time.monotonic() + seconds
    while len(pairs) < 6 or (time.monotonic() < end_s and len(pairs) < 60):
        one, other = (time_of_steps_s(alone, solo_steps) * size, time_of_steps_s(fused, fused_steps))
        pairs.append((one, other))
    return pairs


def _count(step: Callable[[], None], seconds: float) -> int:
    """The number of steps that fill `seconds`."""
    return max(1, int(seconds / time_of_steps_s(step, 1)))


def time_of_steps_s(step: Callable[[], None], count: int) -> float:
    """The mean time of so many steps, in seconds."""
    start_s = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start_s) / count
