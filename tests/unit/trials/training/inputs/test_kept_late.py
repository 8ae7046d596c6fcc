"""What a loss keeps anywhere, and needs only later, or begins to keep later: it is looked at again and again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import Batch, ToyStudy, members
from trials import TrialGroup
from trials.fusion.errors import RefusedError
from trials.gate.base import OpenGate

Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Keeping(ToyStudy):
    """Has what a loss may use."""

    number = 0

    def __init__(self) -> None:
        super().__init__(lambda n: nn.Linear(4, 2).double(), "sgd", _batches())
        self.count = 0


def _batches() -> list[Batch]:
    stream = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, dtype=torch.float64, generator=stream), torch.zeros(6)) for _ in range(2)]


def _late(outputs: Tensor, count: int) -> Tensor:
    return outputs.square().mean() * (1.0 if count < 6 else 2.0)


COUNT, CALLS = 0, list[int]()


def by_a_global_number(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return _late(outputs, COUNT)


def by_a_global_list(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    CALLS.append(1)
    return _late(outputs, len(CALLS))


def by_its_class(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    type(self).number += 1
    return _late(outputs, self.number)


def _with_default() -> Loss:
    def by_default(self: Any, outputs: Tensor, targets: Tensor, calls: Any = [0]) -> Tensor:  # noqa: B006 - it is tried
        calls.append(1)
        return _late(outputs, len(calls))

    return by_default


def _enclosing() -> Loss:
    calls = 0

    def enclosed(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return _late(outputs, calls)

    return enclosed


ELSEWHERE: dict[str, tuple[Callable[[], Loss], str]] = {
    "a global number": (lambda: by_a_global_number, "the global variable 'COUNT'"),
    "a global list": (lambda: by_a_global_list, "the global variable 'CALLS'"),
    "its class": (lambda: by_its_class, "attribute 'number'"),
    "a default": (_with_default, "the default arguments of 'by_default'"),
    "a variable around it": (_enclosing, "the enclosed variable 'calls'"),
}


def _train(loss: Loss, size: int, mark: int = -1) -> None:
    """Train on batches of which all from number `mark` on have targets of 1."""
    global COUNT
    COUNT = 0
    CALLS.clear()
    kind: type[Keeping] = type("Own", (Keeping,), {"loss": loss})
    study = kind()
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    for step in range(12):
        inputs, targets = study.data[step % 2]
        group.train_step(inputs, torch.ones_like(targets) if 0 <= mark <= step else targets)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_begins_to_matter_late_is_refused_wherever_it_is(name: str, size: int) -> None:
    make, where = ELSEWHERE[name]
    with pytest.raises(RefusedError, match=rf"Study\.loss changes .*{where}, on which its results depend"):
        _train(make(), size)


def counting_late(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.sum().item():
        self.count += 1
    return outputs.square().mean() * (1 + self.count)


@pytest.mark.parametrize("size", [1, 2])
def test_so_is_what_begins_to_be_kept_late(size: int) -> None:
    with pytest.raises(RefusedError, match=r"Study\.loss changes the study's attribute 'count'"):
        _train(counting_late, size, mark=2)


NOTES: list[float] = []


def noting(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    loss = outputs.square().mean()
    NOTES.append(loss.item())
    return loss


def test_looking_again_leaves_nothing_elsewhere() -> None:
    NOTES.clear()
    _train(noting, 2)
    assert len(NOTES) <= 2 * 12 + 4  # the first look
