"""Every optimizer of torch's in several settings: name -> what makes that of trial n."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

Make = Callable[[int, Iterable[Any]], torch.optim.Optimizer]


class Signs(torch.optim.Optimizer):
    """Moves by the sign of the gradient, and remembers what it was given."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.first = self.param_groups[0]["params"][0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.first is self.param_groups[0]["params"][0]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["last"] = p.grad.clone() + state.get("last", 0.0)
                p.sub_(state["last"].sign() + p, alpha=group["lr"])


SETTINGS: dict[str, Make] = {
    "sgd": lambda n, ps: torch.optim.SGD(ps, lr=0.02 * n),
    "sgd with decay": lambda n, ps: torch.optim.SGD(ps, lr=0.02, weight_decay=0.1 * n),
    "sgd with momentum": lambda n, ps: torch.optim.SGD(ps, lr=0.02, momentum=0.4 * n),
    "sgd with dampening": lambda n, ps: torch.optim.SGD(ps, lr=0.02, momentum=0.4 * n, dampening=0.3 * n),
    "sgd, nesterov": lambda n, ps: torch.optim.SGD(ps, lr=0.02, momentum=0.3 + 0.2 * n, nesterov=True),
    "sgd, maximize": lambda n, ps: torch.optim.SGD(ps, lr=0.001, momentum=0.3 * n, weight_decay=0.1, maximize=True),
    "adam": lambda n, ps: torch.optim.Adam(ps, lr=0.003 * n),
    "adam with decay": lambda n, ps: torch.optim.Adam(ps, lr=0.003, weight_decay=0.1 * n),
    "adam, amsgrad": lambda n, ps: torch.optim.Adam(ps, betas=(0.2 * n, 0.5 + 0.1 * n), amsgrad=True),
    "adam, maximize": lambda n, ps: torch.optim.Adam(ps, lr=0.01, eps=10.0 ** (-3 - n), maximize=True),
    "adamw": lambda n, ps: torch.optim.AdamW(ps, lr=0.003 * (n + 1), weight_decay=0.1 * n),
    "adamw without decay": lambda n, ps: torch.optim.AdamW(ps, weight_decay=0.0),
    "adamw, amsgrad": lambda n, ps: torch.optim.AdamW(ps, lr=0.01 * n, amsgrad=True),
    "adamw, maximize": lambda n, ps: torch.optim.AdamW(ps, lr=0.01 * n, betas=(0.9 - 0.2 * n, 0.99), maximize=True),
    "nadam": lambda n, ps: torch.optim.NAdam(ps, lr=0.003 * n, betas=(0.9 - 0.1 * n, 0.9), momentum_decay=0.01 * n),
    "nadam with decay": lambda n, ps: torch.optim.NAdam(ps, lr=0.01, weight_decay=0.1 * n, eps=1e-4, maximize=True),
    "nadamw": lambda n, ps: torch.optim.NAdam(ps, lr=0.01, weight_decay=0.1 * n, decoupled_weight_decay=True),
    "radam": lambda n, ps: torch.optim.RAdam(ps, lr=0.01 * n, betas=(0.9 - 0.1 * n, 0.5 + 0.16 * n), eps=1e-4),
    "radam with decay": lambda n, ps: torch.optim.RAdam(ps, lr=0.01, weight_decay=0.1 * n, maximize=True),
    "radamw": lambda n, ps: torch.optim.RAdam(ps, lr=0.01, weight_decay=0.1 * n, decoupled_weight_decay=True),
    "adamax": lambda n, ps: torch.optim.Adamax(ps, lr=0.01 * n, betas=(0.3 * n, 0.9 - 0.2 * n), eps=10.0 ** (-3 - n)),
    "adamax with decay": lambda n, ps: torch.optim.Adamax(ps, weight_decay=0.2 * n, maximize=True),
    "rmsprop": lambda n, ps: torch.optim.RMSprop(ps, lr=0.003 * n, alpha=0.9 - 0.2 * n, eps=10.0 ** (-3 - n)),
    "rmsprop, centered": lambda n, ps: torch.optim.RMSprop(ps, momentum=0.4 * n, centered=True, eps=1e-2),
    "rmsprop with decay": lambda n, ps: torch.optim.RMSprop(ps, momentum=0.9, weight_decay=0.1 * n, maximize=True),
    "adagrad": lambda n, ps: torch.optim.Adagrad(ps, lr=0.01 * n, lr_decay=0.1 * n, initial_accumulator_value=0.1 * n),
    "adagrad with decay": lambda n, ps: torch.optim.Adagrad(ps, weight_decay=0.1 * n, eps=0.01 * (n + 1)),
    "adadelta": lambda n, ps: torch.optim.Adadelta(ps, lr=0.5 * n, rho=0.9 - 0.2 * n, eps=10.0 ** (-3 - n)),
    "adadelta with decay": lambda n, ps: torch.optim.Adadelta(ps, weight_decay=0.1 * n, maximize=True),
    "rprop": lambda n, ps: torch.optim.Rprop(ps, lr=0.003 * (n + 1), etas=(0.5, 1.1 + 0.1 * n)),
    "asgd": lambda n, ps: torch.optim.ASGD(ps, lr=0.01 * (n + 1), t0=2.0 + n, weight_decay=0.1 * n),
    "adafactor": lambda n, ps: torch.optim.Adafactor(ps, lr=0.01 * (n + 1), weight_decay=0.1 * n),
    "a class of the user's own": lambda n, ps: Signs(ps, lr=0.01 * (n + 1)),
}
