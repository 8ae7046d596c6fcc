"""Outputs that are dataclasses, made by a traced forward, under `vmap` and in a loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import TwoLayers, assert_fused_is_alone, batches
from trials import FuseError


@dataclass
class Output:
    logits: Tensor
    hidden: Any = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor


@dataclass
class Outer:
    inside: Frozen
    logits: Tensor


@dataclass
class Summed:
    """Has more than what it is made of."""

    logits: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.logits.sum()


class OfLogits(ToyStudy):
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().loss(outputs.logits, targets)

    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        return outputs.logits.mean()


def result(m: TwoLayers, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh())


MADE: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda y: Output(y, {"all": [y * 2]}, 3),
    "frozen": Frozen,
    "nested": lambda y: Outer(Frozen(y), y),
}
WAYS: dict[str, Callable[[TwoLayers, Tensor], bool]] = {
    "rules": lambda m, x: False,
    "vmap": lambda m, x: not isinstance(m.a(x), Tensor),
    "loop": lambda m, x: float(m.a(x).sum()) > 1e9,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_it_is_what_a_trial_alone_returns(name: str, way: str) -> None:
    def forward(m: TwoLayers, x: Tensor) -> Any:
        return MADE[name](result(m, x) * (2.0 if WAYS[way](m, x) else 1.0))

    found = assert_fused_is_alone(OfLogits(lambda n: TwoLayers(forward).double(), batches=batches()), 3)
    assert found.startswith({"rules": "rule"}.get(way, way))


def test_one_between_layers() -> None:
    def forward(m: TwoLayers, x: Tensor) -> Tensor:
        made = Output(m.a(x).tanh())
        return m.b(made.logits)

    found = assert_fused_is_alone(ToyStudy(lambda n: TwoLayers(forward).double(), batches=batches()), 3)
    assert found.startswith("rule")


def test_one_that_has_more_is_refused() -> None:
    study = OfLogits(lambda n: TwoLayers(lambda m, x: Summed(result(m, x))).double(), batches=batches())  # type: ignore[arg-type, return-value]
    with pytest.raises(FuseError, match=r"the Summed of module .* cannot be returned for several trials at once"):
        assert_fused_is_alone(study, 3)
