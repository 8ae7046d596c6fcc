"""Modules that keep something in attributes for their next call, on which results depend: refused."""

from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import RecordingGate, members
from tests.support.keeping import Base, D, EmptyBuffer, Rotary, study_of
from tests.support.slow_cases import crossed
from trials import TrialGroup
from trials.fusion.errors import RefusedError


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

    scale: Tensor

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(D))
        self.is_doubled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_doubled:
            self.scale = self.scale * 2
            self.is_doubled = True
        return self.b(self.a(x) * self.scale).mean(1)


class ScaledByTheFirst(Base):
    """An attribute tells that a parameter has been set by the first input."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(x.std((0, 1)))
            self.is_set = True
        return self.b(self.a(x) * self.scale).mean(1)


class CentredByTheFirst(Base):
    """The same for a buffer."""

    mean: Tensor

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_set:
            self.mean.copy_(x.mean((0, 1)))
            self.is_set = True
        return self.b(self.a(x - self.mean)).mean(1)


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
    *(ByWeights, ByEqualWeights, InABuffer, Saved, FoldedInEvaluation, ModeOfTheFirst, Counter),
    *(WarmsUp, Longest, FixedMask, SameInput, Average, Doubled, InPlace, OfTheClass, Global, WeightsInALayer),
    *(ScaledByTheFirst, CentredByTheFirst, InACache, InACacheOfAFunction),
]


class InAnotherMethod(Rotary):
    """What one method keeps, another reads."""

    def early(self, x: Tensor) -> Tensor:
        return Rotary.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).mean(1) * (1 + self._seq_len_cached)


@pytest.mark.parametrize("size", [1, 3])
def test_what_one_of_several_methods_keeps_is_refused(size: int) -> None:
    study = study_of(InAnotherMethod, 3, 5)
    study.make_optimizer = lambda n, ps: {"early": torch.optim.SGD(ps, lr=0.1)}  # type: ignore[return-value]
    group = TrialGroup(study, members(study, range(size)), RecordingGate())
    with pytest.raises(RefusedError, match="its forward changes the attribute"):
        group.train_step(*study.data[0])


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(
    ("kind", "size"), crossed(REFUSED, [1, 3], 3), ids=lambda value: getattr(value, "__name__", None)
)
def test_what_results_depend_on_is_refused(
    kind: type[Base], looks: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfTheClass, "kept", None)
    KEPT.clear()

    class Looks(kind):  # type: ignore[valid-type]
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
