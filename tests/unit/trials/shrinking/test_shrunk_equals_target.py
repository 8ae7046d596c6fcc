"""Surrogates made by trace stay equal to a target in which each of their units is copied."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.duplicated import error_of
from tests.support.shrinkable import GPT, Bare, Cells, Encoder, Gated, HuggingFaceGPT2, Recurrent, cnn
from trials import ShrinkWarning, shrink

HEADS_OF_4 = {"h.0.attn.c_attn": 4, "h.0.attn.c_proj": 4}


def images() -> Tensor:
    return torch.randn(3, 2, 6, 6)


def signals() -> Tensor:
    return torch.randn(3, 4, 5)


def vectors() -> Tensor:
    return torch.randn(4, 5)


def words() -> Tensor:
    return torch.randint(11, (3, 6))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any], Mapping[tuple[str, int], int]]

OWN_HEADS = {("h.0.attn.c_attn.weight", 0): 4, ("h.0.attn.c_attn.bias", 0): 4, ("h.0.attn.c_proj.weight", 1): 4}
GROUPS_OF_8 = {(name, 0): 8 for name in ("4.weight", "4.bias", "5.weight", "5.bias", "8.weight")}
GPT2 = "gpt.transformer.h.0.attn"
GPT2_HEADS = {(f"{GPT2}.c_attn.weight", 1): 4, (f"{GPT2}.c_attn.bias", 0): 4, (f"{GPT2}.c_proj.weight", 0): 4}
ENCODER = "layers.layers.0.self_attn"
HEADS = {
    (f"{ENCODER}.in_proj_weight", 0): 8,
    (f"{ENCODER}.in_proj_bias", 0): 8,
    (f"{ENCODER}.out_proj.weight", 1): 8,
}
CASES: dict[str, Case] = {
    "cnn": (cnn, images, {}, {("12.weight", 1): 9, **GROUPS_OF_8}),
    "gpt": (GPT, words, {"divide": ("n_head",)}, OWN_HEADS),
    "tied": (partial(GPT, tie="module"), words, {"divide": ("n_head",)}, OWN_HEADS),
    "gpt-2 of hugging face": (HuggingFaceGPT2, words, {}, GPT2_HEADS),
    "encoder": (Encoder, words, {}, HEADS),
    "gated": (Gated, vectors, {}, {}),
    "bare": (Bare, vectors, {}, {("third", 1): 1}),
    "lstm": (partial(Recurrent, nn.LSTM), signals, {}, {}),
    "projected lstm": (partial(Recurrent, nn.LSTM, proj_size=16), signals, {}, {}),
    "bidirectional gru": (partial(Recurrent, nn.GRU, bidirectional=True), signals, {}, {}),
    "rnn": (partial(Recurrent, nn.RNN), signals, {}, {}),
    "cells": (Cells, signals, {}, {}),
}
FANS: dict[str, dict[str, Any]] = {
    "encoder": {"position": (2, None)},
    "bare": {"first": (1, 0), "second": (0, 1), "third": ((1, 2), 0), "last": (None, (0, 1))},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_shrunk_equals_target(name: str, kind: str) -> None:
    if "hugging face" in name:
        pytest.importorskip("transformers")
    make, draw, more, blocks = CASES[name]
    torch.manual_seed(1)
    batches = [draw() for _ in range(8)]
    batches = [b.double() if b.is_floating_point() else b for b in batches]

    def made(by: int) -> nn.Module:
        model = make().double()
        if by == 1:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkWarning)
            return shrink(model, by, batches[0], readout="keep", **more).model

    def optimizer(named: Any) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(named, lr=0.02, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(named, lr=0.01, eps=1e-3, weight_decay=0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)  # SGD on a tied embedding: exact here, whatever the rate
        exact, plain = error_of(made, optimizer, batches, blocks, FANS.get(name))
    assert exact < 1e-10
    assert plain > 1e-3
