"""The coordinate check: how far activations move in the first steps. Where rates transfer, width does not matter."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.transfer.models import MODELS, batches, cross_entropy
from trials import scaled_groups, shrink
from trials.shrinking.errors import ShrinkWarning

STEPS = 4

RATES: Mapping[tuple[str, str], float] = {
    ("mlp", "sgd"): 2.0,
    ("mlp", "adam"): 0.01,
    ("cnn", "sgd"): 0.5,
    ("cnn", "adam"): 0.01,
    ("lstm", "sgd"): 2.0,
    ("lstm", "adam"): 0.01,
    ("transformer", "sgd"): 0.1,
    ("transformer", "adam"): 0.001,
    ("mlp", "muon"): 0.1,
}

_LAYERS = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.LSTM, nn.Embedding, nn.TransformerEncoderLayer)


def coordinates(quick: bool) -> list[dict[str, Any]]:
    """Measure surrogates, and plain PyTorch at the same widths."""
    runs = []
    for (model, kind), rate in RATES.items():
        top, most = (256, 8) if model in ("cnn", "transformer") else (1024, 16)
        widths = [top // by for by in (most, 1)] if quick else [top // by for by in (16, 8, 4, 2, 1) if by <= most]
        for width in widths:
            for way in ("shrunk", "plain"):
                moved = [_moved(model, kind, rate, top, width, way, seed) for seed in range(1 if quick else 5)]
                layers = {name: [each[name] for each in moved] for name in moved[0]}
                runs.append({"way": way, "model": model, "optimizer": kind, "width": width, "layers": layers})
    return runs


def _moved(model: str, kind: str, rate: float, top: int, width: int, way: str, seed: int) -> dict[str, float]:
    """The RMS by which each layer's output has moved after the steps."""
    torch.manual_seed(seed)
    data = batches(model, STEPS, seed=seed)
    found = None
    if way == "plain" or width == top:
        made = MODELS[model](width)
        if way == "shrunk":  # the target, whose last layer begins at zero
            last = [module for module in made.modules() if isinstance(module, nn.Linear)][-1]
            nn.init.zeros_(last.weight)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkWarning)
            shrunk = shrink(MODELS[model](top), top // width, data[0][0])
        made, found = shrunk.model, shrunk.roles
    optimizer = _optimizer(kind, made, rate)
    if found is not None:
        scaled_groups(optimizer, found)
    before = _outputs(made, data[0][0])
    for inputs, targets in data:
        optimizer.zero_grad()
        cross_entropy(made(inputs), targets).backward()
        optimizer.step()
    after = _outputs(made, data[0][0])
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in after}


def _optimizer(kind: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if kind == "muon":
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=rate, weight_decay=0.0)
    return (
        torch.optim.SGD(model.parameters(), lr=rate) if kind == "sgd" else torch.optim.Adam(model.parameters(), lr=rate)
    )


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(
            lambda _m, _a, y, name=name: found.update({name: y[0] if isinstance(y, tuple) else y})
        )
        for name, module in model.named_modules()
        if isinstance(module, _LAYERS)
    ]
    model(inputs)
    for handle in handles:
        handle.remove()
    return {name: y.clone() for name, y in found.items()}
