"""A loss or a score that takes its trial's hyperparameters. Each fused trial is as the trial alone."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.fused_and_solo import OPTIMIZERS, Batch, Solo, assert_same_trial, close
from tests.support.logged import logged
from tests.support.rich_study import RichSolo, RichStudy
from tests.support.slow_cases import others_slow
from trials import FuseError, TrialGroup, build_member
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.inputs.batches import fuse_batches


@pytest.fixture(autouse=True)
def set_up() -> Iterator[None]:
    with logged():
        yield


def params_of(n: int) -> dict[str, Any]:
    return {
        "n": n,
        "weight": 0.25 * n,
        "smoothing": 0.1 * n,
        "even": n % 2 == 0,
        "kind": ("squares", "absolute", "squares")[n % 3],
        "limit": None if n == 1 else 0.5,
        "mixed": (1, 0.5, 2)[n % 3],
        "same": 0.125,
        "inner": {"powers": [2 + n, 3]},
        **({"rare": 5} if n == 2 else {}),
    }


Loss = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


def branching(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    return y.square().mean() if params["weight"] > 0.2 else y.abs().mean()


def asking_for_the_type(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    return y.mean() * params["weight"] if isinstance(params["weight"], float) else y.std()


def either(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    return (F.mse_loss if params["kind"] == "squares" else F.l1_loss)(y, F.one_hot(t, 3).to(y))


def limited(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    return (y if params["limit"] is None else y.clamp(max=params["limit"])).mean()


def asking_what_is_equal(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    return y.mean() * float(params["same"]) if params["same"] > 0.1 else y.std()


def growing(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    weight = params["weight"]
    weight += 1  # of a plain number, this leaves params as it was
    return y.square().mean() * weight


MAPPED: dict[str, Loss] = {
    "weight": lambda y, t, params: F.cross_entropy(y, t) + params["weight"] * y.square().mean(),
    "smoothing": lambda y, t, params: F.cross_entropy(y, t, label_smoothing=params["smoothing"]),
    "smoothing of a layer": lambda y, t, params: nn.CrossEntropyLoss(label_smoothing=params["smoothing"])(y, t),
    "smoothing, some ignored": lambda y, t, params: F.cross_entropy(
        y, t, label_smoothing=params["smoothing"], ignore_index=1
    ),
    "smoothing, weighted": lambda y, t, params: F.cross_entropy(
        y, t, torch.tensor([1, 2, 0.5], dtype=y.dtype), label_smoothing=params["smoothing"], ignore_index=1
    ),
    "smoothing of shares": lambda y, t, params: F.cross_entropy(
        y, F.one_hot(t, 3).to(y), label_smoothing=params["smoothing"], reduction="sum"
    ),
    "power": lambda y, t, params: (y ** params["inner"]["powers"][0]).mean() / params["inner"]["powers"][1],
    "whole and broken numbers": lambda y, t, params: y.mean() / params["mixed"],
    "what is equal": asking_what_is_equal,
}
LOOPED: dict[str, tuple[Loss, str]] = {
    "a branch": (branching, "data-dependent control flow"),
    "a plain number": (lambda y, t, params: y.mean() * float(params["weight"]), "vmap"),
    "math": (lambda y, t, params: y.square().mean() * math.exp(params["weight"]), "vmap"),
    "its type": (asking_for_the_type, "with the trials' params as tensors it gives other values than"),
    "text": (either, "params['kind'] is 'squares' in one trial and 'absolute' in another"),
    "None": (limited, "params['limit'] is 0.5 in one trial and None in another"),
    "whether": (
        lambda y, t, params: y.mean() * (2 if params["even"] else 3),
        "params['even'] is True in one trial and False in another",
    ),
    "what one trial has": (
        lambda y, t, params: y.mean() * params.get("rare", 2),
        "not all trials have params['rare']",
    ),
    "whether one has it": (
        lambda y, t, params: y.std() if "rare" in params else y.mean(),
        "not all trials have params['rare']",
    ),
    "all": (
        lambda y, t, params: y.mean() * sum(value for value in params.values() if isinstance(value, float)),
        "params['even'] is True in one trial and False in another",
    ),
    "all by name": (
        lambda y, t, params: y.mean() * len({**params}),
        "params['even'] is True in one trial and False in another",
    ),
    "a number that grows": (growing, "changes a number of params in place"),
    "how many": (lambda y, t, params: y.mean() * len(params), "params['even'] is True in one trial"),
}
CASES = {**MAPPED, **{name: loss for name, (loss, _) in LOOPED.items()}}


class Losses(RichStudy):
    """Its loss and score are functions."""

    function: Loss
    kind = torch.float64

    def loss(self, outputs: Tensor, targets: Tensor, params: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return self.function(outputs, targets, params)

    def score(self, outputs: Tensor, targets: Tensor, params: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return self.function(outputs, targets, params) + params["n"]


def batch(seed: int, kind: torch.dtype = torch.float64) -> Batch:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=draws).to(kind), torch.randint(3, (6,), generator=draws)


def study_of(function: Any, kind: torch.dtype = torch.float64) -> Losses:
    def make(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(kind)

    class Own(Losses):
        pass

    Own.function = staticmethod(function)
    return Own(make, OPTIMIZERS["adamw"], [batch(n, kind) for n in range(3)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("size", "own"), others_slow([(1, False), (1, True), (3, False), (3, True)], [(1, False), (3, True)])
)
def test_each_trial_has_its_own(name: str, size: int, own: bool, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(CASES[name])
    audit = Audit(study)
    group = TrialGroup(study, [build_member(study, n, params_of(n)) for n in range(size)], OpenGate(), audit)
    solos = [Solo(study, n, params_of(n)) for n in range(size)]
    for step in range(3):
        given = [batch(10 * n + step) if own else study.data[step] for n in range(size)]
        group.train_step(*fuse_batches(given))
        for solo, each in zip(solos, given, strict=True):
            solo.step(*each)
    close(group.losses_K(), torch.tensor([solo.loss for solo in solos], dtype=torch.float64), "loss")
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)
    close(group.evaluate(), [solo.score() for solo in solos], "score")
    assert audit.done >= 2 and not audit.mismatches
    said = capsys.readouterr().err
    looped = size > 1 and name in LOOPED
    # PyTorch's own code selects the weights of labels by a mask, which `vmap` cannot if each trial has its labels
    masked = size > 1 and own and name == "smoothing, weighted"
    assert said.count("Study.loss runs once for each trial: ") == (looped or masked)
    assert said.count("Study.score runs once for each trial: ") == looped
    assert not looped or LOOPED[name][1] in said


def test_what_is_said_once_is_said_for_each_study(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        study = study_of(branching)
        for _ in range(2):
            group = TrialGroup(study, [build_member(study, n, params_of(n)) for n in range(2)], OpenGate())
            group.train_step(*study.data[0])
    assert capsys.readouterr().err.count("Study.loss runs once for each trial") == 2


def test_trials_that_join_and_leave_have_theirs() -> None:
    study = study_of(MAPPED["smoothing"])
    group = TrialGroup(study, [build_member(study, n, params_of(n)) for n in (0, 1)], OpenGate())
    solos = {n: Solo(study, n, params_of(n)) for n in range(4)}

    def step(number: int) -> None:
        group.train_step(*study.data[number])
        for n in group.numbers:
            solos[n].step(*study.data[number])

    step(0)
    group.add([build_member(study, n, params_of(n)) for n in (2, 3)])
    step(1)
    group.keep([3, 1])
    step(2)
    assert group.numbers == [3, 1]
    for row, n in enumerate(group.numbers):
        assert_same_trial(group, row, solos[n])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_numbers_do_not_change_types(kind: torch.dtype) -> None:
    study = study_of(MAPPED["weight"], kind)
    group = TrialGroup(study, [build_member(study, n, params_of(n)) for n in range(3)], OpenGate(), Audit(study))
    solos = [Solo(study, n, params_of(n)) for n in range(3)]
    for given in study.data:
        group.train_step(*given)
        for solo in solos:
            solo.step(*given)
    for row, solo in enumerate(solos):
        for name, value in solo.model.state_dict().items():
            found = group.extract(row)[0][name]
            assert found.dtype == kind
            torch.testing.assert_close(found, value)


def test_smoothing_beyond_its_range_fails_as_alone() -> None:
    study = study_of(MAPPED["smoothing"])
    group = TrialGroup(study, [build_member(study, n, {"n": n, "smoothing": 0.7 * n}) for n in range(3)], OpenGate())
    with pytest.raises(RuntimeError, match=r"label_smoothing must be between 0\.0 and 1\.0"):
        group.train_step(*study.data[0])


class TwoHeads(nn.Module):
    """A head that the loss of some trials alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.further = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.tanh(self.body(x))
        return self.main(found), self.further(found)


