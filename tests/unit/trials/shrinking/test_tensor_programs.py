"""The rules of width against TP5's table 8, written down here with its forward multiplier on the output."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trials.shrinking.roles import roles
from trials.shrinking.scaled_optimizer import scaled_groups

BASE, WIDTH, INPUTS, OUTPUTS = 64, 16, 5, 3


class Table8(nn.Module):
    """Three layers, where the output is multiplied by base ÷ width."""

    def __init__(self, width: int, multiplier: float) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(INPUTS, width), nn.Linear(width, width)
        self.output = nn.Linear(width, OUTPUTS)
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.hidden(torch.tanh(self.first(x))))
        return self.multiplier * (y @ self.output.weight.T) + self.output.bias


def groups_of_table_8(model: Table8, kind: str, lr: float, eps: float | None) -> list[dict[str, Any]]:
    """Rates in proportion to fans, 1 at the base. Eps follows the gradients, which the table leaves out."""
    wide = WIDTH / BASE
    sgd = kind == "SGD"
    rates = {
        "first.weight": wide if sgd else 1,  # fan_out
        "first.bias": wide if sgd else 1,
        "hidden.weight": 1 if sgd else 1 / wide,  # 1 / fan_in
        "hidden.bias": wide if sgd else 1,
        "output.weight": wide if sgd else 1,  # fan_in, with the multiplier 1 / fan_in
        "output.bias": 1,
    }
    gradients = dict.fromkeys(rates, 1 / wide) | {"output.weight": 1 / wide, "output.bias": 1.0}
    return [
        {"params": [p], "lr": lr * rates[name], **({} if eps is None else {"eps": eps * gradients[name]})}
        for name, p in model.named_parameters()
    ]


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.01, "eps": 1e-3}),
    "adamw without decay": ("AdamW", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.0}),
    "nadam": ("NAdam", {"lr": 0.01, "eps": 1e-3}),
    "adamax": ("Adamax", {"lr": 0.01, "eps": 1e-3}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "eps": 1e-3, "momentum": 0.5}),
    "adagrad": ("Adagrad", {"lr": 0.02, "eps": 1e-3}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_table_8(name: str) -> None:
    kind, settings = SETTINGS[name]
    torch.manual_seed(0)
    target, surrogate = Table8(BASE, 1.0).double(), Table8(WIDTH, 1.0).double()
    theirs = Table8(WIDTH, BASE / WIDTH).double()
    theirs.load_state_dict(surrogate.state_dict())
    with torch.no_grad():
        theirs.output.weight /= theirs.multiplier  # the same function to begin with
    optimizer_class: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind)
    optimizer = optimizer_class(surrogate.parameters(), **settings)
    scaled_groups(optimizer, roles(target, surrogate))
    eps = settings.get("eps")
    written = optimizer_class(groups_of_table_8(theirs, kind, settings["lr"], eps), **settings)
    ours, table = outputs(surrogate, optimizer), outputs(theirs, written)
    assert (ours - table).abs().max() < 1e-10
    assert (table[-1] - table[0]).abs().max() > 0.05


def outputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    stream = torch.Generator().manual_seed(1)
    made: Sequence[Tensor] = []
    for _ in range(10):
        x = torch.randn(6, INPUTS, generator=stream, dtype=torch.float64)
        optimizer.zero_grad()
        y = model(x)
        (y - x[:, :OUTPUTS]).square().mean().backward()
        optimizer.step()
        made = [*made, y.detach()]
    return torch.stack(list(made))
