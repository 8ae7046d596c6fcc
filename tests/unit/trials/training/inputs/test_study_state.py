"""What a study's methods keep, in its attributes or elsewhere: refused if a trial's results would depend on others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import Batch, Solo, ToyStudy, assert_same_trial, close, members
from trials import FuseError, TrialGroup
from trials.fusion.errors import RefusedError
from trials.gate.base import OpenGate

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches() -> list[Batch]:
    stream = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, dtype=torch.float64, generator=stream), torch.ones(6)) for _ in range(2)]


def plain(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class Keeping(ToyStudy):
    """Has attributes that a loss may use."""

    def __init__(self) -> None:
        super().__init__(model, "sgd", batches())
        self.count, self.first, self.table = 0, None, None
        self.seen: list[float] = []
        self.mean = torch.zeros((), dtype=torch.float64)
        self.stream = torch.Generator().manual_seed(1)


def study_of(loss: Loss) -> ToyStudy:
    kind: type[Keeping] = type("Own", (Keeping,), {"loss": loss})
    return kind()


def train(study: ToyStudy, size: int) -> TrialGroup:
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    for batch in study.data:
        group.train_step(*batch)
    return group


def counting(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    self.count += 1
    return plain(outputs) * min(1.0, self.count / 10)


def late(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    self.count += 1
    return plain(outputs) * (1.0 if self.count < 6 else 2.0)


def averaging(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    loss = plain(outputs)
    self.mean = 0.9 * self.mean + 0.1 * loss.detach()
    return loss / self.mean


def averaging_in_place(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    loss = plain(outputs)
    self.mean.lerp_(loss.detach(), 0.1)
    return loss * self.mean.item()


def of_the_first(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    loss = plain(outputs)
    if self.first is None:
        self.first = loss.item()
    return loss / self.first


def in_a_list(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    self.seen.append(plain(outputs).item())
    return plain(outputs) / max(self.seen)


def drawing(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    return plain(outputs) * (1 + torch.rand((), generator=self.stream).item())


DEPENDING: dict[str, tuple[Loss, str]] = {
    "a count": (counting, "count"),
    "a mean": (averaging, "mean"),
    "a mean in place": (averaging_in_place, "mean"),
    "a list": (in_a_list, "seen"),
    "a random stream": (drawing, "stream"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", DEPENDING)
def test_a_loss_that_depends_on_what_it_keeps_is_refused(name: str, size: int) -> None:
    loss, attribute = DEPENDING[name]
    with pytest.raises(RefusedError, match=rf"Study\.loss changes the study's attribute '{attribute}', on which"):
        train(study_of(loss), size)


def test_so_is_one_that_keeps_what_was_first() -> None:
    with pytest.raises(RefusedError, match=r"Study\.loss changes the study's attribute 'first'"):
        train(study_of(of_the_first), 3)


class Criterion(nn.Module):
    """Divides by the mean over its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Tensor) -> Tensor:
        loss = plain(outputs)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


CRITERION, CALLS, COUNT = Criterion(), [0], 0


