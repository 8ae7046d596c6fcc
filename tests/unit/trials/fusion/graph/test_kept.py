"""Modules that keep something in attributes for their next call, on which no result depends: exact."""

from collections import OrderedDict
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, Solo, ToyStudy, assert_same_trial, close, members
from tests.support.keeping import Base, D, EmptyBuffer, Rotary, study_of
from tests.support.slow_cases import others_slow
from trials import TrialGroup


class OwnRotary(Rotary):
    """Trials with other frequencies."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.inv_freq *= 1 + number


class RotaryLayer(nn.Module):
    """A layer of its own, as in most libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None or self.cached.shape[0] != x.shape[1]:
            self.cached = torch.arange(x.shape[1], dtype=x.dtype).cos().unsqueeze(1)
        return x * self.cached


class WithLayer(Base):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.rotary = RotaryLayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.rotary(self.a(x))).mean(1)


class ReadsTheLayers(WithLayer):
    """Code around the layer reads what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.rotary(self.a(x))
        assert self.rotary.cached is not None
        return self.b(y + self.rotary.cached).mean(1)


class Rebuilt(Base):
    """A plain tensor that is made for 3 positions, and again for longer inputs."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.cos = self.table(3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.cos):
            self.cos = self.table(x.shape[1])
        return self.b(self.a(x) * self.cos[: x.shape[1]]).mean(1)


class ByShape(Base):
    """Masks in a dictionary, by length."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.masks: dict[tuple[int, bool], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = (x.shape[1], self.training)
        if key not in self.masks:
            self.masks[key] = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return self.b(self.masks[key] @ self.a(x)).mean(1)


class Nested(Base):
    """In an object in an attribute, in order of use, with the oldest forgotten."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.store = {"deep": OrderedDict[int, Tensor]()}

    def forward(self, x: Tensor) -> Tensor:
        own = self.store["deep"]
        if x.shape[1] not in own:
            own[x.shape[1]] = self.table(x.shape[1])
            if len(own) > 1:
                own.popitem(last=False)
        return self.b(self.a(x) + own[x.shape[1]]).mean(1)


@lru_cache
def cosines(length: int) -> tuple[Tensor, Tensor]:
    x = torch.arange(1.0, length + 1, dtype=torch.float64).unsqueeze(1)
    return x.cos(), x.sin()


class ByFunction(Base):
    """In a function's cache, by length."""

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = cosines(x.shape[1])
        return self.b(self.a(x) * cos + sin).mean(1)


class Shown(Base):
    """What the last call made, for whoever looks; written before it is read."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x)
        return self.b(self.last.tanh()).mean(1)


class ClearedByTraining(Base):
    """Products of weights, kept for evaluation until the next training."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.product: Tensor | None = None

    def train(self, mode: bool = True) -> "ClearedByTraining":
        if mode:
            self.product = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.b(x @ self.a.weight).mean(1)
        if self.product is None:
            self.product = self.a.weight @ self.b.weight.t()
        return (x @ self.product + self.b.bias).mean(1)


class ClearedInTraining(ClearedByTraining):
    """The same, where the forward itself forgets."""

    def train(self, mode: bool = True) -> "ClearedInTraining":
        return super(ClearedByTraining, self).train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.product = None
        return super().forward(x)


class InstallsHooks(Base):
    """Hooks of its own, on a layer with a rule, at the first call."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.is_installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_installed:
            self.a.register_forward_hook(lambda module, args, output: output * 2)
            self.is_installed = True
        return self.b(self.a(x)).mean(1)


class WithItem(Rotary):
    """Only a loop over the trials computes it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.a.weight.mean().item())


class WithDropout(ByShape):
    """Besides, not in what is kept."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class WithNorm(Rotary):
    """Buffers that each call changes, beside what is kept."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


EXACT: list[type[Base]] = [
    *(
        Rotary,
        OwnRotary,
        WithLayer,
        ReadsTheLayers,
        Rebuilt,
        EmptyBuffer,
        ByShape,
        Nested,
        Shown,
        WithItem,
        WithDropout,
    ),
    *(WithNorm, ClearedByTraining, ClearedInTraining, InstallsHooks),
]


def train(study: ToyStudy, size: int, scored_first: bool = False) -> TrialGroup:
    """Train and score all trials, fused and alone, and compare them after each step."""
    group = TrialGroup(study, members(study, range(size)), RecordingGate())
    solos = [Solo(study, number) for number in range(size)]
    if scored_first:
        close(group.evaluate(), [solo.score() for solo in solos], "first score")
    for x, y in study.data:
        group.train_step(x, y)
        for row, solo in enumerate(solos):
            solo.step(x, y)
            assert_same_trial(group, row, solo)
    close(group.losses_K(), torch.tensor([solo.loss for solo in solos], dtype=torch.float64), "loss")
    close(group.evaluate(), [solo.score() for solo in solos], "score")
    return group


WAYS = [(size, scored_first) for size in (1, 3) for scored_first in (False, True)]


@pytest.mark.parametrize(
    ("kind", "size", "scored_first"),
    others_slow(
        [(kind, *way) for kind in EXACT for way in WAYS],
        [*((kind, 3, False) for kind in EXACT), *((kind, 1, True) for kind in EXACT[::4])],
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_depends_on_shapes_alone_is_exact(kind: type[Base], size: int, scored_first: bool) -> None:
    train(study_of(kind, 5, 3, 5), size, scored_first)  # another shape, and back
