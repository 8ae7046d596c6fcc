"""Adam and its kin: AdamW, NAdam, RAdam, Adamax."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trials.optim.registry import Group, Numbers, Rule, SinglePass, Tensors, decay, decayed, move, rule, scaled


class Moments(Rule):
    """Shared by the family: running means of the gradient and of its square, with weight decay of either sort."""

    flags: ClassVar[tuple[str, ...]] = ("maximize", "decoupled_weight_decay")
    kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, group: Group, kind: type[torch.optim.Optimizer]) -> None:
        """See `Rule`."""
        super().__init__(group, kind)
        # older versions of PyTorch mark AdamW by its class alone
        self.decoupled = bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW))

    def moments(self, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], b: Tensor) -> None:
        """Advance both means."""
        s["exp_avg"].lerp_(g, c["new1"])
        s["exp_avg_sq"].lerp_(torch.mul(g, g, out=b), c["new2"])

    def weights(self, h: Numbers) -> dict[str, NDArray[Any]]:
        """The coefficients of `moments` and of `decay`."""
        return {"new1": 1 - h["beta1"], "new2": 1 - h["beta2"], **decayed(h, self.decoupled)}


@rule("Adam", "AdamW")
class Adam(Moments, SinglePass):
    """Kingma and Ba 2015, algorithm 1; decoupled decay: Loshchilov and Hutter 2019."""

    flags: ClassVar[tuple[str, ...]] = (*Moments.flags, "amsgrad")
    multi_tensor: ClassVar[str | None] = "adam"
    shared: ClassVar[frozenset[str]] = frozenset(("beta1", "beta2", "eps"))

    def __init__(self, group: Group, kind: type[torch.optim.Optimizer]) -> None:
        """See `Rule`."""
        super().__init__(group, kind)
        if group["amsgrad"]:
            self.kinds = (*self.kinds, "max_exp_avg_sq")

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        step = counts["step"]
        return {
            **self.weights(h),
            **scaled(h["lr"] / (1 - h["beta1"] ** step), h["eps"], (1 - h["beta2"] ** step) ** -0.5),
            "rate": h["lr"],
        }

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        self.moments(decay(p, g, c, a), s, c, b)
        square = s["exp_avg_sq"]
        if "max_exp_avg_sq" in s:
            square = s["max_exp_avg_sq"].copy_(torch.maximum(s["max_exp_avg_sq"], square, out=b))
        move(p, s["exp_avg"], square, c, out=b)

    def kernel(self, p: Tensors, g: Tensors, s: dict[str, Tensors], h: Mapping[str, float], step: Tensor) -> None:
        """See `SinglePass`; it is that of ``fused=True``."""
        largest = s.get("max_exp_avg_sq", [])
        (torch._fused_adamw_ if self.decoupled else torch._fused_adam_)(
            *(p, g, s["exp_avg"], s["exp_avg_sq"], largest, [step] * len(p)),
            lr=h["lr"],
            beta1=h["beta1"],
            beta2=h["beta2"],
            weight_decay=h["weight_decay"],
            eps=h["eps"],
            amsgrad=bool(largest),
            maximize=False,
        )


@rule("NAdam")
class NAdam(Moments):
    """Dozat 2016."""

    counts = ("step", "mu_product")

    def start(self, state: Mapping[str, Any], like: Tensor) -> dict[str, float]:
        """See `Rule`."""
        return {"step": float(state.get("step", 0.0)), "mu_product": float(state.get("mu_product", 1.0))}

    def count(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """`torch.optim` keeps the product in the default type, and so does this."""
        kind = np.float64 if torch.get_default_dtype() == torch.float64 else np.float32
        step = counts["step"] + 1
        product = counts["mu_product"].astype(kind) * _mu(h, step).astype(kind)
        return {"step": step, "mu_product": product.astype(np.float64)}

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        step, product = counts["step"], counts["mu_product"]
        following = _mu(h, step + 1)
        return {
            **self.weights(h),
            "gradient": -h["lr"] * (1 - _mu(h, step)) / (1 - product),
            "mean": -h["lr"] * following / (1 - product * following),
            "correction": 1 / (1 - h["beta2"] ** step),
            "eps": h["eps"],
        }

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        g = decay(p, g, c, a)
        self.moments(g, s, c, b)
        denominator = torch.mul(s["exp_avg_sq"], c["correction"], out=b).sqrt_().add_(c["eps"])
        step = torch.mul(g, c["gradient"], out=a).add_(s["exp_avg"] * c["mean"])
        p.add_(step.div_(denominator))


@rule("RAdam")
class RAdam(Moments):
    """Liu et al. 2020: in its first steps a trial moves along the mean alone."""

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """A trial that is not rectified yet has the denominator 0·√v + 1."""
        step, beta2 = counts["step"], h["beta2"]
        correction2 = 1 - beta2**step
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * step * beta2**step / correction2
        ready = length > 5
        one = np.where(ready, length, 6.0)  # keeps the root real where it is not used
        top = np.where(ready, limit, 6.0)
        rect = ((one - 4) * (one - 2) * top / ((top - 4) * (top - 2) * one)) ** 0.5
        first = h.get("unrectified", 1.0)  # a surrogate's multiplier of steps that are not rectified
        rate = h["lr"] / (1 - h["beta1"] ** step) * np.where(ready, rect * correction2**0.5, first)
        return {**self.weights(h), **scaled(rate, np.where(ready, h["eps"], 1.0), np.where(ready, 1.0, 0.0))}

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        self.moments(decay(p, g, c, a), s, c, b)
        move(p, s["exp_avg"], s["exp_avg_sq"], c, out=b)


@rule("Adamax")
class Adamax(Rule):
    """Kingma and Ba 2015, algorithm 2."""

    kinds: tuple[str, ...] = ("exp_avg", "exp_inf")

    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """See `Rule`."""
        rate = -h["lr"] / (1 - h["beta1"] ** counts["step"])
        return {"new1": 1 - h["beta1"], "beta2": h["beta2"], "eps": h["eps"], "minus_rate": rate, **decayed(h)}

    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """See `Rule`."""
        g = decay(p, g, c, a)
        s["exp_avg"].lerp_(g, c["new1"])
        largest = s["exp_inf"].mul_(c["beta2"])
        largest.copy_(torch.maximum(largest, torch.abs(g, out=b).add_(c["eps"]), out=b))
        p.add_(torch.div(s["exp_avg"], largest, out=a).mul_(c["minus_rate"]))


def _mu(h: Numbers, step: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(h["beta1"] * (1 - 0.5 * 0.96 ** (step * h["momentum_decay"])))
