"""What counts as a difference between two steps."""

from math import inf
from typing import Any

import pytest
import torch

from trials.training.audits.compare import Precision, compare
from trials.training.audits.record import BACK, GRADIENT, LAYER, LOSS, OUTPUT, SETTING, STATE, Record

SINGLE = Precision.of([torch.zeros(1)], None)


def record(kind: str, value: Any) -> Record:
    made = Record()
    made.put(kind, "x", value)
    return made


def differs(kind: str, ours: Any, theirs: Any, moved: Any = None) -> bool:
    nudged = [] if moved is None else [record(kind, moved)]
    return not all(found.equal for found in compare(record(kind, ours), record(kind, theirs), nudged, SINGLE))


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        (OUTPUT, torch.ones(3), torch.ones(3).double()),
        (OUTPUT, torch.ones(3), torch.ones(3, 1)),
        (LAYER, torch.ones(3), torch.ones(3) * 1.001),
        (OUTPUT, torch.tensor([1.0, inf]), torch.tensor([1.0, 2.0])),
        (OUTPUT, torch.tensor([1, 2]), torch.tensor([1, 3])),
        (GRADIENT, None, torch.ones(3)),
        (GRADIENT, torch.ones(3), None),
        (STATE, torch.tensor(3.0), torch.tensor(4.0)),
        (STATE, torch.tensor(300_000.0), torch.tensor(300_001.0)),
        (STATE, None, torch.zeros(3)),
        (SETTING, 0.1, 0.10001),
        (SETTING, "sum", "mean"),
        (SETTING, None, 0.0),
    ],
)
def test_different(kind: str, ours: Any, theirs: Any) -> None:
    assert differs(kind, ours, theirs)


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        (LAYER, torch.ones(3), torch.ones(3) * (1 + 1e-6)),
        (OUTPUT, torch.tensor([1.0, torch.nan, inf]), torch.tensor([1.0, torch.nan, -inf])),
        (GRADIENT, None, torch.zeros(3)),
        (LOSS, torch.tensor(2.0), torch.tensor(2.0).double()),
        (SETTING, (0.9, 0.99), (0.9, 0.99)),
        (SETTING, 0.1, 0.1 + 1e-9),
    ],
)
def test_equal_but_for_rounding(kind: str, ours: Any, theirs: Any) -> None:
    assert not differs(kind, ours, theirs)


def test_the_bound_is_the_models_own_sensitivity() -> None:
    lone = torch.tensor([1.0, -1.0, 1e-3])
    assert differs(BACK, lone + 0.01, lone, lone + 1e-5)
    assert not differs(BACK, lone + 0.01, lone, lone - 1e-3)


def test_layers_that_one_side_does_not_show_are_left_out() -> None:
    assert compare(record(LAYER, torch.ones(3)), Record(), [], SINGLE) == []
    assert compare(Record(), record(BACK, torch.ones(3)), [], SINGLE) == []


def test_16_bits_are_summed_in_32() -> None:
    half = Precision.of([torch.zeros(1)], torch.bfloat16)
    assert (half.eps, half.sum_eps) == (2.0**-7, 2.0**-23)
    double = Precision.of([torch.zeros(1).double()], None)
    assert double.eps == double.sum_eps == 2.0**-52
