"""Two layers, with any code between them; and a study's steps of it fused and alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import Batch, Solo, ToyStudy, assert_same_trial, close, members
from trials import TrialGroup
from trials.gate.base import OpenGate

Forward = Callable[["TwoLayers", Tensor], Tensor]


class TwoLayers(nn.Module):
    """A forward given by the test, over layers that it may call."""

    def __init__(self, forward: Forward, extra: Callable[["TwoLayers"], None] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(4)
        self.code = forward
        self.held: Any
        if extra is not None:
            extra(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def plain(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh())


def hooked(m: TwoLayers, x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """Both layers, with a hook on the value between them."""
    y: Tensor = m.a(x)
    if y.requires_grad:
        y.register_hook(hook)
    out: Tensor = m.b(y)
    return out


def batches(count: int = 3) -> list[Batch]:
    stream = torch.Generator().manual_seed(7)
    return [(torch.randn(5, 4, dtype=torch.float64, generator=stream), torch.zeros(5)) for _ in range(count)]


def assert_fused_is_alone(study: ToyStudy, size: int, before_step: Callable[[int], object] = lambda step: None) -> str:
    """Train `size` trials fused and alone, compare everything, and return how the first layer was computed."""
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    solos = [Solo(study, number) for number in range(size)]
    for step, batch in enumerate(study.data):
        before_step(step)
        group.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    close(group.losses_K().double(), torch.tensor([solo.loss for solo in solos], dtype=torch.float64), "loss")
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    close(group.evaluate(), [solo.score() for solo in solos], "score")
    return group.ways()[0][1]
