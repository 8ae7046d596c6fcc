"""What building a trial sets where all trials look is refused, if it is the trial's own and read later."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy, members
from tests.support.two_layers import batches
from trials import FuseError

CONFIG: dict[str, Any] = {"scale": 1.0, "names": ["a"]}
SETTINGS = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
SCALES: list[float] = [1.0]
SCALE = 1.0
TABLES: dict[int, Tensor] = {}
BUILT = [0]


class Scaled(nn.Module):
    scale: ClassVar[float] = 1.0
    built: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scales = Scaled.scale, CONFIG["scale"], SETTINGS.inner.scale, SCALES[0], SCALE
        y: Tensor = self.layer(x) * scales[0] * scales[1] * scales[2] * scales[3] * scales[4]
        return y * TABLES[4] if 4 in TABLES else y


class Masks:
    """Makes masks once for each length."""

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}
        self.lengths: set[int] = set()
        self.by_kind: dict[str, dict[int, Tensor]] = {"causal": {}}

    def of(self, length: int) -> Tensor:
        self.lengths.add(length)
        self.by_kind["causal"].setdefault(length, torch.ones(()))
        return self.made.setdefault(length, torch.ones(()))


MASKS = Masks()


class Masked(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        MASKS.of(length)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * MASKS.of(4)
        return y


class OfClass(ToyStudy):
    def model(self, params: dict[str, Any]) -> nn.Module:
        Scaled.scale = 1.0 + params["n"]
        return Scaled()


class OfTable(ToyStudy):
    def model(self, params: dict[str, Any]) -> nn.Module:
        CONFIG["scale"] = 1.0 + params["n"]
        return Scaled()


class OfNamespace(ToyStudy):
    def model(self, params: dict[str, Any]) -> nn.Module:
        SETTINGS.inner.scale = 1.0 + params["n"]
        return Scaled()


class OfList(ToyStudy):
    def model(self, params: dict[str, Any]) -> nn.Module:
        SCALES[0] = 1.0 + params["n"]
        return Scaled()


class OfGlobal(ToyStudy):
    def model(self, params: dict[str, Any]) -> nn.Module:
        set_scale(params["n"])
        return Scaled()


def set_scale(n: int) -> None:
    global SCALE
    SCALE = 1.0 + n


class OfStudy(ToyStudy):
    def model(self, params: dict[str, Any]) -> nn.Module:
        self.options = getattr(self, "options", {})
        self.options["scale"] = 1.0 + params["n"]
        return Scaled()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().mean() * self.options["scale"]


def state() -> tuple[Any, ...]:
    return Scaled.scale, CONFIG["scale"], SETTINGS.inner.scale, SCALES[0], SCALE


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (OfClass, "Scaled's attribute 'scale'"),
        (OfTable, "the global variable 'CONFIG'"),
        (OfNamespace, "the global variable 'SETTINGS'"),
        (OfList, "the global variable 'SCALES'"),
        (OfGlobal, "the global variable 'SCALE'"),
        (OfStudy, "the study's attribute 'options'"),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_set_for_each_trial_is_refused_and_put_back(kind: type[ToyStudy], what: str, first: int) -> None:
    """Also if the first trial's is what was there before."""
    study = kind(lambda n: Scaled(), "sgd", batches())
    try:
        members(study, [first])
        before = state()
        with pytest.raises(FuseError, match=rf"building a trial sets {what} anew, .*allowed: "):
            members(study, [2])
        assert state() == before
        members(study, [first])
    finally:
        Scaled.scale = CONFIG["scale"] = SETTINGS.inner.scale = SCALES[0] = 1.0
        set_scale(0)


class Counting(ToyStudy):
    """Counts its trials where nothing looks later, and fills a table as it is needed."""

    def model(self, params: dict[str, Any]) -> nn.Module:
        BUILT[0] += 1
        Scaled.built += 1
        if params["n"]:
            TABLES.setdefault(3 + params["n"], torch.ones(()))
        return Scaled()


def test_counters_and_tables_that_grow_are_not() -> None:
    study = Counting(lambda n: Scaled(), "sgd", batches())
    members(study, range(3))
    assert BUILT[0] >= 3 and TABLES
    TABLES.clear()


class Caching(ToyStudy):
    """Builds models that share an object with tables in it."""

    def model(self, params: dict[str, Any]) -> nn.Module:
        return Masked(MASKS.of(4 + params["n"]).numel() + params["n"])


def test_tables_inside_of_objects_may_grow_too() -> None:
    study = Caching(lambda n: Scaled(), "sgd", batches())
    members(study, range(3))
    assert len(MASKS.made) > 2
