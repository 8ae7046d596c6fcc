"""Tunes a character-level Transformer on source code of Python's standard library.

trials run examples/characters.py
"""

import argparse
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import optuna
import torch
from torch import Tensor, nn
from torch.nn import functional

from trials import Study

CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 4, 2


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
            nn.Dropout(dropout),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x_BTD)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = x_BTD + self.feed(x_BTD)
        return added


class Transformer(nn.Module):
    """Predicts the next character at each position. The embedding is the last layer's weight, too."""

    def __init__(self, characters: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(characters, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x_BT: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(x_BT) + self.positions)))
        return logits


class Characters(Study):
    """Minimizes the loss per character; the perplexity is kept beside it."""

    trials = 24
    fused = 8
    epochs = 6
    rungs = (1, 2, 4)
    direction = "minimize"
    scheduler_every = "step"
    steps = 40

    def __init__(self) -> None:
        text = inspect.getsource(argparse)
        self.alphabet = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.alphabet)}
        self.text = torch.tensor([codes[character] for character in text])
        self.held_out = len(text) // 10

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {
            "lr": trial.suggest_float("lr", 3e-4, 3e-2, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True),
            "warmup": trial.suggest_int("warmup", 1, 40),
            "dropout": trial.suggest_float("dropout", 0.0, 0.3),
        }

    def model(self, params: dict[str, Any]) -> nn.Module:
        return Transformer(len(self.alphabet), params["dropout"])

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), params["lr"], weight_decay=params["weight_decay"])

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        warmup, steps = params["warmup"], self.epochs * self.steps
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (1 + math.cos(math.pi * step / steps)) / 2)
        )

    def clip_norm(self, params: dict[str, Any]) -> float:
        return 1.0

    def batches(self, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        stream = torch.Generator().manual_seed(epoch)
        for _ in range(self.steps):
            yield self.windows(torch.randint(len(self.text) - self.held_out - CONTEXT, (16,), generator=stream))

    def windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The characters from each start on, and those that follow them."""
        rows = starts[:, None] + torch.arange(CONTEXT)
        return self.text[rows], self.text[rows + 1]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def validation(self) -> Iterable[tuple[Tensor, Tensor]]:
        starts = torch.arange(len(self.text) - self.held_out, len(self.text) - CONTEXT, 4 * CONTEXT)
        yield from map(self.windows, starts.split(32))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
        return {"perplexity": self.loss(outputs, targets).exp()}
