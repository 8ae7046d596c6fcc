"""Losses and scores that draw random numbers, wherever their code is."""

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as other_name

from tests.support.fused_and_solo import Solo, ToyStudy, assert_same_trial, members
from trials import TrialGroup
from trials.gate.base import OpenGate


class Padded(nn.Module):
    """Its output lies in the order of channels_last, which its pad would lose under vmap."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.conv, self.asks = nn.Conv2d(3, 4, 1), asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks:
            list(x.shape)  # not traced
        return functional.pad(self.conv(x), (1, 1, 1, 1))


def _study(kind: type[ToyStudy] = ToyStudy, asks: bool = False) -> ToyStudy:
    stream = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 3, 4, 4, dtype=torch.float64, generator=stream) for _ in range(2)]
    last = [(x.to(memory_format=torch.channels_last), torch.zeros(4)) for x in data]
    return kind(lambda n: Padded(asks).double(), "sgd", last)


def _drop(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.dropout(outputs, 0.4).square().mean()


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.4)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self.layer(outputs)
        return found.square().mean()


class ByAttribute(ToyStudy):
    criterion: Any

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self.criterion(outputs, targets)
        return found


class ByOtherName(ToyStudy):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return other_name(outputs, 0.4).square().mean()


@pytest.fixture
def elsewhere() -> Iterator[types.ModuleType]:
    """A module of the user's beside the study's."""
    made = types.ModuleType("losses_of_a_user")
    code = "from torch.nn import functional as F\ndef drop(o, t):\n    return F.dropout(o, 0.4).square().mean()\n"
    exec(code, vars(made))
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def _set(loss: Any) -> Callable[[bool], ToyStudy]:
    def make(asks: bool) -> ToyStudy:
        study = _study(asks=asks)
        study.loss = loss  # type: ignore[method-assign]
        return study

    return make


def _holding(criterion: Any) -> Callable[[bool], ToyStudy]:
    def make(asks: bool) -> ToyStudy:
        study = _study(ByAttribute, asks)
        study.criterion = criterion  # type: ignore[attr-defined]
        return study

    return make


STUDIES: dict[str, Callable[[bool], ToyStudy]] = {
    "set": _set(_drop),
    "set, with arguments": _set(partial(_drop)),
    "a module": _set(Criterion()),
    "a function held": _holding(_drop),
    "a module held": _holding(Criterion()),
    "by another name": partial(_study, ByOtherName),
}


def _assert_as_alone(study: ToyStudy) -> None:
    group, solos = TrialGroup(study, members(study, range(3)), OpenGate()), [Solo(study, n) for n in range(3)]
    for batch in study.data:
        group.train_step(*batch)
        for solo in solos:
            solo.step(*batch)
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", STUDIES)
def test_outputs_keep_their_order_for_a_loss_that_draws(name: str, asks: bool) -> None:
    _assert_as_alone(STUDIES[name](asks))


def test_they_do_for_one_that_lies_elsewhere(elsewhere: types.ModuleType) -> None:
    class ByModule(ToyStudy):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            found: Tensor = elsewhere.drop(outputs, targets)
            return found

    _assert_as_alone(_study(ByModule))
