"""SGD."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trials.optim.registry import Group, Numbers, Rule, decay, decayed, rule


@rule("SGD")
class SGD(Rule):
    """Sutskever et al. 2013, in PyTorch's variant."""

    flags: ClassVar[tuple[str, ...]] = ("nesterov", "maximize")
    kinds: tuple[str, ...] = ("momentum_buffer",)
    multi_tensor: ClassVar[str | None] = "sgd"

    def __init__(self, group: Group, kind: type[torch.optim.Optimizer]) -> None:
        """See `Rule`."""
        super().__init__(group, kind)
        self.nesterov = bool(group["nesterov"])

    def switches(self) -> dict[str, bool]:
        """See `Rule`."""
        return {**super().switches(), "nesterov": self.nesterov}

    def start(self, state: Mapping[str, Any], like: Tensor) -> dict[str, float]:
        """`torch.optim` does not count; what matters is whether there is a buffer."""
        return {"step": float(state.get("momentum_buffer") is not None)}

    def count(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """1 at the first step with a new buffer, then 2."""
        return {"step": np.minimum(counts["step"] + 1, 2)}

    def saved(self, group: Group, counts: Mapping[str, float], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `Rule`."""
        return dict(tensors) if counts["step"] and group["momentum"] else {}

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """A trial without momentum, or at its first step, takes the gradient itself into its buffer."""
        momentum = h["momentum"]
        made = {"minus_rate": -h["lr"], **decayed(h)}
        if momentum.any():
            plain = (momentum == 0) | (counts["step"] == 1)
            made["momentum"] = momentum
            made["old"] = np.where(plain, 0.0, momentum)
            made["new"] = np.where(plain, 1.0, 1 - h["dampening"])
        return made

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        g = decay(p, g, c, a)
        if "momentum" in c:
            buffer = s["momentum_buffer"]
            buffer.mul_(c["old"]).add_(torch.mul(g, c["new"], out=b))
            g = torch.mul(buffer, c["momentum"], out=b).add_(g) if self.nesterov else buffer
        p.add_(torch.mul(g, c["minus_rate"], out=b))
