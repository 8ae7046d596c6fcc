"""Optimizers of users' own that keep state in other places than `torch.optim`'s do."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Adapting(torch.optim.Optimizer):
    """Finds its own rate, and keeps it in its param groups, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        total = torch.zeros((), dtype=torch.float64)
        super().__init__(params, {"lr": lr, "d": 1e-3, "k": 0, "norms": [], "total": total})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(p.grad.square().sum().item() for p in group["params"] if p.grad is not None)
            group["total"] += norm
            group["norms"].append(norm)
            group["d"] = max(group["d"], group["total"].sqrt().item() / (group["k"] + 1))
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"] / (1 + len(group["norms"])))


class Averaging(torch.optim.Optimizer):
    """Trains other weights than it evaluates, as schedule-free optimizers do."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False)

    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"] if group["training"] is not training else []:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - beta if training else 1 - 1 / beta)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            weight, beta = 1 / group["k"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight).sub_(p.grad, alpha=group["lr"] * (1 - beta * (1 - weight)))
                z.sub_(p.grad, alpha=group["lr"])


class Remembering(torch.optim.Optimizer):
    """Keeps its state in attributes, and under other keys than parameters."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        shared: dict[Any, Any] = self.state
        shared["k"] = torch.tensor([0])
        self.steps, self.scale = 0, np.float64(1.0)
        self.means = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}
        self.first = self.param_groups[0]["params"][0]
        self.rule = lambda k: 1 / (1 + k)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        shared: dict[Any, Any] = self.state
        shared["k"] += 1
        self.scale *= np.float64(0.9)
        self.last: Tensor = torch.zeros(1) if self.first.grad is None else self.first.grad.clone()
        for p, mean in self.means.items():
            if p.grad is None:
                continue
            mean.lerp_(p.grad, 0.1)
            rate = self.param_groups[0]["lr"] * self.rule(self.steps) * float(self.scale)
            p.sub_(mean + self.last.mean() / shared["k"], alpha=rate)


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019, as most write it: around another optimizer, with that one's groups and state."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count = inner, every, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = defaultdict(dict)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, own in zip(group["params"], slow, strict=True):
                    own.lerp_(p, 0.5)
                    p.copy_(own)


class Bare(Lookahead):
    """The same, but without what `torch.optim.Optimizer` sets and nobody needs for training."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        del self.defaults


class Assigning(torch.optim.Optimizer):
    """Gives its parameters new data instead of changing it, and looks at marks of theirs."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for index, p in enumerate(self.param_groups[0]["params"]):
            p.data = p.data * 0.5
            p.rate = 1.0 + index

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.rate * p.grad


class Noisy(torch.optim.Optimizer):
    """Langevin dynamics: draws from the global stream, and from one of its own."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.stream = torch.Generator().manual_seed(7)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            own = 0 if p.grad is None else p.grad
            p.sub_(own + 0.01 * torch.randn_like(p), alpha=self.param_groups[0]["lr"])
            p.add_(torch.randn(p.shape, dtype=p.dtype, generator=self.stream), alpha=0.01)


OWN_OPTIMIZERS: dict[str, Callable[[int, Iterable[Any]], torch.optim.Optimizer]] = {
    "in param groups": lambda n, ps: Adapting(ps, lr=0.1 * (n + 1)),
    "two modes": lambda n, ps: Averaging(ps, lr=0.1 * (n + 1), beta=0.9 - 0.1 * n),
    "in attributes": lambda n, ps: Remembering(ps, lr=0.1 * (n + 1)),
    "around another": lambda n, ps: Lookahead(torch.optim.Adam(ps, lr=0.02 * (n + 1)), 2 + n),
    "without defaults": lambda n, ps: Bare(torch.optim.SGD(ps, lr=0.02 * (n + 1), momentum=0.9)),
    "around one with attributes": lambda n, ps: Lookahead(Remembering(ps, lr=0.1 * (n + 1))),
    "assigned data": lambda n, ps: Assigning(ps, lr=0.1 * (n + 1)),
    "random numbers": lambda n, ps: Noisy(ps, lr=0.1 * (n + 1)),
    "a tensor as rate": lambda n, ps: torch.optim.Adam(ps, lr=torch.tensor(0.01 * (n + 1)), foreach=False),
}
"""Where the state lies -> the optimizer of trial `n` over its parameters."""
