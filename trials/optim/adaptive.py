"""Rates per weight from squared gradients: RMSprop, Adagrad, Adadelta."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trials.optim.registry import Group, Numbers, Rule, decay, decayed, move, rule, scaled


@rule("RMSprop")
class RMSprop(Rule):
    """Hinton's lecture; centered: Graves 2013."""

    flags: ClassVar[tuple[str, ...]] = ("maximize", "centered")
    kinds: tuple[str, ...] = ("square_avg", "momentum_buffer")

    def __init__(self, group: Group, kind: type[torch.optim.Optimizer]) -> None:
        """See `Rule`."""
        super().__init__(group, kind)
        if group["centered"]:
            self.kinds = (*self.kinds, "grad_avg")

    def saved(self, group: Group, counts: Mapping[str, float], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """A trial without momentum has no buffer."""
        made = super().saved(group, counts, tensors)
        if not group["momentum"]:
            made.pop("momentum_buffer", None)
        return made

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        made = {"new": 1 - h["alpha"], **decayed(h)}
        if not h["momentum"].any():
            return {**made, **scaled(h["lr"], h["eps"])}
        one = np.ones_like(h["lr"])
        return {**made, **scaled(one, h["eps"]), "momentum": h["momentum"], "minus_rate": -h["lr"]}

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        g = decay(p, g, c, a)
        square = s["square_avg"].lerp_(torch.mul(g, g, out=b), c["new"])
        if "grad_avg" in s:
            mean = s["grad_avg"].lerp_(g, c["new"])
            square = torch.addcmul(square, mean, mean, value=-1, out=b)
        denominator = torch.sqrt(square, out=b).mul_(c["root"]).add_(c["eps"])
        if "momentum" in c:
            buffer = s["momentum_buffer"].mul_(c["momentum"]).addcdiv_(g, denominator)
            p.add_(torch.mul(buffer, c["minus_rate"], out=b))
        else:
            p.addcdiv_(g, denominator, value=-1)


@rule("Adagrad")
class Adagrad(Rule):
    """Duchi et al. 2011."""

    kinds: tuple[str, ...] = ("sum",)

    def saved(self, group: Group, counts: Mapping[str, float], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """It has state before its first step, the initial accumulator."""
        return {"step": torch.tensor(counts["step"]), **tensors}

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        return {**scaled(h["lr"] / (1 + (counts["step"] - 1) * h["lr_decay"]), h["eps"]), **decayed(h)}

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        g = decay(p, g, c, a)
        move(p, g, s["sum"].addcmul_(g, g), c, out=b)


@rule("Adadelta")
class Adadelta(Rule):
    """Zeiler 2012."""

    kinds: tuple[str, ...] = ("square_avg", "acc_delta")

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        return {"new": 1 - h["rho"], "eps": h["eps"], "minus_rate": -h["lr"], **decayed(h)}

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        g = decay(p, g, c, a)
        s["square_avg"].lerp_(torch.mul(g, g, out=b), c["new"])
        root = torch.add(s["square_avg"], c["eps"], out=b).sqrt_()
        step = torch.add(s["acc_delta"], c["eps"]).sqrt_().div_(root).mul_(g)
        s["acc_delta"].lerp_(torch.mul(step, step, out=b), c["new"])
        p.add_(step.mul_(c["minus_rate"]))
