"""Side tasks other than the digits study; `BENCHMARK_SIDE_TASK` selects one per run.

The data stay the digits. The number of fused trials differs, and how deep, wide and heavy their models are.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Digits

ENVIRONMENT = "BENCHMARK_SIDE_TASK"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """K fused perceptrons with `depth` hidden layers of `width`, in batches of `batch`."""

    fused: int = 16
    depth: int = 2
    width: int = 64
    batch: int = 32


VARIANTS = {
    "small_k": Variant(fused=2),
    "large_k": Variant(fused=64),
    "shallow": Variant(depth=1),
    "deep": Variant(depth=16),
    "compute_bound": Variant(fused=4, width=256, batch=256),  # large products, few parameters
    "memory_bound": Variant(fused=8, width=512, batch=4),  # the optimizer streams through 38 MB of state
}


class VariantDigits(Digits):
    """Trials that never end and never report, as in `endless_digits`."""

    epochs = 1_000_000
    rungs = ()

    def __init__(self) -> None:
        """Read the data."""
        super().__init__()
        self._variant = VARIANTS[os.environ[ENVIRONMENT]]
        self.fused = self._variant.fused
        self.trials = 4 * self.fused  # for each of up to four ranks

    def model(self, params: dict[str, Any]) -> nn.Module:
        """As the digits study's, of another size."""
        width = self._variant.width
        layers: list[nn.Module] = []
        for inputs in [64] + [width] * (self._variant.depth - 1):
            layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(params["dropout"])]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def batches(self, epoch: int) -> Any:
        """All training examples, in an order that depends only on the epoch."""
        order = torch.randperm(len(self.targets), generator=torch.Generator().manual_seed(1 + epoch))
        for rows in order.split(self._variant.batch):
            yield self.inputs[rows], self.targets[rows]
