"""Tunes a small BERT of Hugging Face's, made from a configuration, on dict batches with masks.

trials run examples/hugging_face.py
"""

from collections.abc import Iterable, Mapping
from typing import Any

import optuna
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.bert import BertConfig, BertForSequenceClassification

from trials import Study

PADDING, GOOD, BAD, WORDS, LENGTH = 0, 1, 2, 8, 8


class Sentiment(Study):
    """Says whether a text has more good words than bad ones. Texts differ in length, so they are padded and masked."""

    trials = 24
    fused = 8
    epochs = 4
    rungs = (1, 2)
    metric = "f1"

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {
            "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
            "decay": trial.suggest_float("decay", 1e-4, 1e-1, log=True),
            "weight": trial.suggest_float("weight", 0.5, 2.0),
        }

    def model(self, params: dict[str, Any]) -> nn.Module:
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            pad_token_id=PADDING,
        )
        return BertForSequenceClassification(config)

    def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), params["lr"], weight_decay=params["decay"])

    def batches(self, epoch: int) -> Iterable[tuple[dict[str, Tensor], Tensor]]:
        stream = torch.Generator().manual_seed(epoch)
        for _ in range(20):
            yield texts(32, stream)

    def loss(self, outputs: Any, targets: Tensor, params: dict[str, Any] | None = None) -> Tensor:
        assert params is not None
        each_B = functional.cross_entropy(outputs.logits, targets, reduction="none")
        weighted: Tensor = each_B * (1 + (params["weight"] - 1) * targets)
        return weighted.mean()

    def validation(self) -> Iterable[tuple[dict[str, Tensor], Tensor]]:
        yield texts(256, torch.Generator().manual_seed(-1))

    def metrics(self, outputs: Any, targets: Tensor) -> Mapping[str, Any]:
        found, wanted = outputs.logits.argmax(-1).bool(), targets.bool()
        hits = (found & wanted).sum()
        return {
            "f1": 2 * hits / (found.sum() + wanted.sum()).clamp(min=1),
            "accuracy": (found == wanted).float().mean(),
        }


def texts(count: int, stream: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Texts with their masks, and whether each has more good words than bad ones."""
    words = torch.randint(GOOD, WORDS, (count, LENGTH), generator=stream)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (count, 1), generator=stream)
    words = words.where(mask, PADDING)
    labels = (words == GOOD).sum(1) > (words == BAD).sum(1)
    return {"input_ids": words, "attention_mask": mask.long()}, labels.long()