def with_a_further_head(outputs: Any, targets: Tensor, params: dict[str, Any]) -> Tensor:
    y, further = outputs
    loss = y.square().mean()
    return loss + params["weight"] * further.square().mean() if params["weight"] > 0 else loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_the_loss_of_one_trial_does_not_use_gets_no_gradient_there(accumulate: int) -> None:
    study = study_of(with_a_further_head)
    study.make = lambda n: TwoHeads().double()
    study.data, study.accumulate = [batch(n) for n in range(4)], accumulate
    group = TrialGroup(study, [build_member(study, n, params_of(n)) for n in range(3)], OpenGate())
    for each in group.batches(0):
        group.train_step(*each)
    for row in range(3):
        solo = RichSolo(study, row)
        solo.params = params_of(row)
        for at in range(0, 4, accumulate):
            solo.step(*study.data[at : at + accumulate])
        assert_same_trial(group, row, solo)


def halving(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    params["weight"] = params["weight"] * 0.5
    return y.square().mean() * params["weight"]


def halving_inside(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    params["inner"]["powers"][0] += 1
    return (y.abs() + 1).pow(params["inner"]["powers"][0]).mean()


def counting(y: Tensor, t: Tensor, params: dict[str, Any]) -> Tensor:
    params["calls"] = params.get("calls", 0) + 1
    return y.square().mean() * params["calls"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", [halving, halving_inside, counting])
def test_a_loss_that_changes_the_hyperparameters_is_refused(loss: Loss, size: int) -> None:
    study = study_of(loss)
    group = TrialGroup(study, [build_member(study, n, params_of(n)) for n in range(1, size + 1)], OpenGate())
    with pytest.raises(FuseError, match="changes params"):
        group.train_step(*study.data[0])
