"""An audit finds each old fault of fused training again, as soon as what mends it is undone."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import old_faults
from tests.support.audited import data
from tests.support.fused_and_solo import ToyStudy, members
from tests.support.old_faults import Undo
from tests.support.own_optimizers import Adapting
from tests.support.random_models.surroundings import Scaled
from tests.support.two_layers import Forward, TwoLayers, plain
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit, Mismatch


def held(m: TwoLayers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
    return m.b(y)


def uncast(m: TwoLayers, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = m.a(x)
    return m.b(y)


def another_mode(m: TwoLayers, x: Tensor) -> Tensor:
    m.drop.eval()
    y = m.drop(m.a(x))
    m.drop.train(m.training)
    return m.b(y)


def frozen(m: TwoLayers, x: Tensor) -> Tensor:
    m.a.requires_grad_(False)
    return plain(m, x)


def by_sign(m: Any, x: Tensor) -> Tensor:
    """Uses one of its layers, by a number of its own."""
    y: Tensor = m.a(x) if m.sign.item() > 0 else m.b(x)
    return y


def with_sign(n: int) -> Callable[[Any], None]:
    return lambda m: m.register_buffer("sign", torch.tensor((-1.0) ** n))


def transposed(m: TwoLayers) -> None:
    m.double()  # it would untie them
    m.b.weight = nn.Parameter(m.a.weight.detach().t())


def pooled(n: int) -> nn.Module:
    pool = nn.AdaptiveAvgPool2d([1 + n % 2, 2 - n % 2])  # type: ignore[arg-type]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), pool, nn.Flatten(), nn.Linear(2, 3))


def normed(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and trials of which it would change the results.

    Attributes:
        undo: what mends it.
        make: the model of trial n.
        optimizer: see `ToyStudy`.
        says: what the audit says of it.
        size: how many trials.
        lowered: whether they train in bfloat16 under autocast.
    """

    undo: Undo
    make: Callable[[int], nn.Module]
    says: str
    optimizer: Any = "sgd"
    size: int = 2
    lowered: bool = False


def of(forward: Forward) -> Callable[[int], nn.Module]:
    return lambda n: TwoLayers(forward)


FAULTS: dict[str, Fault] = {
    "a context manager vanishes": Fault(
        undo=old_faults.surroundings_vanish, make=of(held), says="gradient of a."
    ),
    "autocast that is off vanishes": Fault(
        undo=old_faults.surroundings_vanish, make=of(uncast), says="output of a.Linear is bfloat16", lowered=True
    ),
    "a mode is frozen": Fault(undo=old_faults.modes_frozen, make=of(another_mode), says="output of drop.Dropout"),
    "a frozen layer is trained": Fault(undo=old_faults.modes_frozen, make=of(frozen), says="gradient of a."),
    "a random number is frozen": Fault(
        undo=old_faults.streams_in_common, make=of(lambda m, x: plain(m, x) * random.random()), size=1, says="output"
    ),
    "an answer is frozen": Fault(
        undo=old_faults.questions_frozen,
        make=of(lambda m, x: plain(m, x * 3 if type(x) is Tensor else x)),
        says="output of a.Linear",
    ),
    "a backward is lost": Fault(
        undo=old_faults.backward_lost,
        make=of(lambda m, x: m.b(Scaled.apply(m.a(x), m.b.bias))),
        says="gradient",
    ),
    "an optimizer's numbers are reset": Fault(
        undo=old_faults.settings_forgotten, make=of(plain), optimizer=lambda n, ps: Adapting(ps, 0.1), says="setting"
    ),
    "a gradient of zero for none": Fault(
        undo=old_faults.zeros_for_none,
        make=lambda n: TwoLayers(by_sign, with_sign(n)),
        optimizer=lambda n, ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1),
        says="update of",
    ),
    "lists are not compared": Fault(undo=old_faults.lists_not_compared, make=pooled, says="has shape"),
    "shared memory is untied": Fault(
        undo=old_faults.memory_untied, make=lambda n: TwoLayers(plain, transposed), says="update of"
    ),
    "a norm has another type": Fault(
        undo=old_faults.other_types, make=normed, says="output of 1.LayerNorm is float32, alone bfloat16", lowered=True
    ),
}  # fmt: skip


def found_in(fault: Fault) -> list[Mismatch]:
    """What the audits of all steps find, until the trials are refused."""
    kind = torch.float32 if fault.lowered else torch.float64
    study = ToyStudy(lambda n: fault.make(n).to(kind), fault.optimizer, data(kind=kind))
    study.autocast = torch.bfloat16 if fault.lowered else None
    found: list[Mismatch] = []
    audit = Audit(study, on_mismatch=found.append)
    audit.tables = []  # whatever it costs
    try:
        group = TrialGroup(study, members(study, range(fault.size)), OpenGate(), audit)
        for batch in [*study.data] * 2:
            group.unproven = {"training"}
            group.train_step(*batch)
    except FuseError:
        pass
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    assert not found_in(fault), "the mend holds: equal, or refused"
    fault.undo(monkeypatch)
    found = found_in(fault)
    assert found and fault.says in found[0].what, found