def by_a_global_module(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = CRITERION(outputs)
    return loss


def by_a_global_number(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return plain(outputs) * min(1.0, COUNT / 1000)


def counted() -> int:
    CALLS.append(1)
    return len(CALLS)


def by_a_function(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    return plain(outputs) * counted()


def by_its_class(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    type(self).number += 1
    return plain(outputs) * self.number


def by_a_class(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    Counted.number += 1
    return plain(outputs) * Counted.number


class Counted:
    number = 0


def by_default(self: Any, outputs: Tensor, targets: Tensor, calls: Any = [0]) -> Tensor:  # noqa: B006 - that is tried
    calls.append(1)
    return plain(outputs) * len(calls)


def enclosing() -> Loss:
    calls = [0]

    def enclosed(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return plain(outputs) * len(calls)

    return enclosed


ELSEWHERE: dict[str, tuple[Loss, str]] = {
    "a global module": (by_a_global_module, "the global variable 'CRITERION'"),
    "a global number": (by_a_global_number, "the global variable 'COUNT'"),
    "a list of a function's": (by_a_function, "the global variable 'CALLS'"),
    "its class": (by_its_class, "Own's attribute 'number'"),
    "another class": (by_a_class, "Counted's attribute 'number'"),
    "a default": (by_default, "the default arguments of 'by_default'"),
    "a variable around it": (enclosing(), "the enclosed variable 'calls'"),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_so_is_one_that_keeps_it_elsewhere(name: str, size: int) -> None:
    loss, where = ELSEWHERE[name]
    study = study_of(loss)
    type(study).number = 0  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match=rf"Study\.loss changes {where}, on which its results depend"):
        train(study, size)


def test_so_is_one_that_the_study_holds() -> None:
    study = study_of(noting)
    study.loss = enclosing().__get__(study)  # type: ignore[method-assign]
    with pytest.raises(RefusedError, match=r"Study\.loss changes the study's attribute 'loss', on which"):
        train(study, 3)


def tabled(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Makes once what each call would make again."""
    if self.table is None:
        self.table = torch.linspace(0.5, 1.0, outputs.shape[-1], dtype=outputs.dtype)
    return plain(outputs * self.table)


def noting(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Keeps for its user what no result depends on."""
    loss = plain(outputs)
    self.seen.append(loss.item())
    self.first = loss.detach()
    return loss


SEEN: list[float] = []


def noting_elsewhere(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    loss = plain(outputs)
    SEEN.append(loss.item())
    return loss


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", [tabled, noting, noting_elsewhere], ids=["table", "notes", "notes elsewhere"])
def test_what_results_do_not_depend_on_may_be_kept(loss: Loss, size: int) -> None:
    study = study_of(loss)
    group = train(study, size)
    assert len(study.seen) in (0, 2 * size)  # type: ignore[attr-defined]  # the trial of it has left nothing
    for row in range(size):
        solo = Solo(study_of(loss), row)
        for batch in solo.study.batches(0):
            solo.step(*batch)
        assert_same_trial(group, row, solo)
        close(group.losses_K()[row].item(), solo.loss, "loss")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_loss_that_changes_its_targets_is_refused(in_a_loop: bool, size: int) -> None:
    def loss(self: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        targets.add_(1)
        return plain(outputs) * targets.mean() * (plain(outputs).item() ** 0 if in_a_loop else 1)

    with pytest.raises(RefusedError, match=r"Study\.loss changes the targets in place"):
        train(study_of(loss), size)


class Regularized(ToyStudy):
    """Its loss looks at the model that was built last."""

    net: nn.Module

    def model(self, params: dict[str, Any]) -> nn.Module:
        self.net = super().model(params)
        return self.net

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return plain(outputs) + self.penalty()

    def penalty(self) -> Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.net.parameters()]).sum()


class Weighted(ToyStudy):
    """The same for a number."""

    weight: float

    def model(self, params: dict[str, Any]) -> nn.Module:
        self.weight = 1.0 + params["n"]
        return super().model(params)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return plain(outputs) * self.weight


def test_a_part_of_a_trial_that_building_keeps_for_its_loss_is_refused() -> None:
    study = Regularized(model, "sgd", batches())
    with pytest.raises(FuseError, match=r"building a trial sets the study's attribute 'net' anew"):
        members(study, [0])
    assert "net" not in vars(study)


def test_what_building_sets_for_its_loss_and_each_trial_anew_is_refused() -> None:
    study = Weighted(model, "sgd", batches())
    members(study, [0])
    with pytest.raises(FuseError, match=r"building a trial sets the study's attribute 'weight' anew"):
        members(study, [1])
    assert study.weight == 1.0


class Caching(ToyStudy):
    """Building sets what is the same for all trials, or what only building reads."""

    def model(self, params: dict[str, Any]) -> nn.Module:
        self.weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
        self.number = params["n"]
        return super().model(params)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return plain(outputs * self.weights)


def test_what_is_the_same_for_all_trials_may_be_set() -> None:
    train(Caching(model, "sgd", batches()), 3)


class Annealing(ToyStudy):
    """Its loss looks at the epoch that was read last."""

    def batches(self, epoch: int) -> list[Batch]:
        self.epoch = epoch
        return batches()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return plain(outputs) * (self.epoch + 1)


class AnnealingWithinAGenerator(Annealing):
    """The same, later."""

    def batches(self, epoch: int) -> Any:
        for number, batch in enumerate(batches()):
            self.epoch = epoch + number
            yield batch


@pytest.mark.parametrize("kind", [Annealing, AnnealingWithinAGenerator])
def test_what_reading_an_epoch_sets_for_the_loss_is_refused(kind: type[Annealing]) -> None:
    study = kind(model, "sgd", batches())
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    with pytest.raises(RefusedError, match=r"Study.batches sets the study's attribute 'epoch' anew, .*; allowed: to"):
        for epoch in range(2):
            for batch in group.batches(epoch):
                group.train_step(*batch)


class Loading(ToyStudy):
    """Reads its data with the first epoch, and counts epochs for nobody but itself."""

    weight: Any = None

    def batches(self, epoch: int) -> list[Batch]:
        self.weight, self.read = torch.tensor(2.0, dtype=torch.float64), epoch
        return batches()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return plain(outputs) * self.weight


def test_what_is_the_same_in_all_epochs_may_be_set() -> None:
    study = Loading(model, "sgd", batches())
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    for epoch in range(3):
        for batch in group.batches(epoch):
            group.train_step(*batch)


@pytest.mark.parametrize("size", [1, 2])
def test_so_is_what_begins_to_matter_late(size: int) -> None:
    study = study_of(late)
    group = train(study, size)
    with pytest.raises(RefusedError, match=r"Study.loss changes the study's attribute 'count', on which its results"):
        for _ in range(4):
            group = TrialGroup(study, [group.export(row) for row in range(size)], OpenGate())
            for batch in study.data:
                group.train_step(*batch)
