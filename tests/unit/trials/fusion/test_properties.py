"""Random small networks that mix layers and functional code: fused equals solo, whatever they are."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fused_and_solo import assert_fused_is_solo

WIDTH = 4
"""Every operation keeps ``x_BD`` with D = 4, so that any two can follow each other."""

Build = Callable[[int], nn.Module]

LAYERS: dict[str, Build] = {
    "linear": lambda n: nn.Linear(WIDTH, WIDTH),
    "norm": lambda n: nn.LayerNorm(WIDTH, eps=1e-5 * (n + 1)),
    "batch norm": lambda n: nn.BatchNorm1d(WIDTH, momentum=0.1 * (n + 1)),
    "dropout": lambda n: nn.Dropout(0.2 * n),
    "relu": lambda n: nn.ReLU(inplace=True),
    "prelu": lambda n: nn.PReLU(WIDTH),
    "tanh": lambda n: nn.Tanh(),
    "convolution": lambda n: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 1), nn.MaxPool1d(2), nn.Flatten()
    ),
}

CODE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "gate": lambda x, y: x * torch.sigmoid(y),
    "cat": lambda x, y: functional.avg_pool1d(torch.cat([x, y], 1), 2),
    "cat and slice": lambda x, y: torch.cat((x[:, :1], y[..., 1:]), dim=-1),
    "stack": lambda x, y: torch.stack([x, y]).mean(0),
    "permute": lambda x, y: x.view(-1, 2, 2).permute(0, 2, 1).flatten(1) - y,
    "product": lambda x, y: torch.bmm(x.unsqueeze(1), y.view(-1, 4, 1).tanh()).squeeze(2) + x,
    "in place": lambda x, y: (x * 1).add_(y),
    "augmented": lambda x, y: _augmented(x, y),
    "mean": lambda x, y: x - y.mean(dim=1, keepdim=True) + y.mean(),
    "softmax": lambda x, y: functional.softmax(x, dim=-1) + y,
    "data": lambda x, y: x if x.sum() > y.sum() else y * 2,
    "number": lambda x, y: x * (1 + y.abs().mean().item()),
    "mask": lambda x, y: torch.where(x > y, x, 0.5 * y),
    "sort": lambda x, y: torch.sort(x, dim=1)[0] + y,
    "clamp": lambda x, y: x.clamp(-1, 1) + y.size(-1) / len(y),
}


def _augmented(x: Tensor, y: Tensor) -> Tensor:
    z = x + 0.5
    alias = z
    z *= y
    return alias + z


class Net(nn.Module):
    """Steps that each take two earlier values; a layer may be used again."""

    def __init__(self, steps: list[tuple[str, int, int]], n: int) -> None:
        super().__init__()
        self.steps = [*steps]
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({name: LAYERS[name](n) for name, _, _ in steps if name in LAYERS})

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.first(x)]
        for name, one, other in self.steps:
            if name in LAYERS:
                # its own copy where the layer works in place: an autograd error otherwise, alone too
                value = values[one % len(values)]
                values.append(self.layers[name](value * 1 if name == "relu" else value))
            else:
                values.append(CODE[name](values[one % len(values)], values[other % len(values)]))
        return self.last(values[-1] + values[1])


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from([*LAYERS, *CODE]), st.integers(0, 7), st.integers(0, 7)), min_size=2, max_size=6
    ),
    st.sampled_from(["sgd", "adamw"]),
)
def test_random_network(steps: list[tuple[str, int, int]], optimizer: Any) -> None:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(len(steps)))
    assert_fused_is_solo(lambda n: Net(steps, n), [x, x.roll(1, 0)], optimizer, steps=2, size=2)
