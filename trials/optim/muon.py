"""Muon."""

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from trials.optim.registry import Group, Numbers, Rule, rule

SMALL = 8
"""PyTorch multiplies batches of smaller matrices by another kernel, which rounds differently."""


@rule("Muon")
class Muon(Rule):
    """Jordan et al. 2024: momentum, made orthogonal by Newton and Schulz's iteration, for matrices only.

    The iteration runs in bfloat16, as PyTorch's does, on all trials' matrices as one batch where it can.
    """

    flags: ClassVar[tuple[str, ...]] = ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
    kinds: tuple[str, ...] = ("momentum_buffer",)
    computes_in = torch.bfloat16
    elementwise = False

    def __init__(self, group: Group, kind: type[torch.optim.Optimizer]) -> None:
        """See `Rule`."""
        super().__init__(group, kind)
        self.nesterov = bool(group["nesterov"])
        self.polynomial = tuple(group["ns_coefficients"])
        self.iterations = int(group["ns_steps"])
        self.adjust = group["adjust_lr_fn"]

    def start(self, state: Mapping[str, Any], like: Tensor) -> dict[str, float]:
        """`torch.optim` does not count."""
        return {"step": float("momentum_buffer" in state)}

    def saved(self, group: Group, counts: Mapping[str, float], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `Rule`."""
        return dict(tensors) if counts["step"] else {}

    def count(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """Whether there is a buffer."""
        return {"step": counts["step"] * 0 + 1}

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        return {
            "new": 1 - h["momentum"],
            "momentum": h["momentum"],
            "keep": 1 - h["lr"] * h["weight_decay"],
            "minus_rate": -h["lr"],
            "eps": h["eps"],
        }

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """`p` is ``[K, rows, columns]``."""
        buffer = s["momentum_buffer"].lerp_(g, c["new"])
        direction = self.orthogonal(g.lerp(buffer, c["momentum"]) if self.nesterov else buffer, c["eps"])
        p.mul_(c["keep"]).add_(direction.to(p.dtype).mul_(c["minus_rate"] * self.ratio(*p.shape[1:])))

    def orthogonal(self, x: Tensor, eps: Tensor) -> Tensor:
        """Each matrix of ``x [K, rows, columns]`` with its singular values near 1."""
        if min(x.shape[1:]) < SMALL:
            return torch.stack([self._iterate(one, own[0]) for one, own in zip(x, eps, strict=True)])
        return self._iterate(x, eps)

    def _iterate(self, x: Tensor, eps: Tensor) -> Tensor:
        first, second, third = self.polynomial
        add_product = torch.baddbmm if x.ndim == 3 else torch.addmm
        tall = x.size(-2) > x.size(-1)
        x = x.bfloat16().mT if tall else x.bfloat16()
        x = x / torch.linalg.matrix_norm(x, keepdim=True).maximum(eps.bfloat16())
        for _ in range(self.iterations):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=second, alpha=third), x, beta=first)
        return x.mT if tall else x

    def ratio(self, rows: int, columns: int) -> float:
        """The factor on the rate for a matrix of this size."""
        if self.adjust is None or self.adjust == "original":
            return sqrt(max(1, rows / columns))
        return 0.2 * sqrt(max(rows, columns)) if self.adjust == "match_rms_adamw" else 1.0
