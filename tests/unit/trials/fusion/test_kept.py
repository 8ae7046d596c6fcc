"""Modules that keep something in attributes for their next call: exact, or refused where it matters."""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, Solo, ToyStudy, assert_same_trial, close, members
from trials import TrialGroup
from trials.fusion.errors import RefusedError

D = 4


class Base(nn.Module):
    """Takes ``x_BTD`` of any length T."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def table(self, length: int) -> Tensor:
        return torch.arange(1.0, length + 1, dtype=torch.float64).outer(torch.tensor([1.0, 0.5, 0.25, 0.1])).cos()


class Rotary(Base):
    """The cosines of the longest input so far, from a buffer."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.5, 0.25, 0.1]))
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self._seq_len_cached:
            self._seq_len_cached = x.shape[1]
            self._cos_cached = torch.arange(x.shape[1], dtype=x.dtype).outer(self.inv_freq).cos()
        assert self._cos_cached is not None
        return self.b(self.a(x) * self._cos_cached[: x.shape[1]]).mean(1)


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


class EmptyBuffer(Base):
    """A buffer that is registered before it is known."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.cos: Tensor | None
        self.register_buffer("cos", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None or len(self.cos) < x.shape[1]:
            self.register_buffer("cos", self.table(x.shape[1]), persistent=False)
        assert self.cos is not None
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
    WithNorm,
]


def inputs(*lengths: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(5, length, D, generator=draws, dtype=torch.float64) for length in lengths]


def study_of(kind: Callable[[int], nn.Module], *lengths: int) -> ToyStudy:
    return ToyStudy(lambda n: kind(n).double(), "adamw", [(x, torch.zeros(len(x))) for x in inputs(*lengths)])


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


@pytest.mark.parametrize("scored_first", [False, True])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_what_depends_on_shapes_alone_is_exact(kind: type[Base], size: int, scored_first: bool) -> None:
    train(study_of(kind, 5, 3, 7, 5, 3), size, scored_first)


class ByWeights(Base):
    """Filled by the weights of whoever comes first."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.a.weight.detach().clone()
        return self.b(x @ self.kept).mean(1)


class ByEqualWeights(ByWeights):
    """Those are the same for all trials at first."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        nn.init.ones_(self.a.weight)


class InABuffer(Base):
    """As `ByWeights`, where neither attributes nor the first call of a trial show it."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.kept: Tensor | None
        self.register_buffer("kept", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.a.weight.detach().clone()
        return self.b(x @ self.kept).mean(1)


class Saved(EmptyBuffer):
    """What a trial alone would save with its weights."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("cos", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None or len(self.cos) < x.shape[1]:
            self.cos = self.table(x.shape[1])
        return self.b(self.a(x) * self.cos[: x.shape[1]]).mean(1)


class FoldedInEvaluation(Base):
    """Running statistics, folded into weights in the first evaluation only."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x)).mean(1)
        if self.training:
            return self.norm(y)
        if self.scale is None:
            assert self.norm.running_var is not None
            self.scale = self.norm.running_var.rsqrt()
        return y * self.scale


class ClearedInTraining(ByWeights):
    """Products of weights in evaluation, forgotten in training: right alone, but that is not for us to know."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = None
            return self.b(x @ self.a.weight).mean(1)
        return super().forward(x)


class ModeOfTheFirst(Base):
    """Half as much where the first call is an evaluation's."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 1.0 if self.training else 0.5
        return self.b(self.a(x)).mean(1) * self.scale


class Counter(Base):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x)).mean(1) * (1.0 if self.calls < 3 else 2.0)


class WarmsUp(Base):
    """Counts what it keeps."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[1])
        return self.b(self.a(x)).mean(1) / min(len(self.seen), 3)


class Longest(Base):
    """The longest input so far changes what shorter ones give."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return self.b(self.a(x)).sum(1) / self.longest


class FixedMask(Base):
    """Dropout that is drawn once for each size."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.masks:
            self.masks[x.shape[1]] = nn.functional.dropout(torch.ones(x.shape[1], 1, dtype=x.dtype))
        return self.b(self.a(x) * self.masks[x.shape[1]]).mean(1)


class SameInput(Base):
    """The last output, if the input is the same object."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not x:
            self.last = x, self.b(self.a(x)).mean(1).detach()
        return self.last[1] + self.a.bias.sum()


class Average(Base):
    """A running mean, outside the buffers, that evaluation uses."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x)).mean(1)
        if self.training:
            own = y.detach().mean(0)
            self.mean = own if self.mean is None else 0.9 * self.mean + 0.1 * own
        return y if self.training or self.mean is None else y - self.mean


class Doubled(Base):
    """An attribute tells that a buffer has been changed, once."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(D))
        self.is_doubled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_doubled:
            self.scale = self.scale * 2
            self.is_doubled = True
        return self.b(self.a(x) * self.scale).mean(1)


class InPlace(Base):
    """A tensor in a list, changed where it is."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.held = [torch.zeros(1, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        self.held[0] += 1
        return self.b(self.a(x)).mean(1) * self.held[0]


class OfTheClass(Base):
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if OfTheClass.kept is None:
            OfTheClass.kept = self.a.weight.detach().clone()
        return self.b(x @ OfTheClass.kept).mean(1)


KEPT: dict[int, Tensor] = {}


class Global(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in KEPT:
            KEPT[x.shape[1]] = self.a.weight.detach().clone()
        return self.b(x @ KEPT[x.shape[1]]).mean(1)


@lru_cache
def doubled(weight: Tensor) -> Tensor:
    return weight.detach() * 2


class InACache(Base):
    """A method that computes once."""

    @lru_cache  # noqa: B019 - that is what is tried
    def weight(self) -> Tensor:
        return self.a.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x @ self.weight() + self.a(x)).mean(1)


class InACacheOfAFunction(Base):
    """A function that computes once for each tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x @ doubled(self.a.weight) + self.a(x)).mean(1)


class WeightsInALayer(Base):
    """The layer that keeps them has no layers inside."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(D))
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = self.weight.detach() * 1.5
            return x @ self.kept + self.weight.sum()

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layer = self.Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.layer(self.a(x))).mean(1)


REFUSED: list[type[Base]] = [
    *(ByWeights, ByEqualWeights, InABuffer, Saved, FoldedInEvaluation, ClearedInTraining, ModeOfTheFirst, Counter),
    *(WarmsUp, Longest, FixedMask, SameInput, Average, Doubled, InPlace, OfTheClass, Global, WeightsInALayer),
    *(InACache, InACacheOfAFunction),
]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_results_depend_on_is_refused(
    kind: type[Base], looks: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfTheClass, "kept", None)
    KEPT.clear()

    class Looks(kind):  # type: ignore[valid-type, misc]
        """Only a loop over the trials computes it."""

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y * (1 + self.b.weight.mean().item())

    study = study_of(Looks if looks else kind, 3, 5, 3)
    with pytest.raises(RefusedError, match=r"its forward changes the .*; allowed: "):
        group = TrialGroup(study, members(study, range(size)), RecordingGate())
        for x, y in study.data:
            group.train_step(x, y)
        group.evaluate()
