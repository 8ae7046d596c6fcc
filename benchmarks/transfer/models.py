"""Models of any width, and their data: scikit-learn's digits, and source code of Python's standard library."""

import argparse
import inspect
from collections.abc import Callable
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

CONTEXT, HEAD = 32, 16

Batch = tuple[Tensor, Tensor]


def mlp(width: int) -> nn.Module:
    """Two hidden layers, for digits."""
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
    )


def cnn(width: int) -> nn.Module:
    """Three convolutions with batch norms, for digits as images."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


class Lstm(nn.Module):
    """Reads a digit row by row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 64]`` to ``[B, 10]``."""
        logits: Tensor = self.head(self.rnn(x.unflatten(1, (8, 8)))[0][:, -1])
        return logits


class Transformer(nn.Module):
    """Predicts the next character, with heads of 16 and two pre-norm layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(128, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, width // HEAD, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)
        self.mask: Tensor
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, 128]``."""
        logits: Tensor = self.head(self.norm(self.layers(self.embed(x) + self.position, mask=self.mask)))
        return logits


MODELS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "cnn": cnn, "lstm": Lstm, "transformer": Transformer}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over examples, and over characters if there are some."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def batches(model: str, steps: int, size: int = 32, seed: int = 0) -> list[Batch]:
    """The training batches of a model."""
    stream = torch.Generator().manual_seed(seed)
    if model == "transformer":
        text = characters()
        begins = torch.randint(len(text) - CONTEXT - 1, (steps, size), generator=stream)
        index = begins[..., None] + torch.arange(CONTEXT)
        return [(text[each], text[each + 1]) for each in index]
    inputs, targets = digits()[0]
    rows = torch.randint(len(inputs), (steps, size), generator=stream)
    return [(inputs[each], targets[each]) for each in rows]


def held_out(model: str) -> Batch:
    """A batch to validate on."""
    if model != "transformer":
        return digits()[1]
    text = characters()
    index = torch.arange(64)[:, None] * 997 + torch.arange(CONTEXT)
    return text[index], text[index + 1]


@cache
def digits() -> tuple[Batch, Batch]:
    """Training and held-out examples."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(found.data, dtype=torch.float32)[order] / 16
    targets = torch.tensor(found.target)[order]
    return (inputs[397:], targets[397:]), (inputs[:397], targets[:397])


@cache
def characters() -> Tensor:
    """Source code as ASCII."""
    source = "".join(inspect.getsource(module) for module in (argparse, inspect))
    return torch.tensor([min(ord(each), 127) for each in source])
