"""Optimizers without a rule keep all their state, wherever it lies, in all that happens to a trial."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import trials
from tests.support.fused_and_solo import (
    Solo,
    ToyStudy,
    alike,
    assert_fused_is_solo,
    assert_same_trial,
    close,
    members,
    nothing,
    same_bits,
)
from tests.support.own_optimizers import OWN_OPTIMIZERS, Remembering
from tests.support.states import reloaded, states
from trials import FuseError, TrialGroup
from trials.gate.base import OpenGate

Make = Callable[[int, Iterable[Any]], torch.optim.Optimizer]


def with_hook(n: int, ps: Iterable[Any]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(ps, lr=0.01 * (n + 1))

    def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)

    made.register_step_post_hook(shrink)
    return made


def twice(n: int, ps: Iterable[Any]) -> torch.optim.Optimizer:
    own = list(ps)
    with warnings.catch_warnings(action="ignore"):
        return torch.optim.AdamW([*own, own[0]], lr=0.01 * (n + 1))


OWN: dict[str, Make] = {**OWN_OPTIMIZERS, "a hook": with_hook, "a parameter twice": twice}


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, dtype=torch.float64, generator=stream), torch.zeros(6)) for _ in range(count)]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", OWN)
def test_equals_solo(name: str, size: int) -> None:
    assert_fused_is_solo(model, [x for x, _ in batches(3)], OWN[name], steps=7, size=size)


@pytest.mark.parametrize("name", OWN)
def test_state_survives_whatever_happens_to_the_rows(name: str) -> None:
    study = ToyStudy(model, OWN[name], batches(3))
    group, late = (TrialGroup(study, members(study, numbers), OpenGate()) for numbers in ((0, 1, 2), (4,)))
    alone = {number: Solo(study, number) for number in (0, 1, 2, 4, 5)}

    def train(*groups: TrialGroup) -> None:
        for each in groups:
            for x, y in study.data:
                each.train_step(x, y)
            for number in each.numbers:
                for x, y in study.data:
                    alone[number].step(x, y)

    def compare(*groups: TrialGroup) -> None:
        for each in groups:
            for row, number in enumerate(each.numbers):
                assert_same_trial(each, row, alone[number])
            close(each.evaluate(), [alone[number].score() for number in each.numbers], "score")

    train(group, late)
    compare(group)
    group.keep([2, 0, 1])
    group.add(members(study, [5]))
    group.merge(late)
    train(group)
    compare(group)
    halves = group, group.split([1, 3])
    assert [half.numbers for half in halves] == [[2, 1, 4], [0, 5]]
    train(*halves)
    compare(*halves)
    for half in halves:
        restored = reloaded(half)
        assert same_bits(states(restored), states(half))
        train(restored)
        compare(restored)


@pytest.mark.parametrize("name", [name for name in OWN if name != "random numbers"])
def test_in_a_loop_of_ones_own_groups_of_user_and_copy_are_the_same(name: str) -> None:
    models, alone = ([model(n) for n in range(2)] for _ in range(2))
    for mine, other in zip(models, alone, strict=True):
        other.load_state_dict(mine.state_dict())
    optimizers, references = ([OWN[name](n, m.parameters()) for n, m in enumerate(ms)] for ms in (models, alone))
    fused = trials.fuse(models)
    together = trials.fuse_optimizers(optimizers, fused)
    decays = [lr_scheduler.ExponentialLR(o, 0.9) for o in (*optimizers, *references)]
    for x, _ in batches(5):
        together.train()
        together.zero_grad()
        fused(x).square().flatten(1).mean(1).sum().backward()
        together.step()
        for each, reference in zip(alone, references, strict=True):
            getattr(reference, "train", nothing)()
            reference.zero_grad()
            each(x).square().mean().backward()
            reference.step()
        for decay in decays:
            decay.step()
    together.eval()
    for row, (each, reference) in enumerate(zip(alone, references, strict=True)):
        getattr(reference, "eval", nothing)()
        for key, value in fused.extract(row).state_dict().items():
            close(value, each.state_dict()[key], f"row {row} {key}")
        for own in (together.extract(row)["param_groups"], optimizers[row].state_dict()["param_groups"]):
            alike(own, reference.state_dict()["param_groups"], f"row {row}")


class Scheduled(ToyStudy):
    """Schedulers of the whole, of the one inside, and of another number than the rate."""

    scheduler_every = "step"

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        inner = getattr(optimizer, "inner", optimizer)
        return [lr_scheduler.StepLR(inner, 2, 0.5), lr_scheduler.OneCycleLR(optimizer, 0.1, 20, cycle_momentum=False)]


@pytest.mark.parametrize("name", ["in param groups", "around another", "a tensor as rate"])
def test_schedulers_act_on_what_steps(name: str) -> None:
    study = Scheduled(model, OWN[name], batches(4))
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    solos = [Solo(study, n) for n in range(2)]
    schedules = [study.scheduler({}, solo.optimizer) for solo in solos]
    for x, y in [*study.data] * 2:
        group.train_step(x, y)
        group = reloaded(group)
        for solo, own in zip(solos, schedules, strict=True):
            solo.step(x, y)
            for scheduler in own:
                scheduler.step()
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)


class Viewing(torch.optim.SGD):
    """Keeps a view of a parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.flat = self.param_groups[0]["params"][0].detach().view(-1)


class Numbering(torch.optim.SGD):
    """Tells parameters apart by their ids, or by themselves."""

    def __init__(self, params: Iterable[Any], key: Callable[[Any], object]) -> None:
        super().__init__(params, lr=0.1)
        self.key, self.numbers = key, {key(p): number for number, p in enumerate(self.param_groups[0]["params"])}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(1 + self.numbers.get(self.key(p), 100))
        super().step()


class LateViewing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        p = self.param_groups[0]["params"][0]
        self.state[p]["flat"] = p.view(-1)


class Zeroing(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


class Growing(torch.optim.SGD):
    """Adds a group after its first step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


class Enclosing(torch.optim.SGD):
    """Has a function that acts on this very object."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.rate = lambda: self.param_groups[0]["lr"]


class Queueing(torch.optim.SGD):
    """Keeps something that changes and cannot be saved."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.seen = getattr(self, "seen", frozenset()) | {len(self.state)}


class Counting(torch.optim.SGD):
    """Counts the steps of all of its kind."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        type(self).count += 1


def own_step(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    vars(made)["step"] = lambda closure=None: None
    return made


def own_zero_grad(ps: Iterable[Any]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(ps)
    vars(made)["zero_grad"] = lambda set_to_none=True: None
    return made


def untrained(ps: Iterable[Any]) -> torch.optim.Optimizer:
    first, *rest = ps
    made = Remembering(rest, lr=0.1)
    made.other = first  # type: ignore[attr-defined]
    return made


REFUSED: dict[str, tuple[Callable[[Iterable[Any]], torch.optim.Optimizer], str]] = {
    "a view": (Viewing, r"Viewing keeps a view of a parameter as '\.flat'; allowed: the parameter itself, or a copy"),
    "ids": (lambda ps: Numbering(ps, id), r"Numbering keeps id\(p\) of a parameter in '\.numbers', and its copy has"),
    "gradients": (lambda ps: Zeroing(ps, lr=0.1), r"zero_grad\(\) of optimizer Zeroing leaves gradients"),
    "a function": (
        Enclosing,
        r"Enclosing: a copy for its trial still reaches the original Enclosing by '\.rate of 'self'",
    ),
    "its own step": (
        lambda ps: own_step(torch.optim.Rprop(ps)),
        r"Rprop has a step\(\) of its own on this instance; allowed: a method of its class",
    ),
    "its own step, of an optimizer with a rule": (
        lambda ps: own_step(torch.optim.Adam(ps)),
        r"Adam has a step\(\) of its own on this instance; allowed: a method of its class",
    ),
    "its own zero_grad": (own_zero_grad, r"SGD has a zero_grad\(\) of its own on this instance"),
    "untrained": (untrained, r"keeps the parameter '0.weight' as '\.other' and does not train it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    study = ToyStudy(model, lambda n, ps: make(ps))
    with pytest.raises(FuseError, match=message):
        TrialGroup(study, members(study, range(2)), OpenGate())


def itself(parameter: Any) -> Any:
    return parameter


def test_parameters_may_be_told_apart_by_themselves() -> None:
    assert_fused_is_solo(model, [x for x, _ in batches(3)], lambda n, ps: Numbering(ps, itself), steps=3, size=3)


def group_of(make: Make) -> TrialGroup:
    study = ToyStudy(model, make, batches(1))
    return TrialGroup(study, members(study, range(2)), OpenGate())


def test_refused_later() -> None:
    group = group_of(lambda n, ps: LateViewing(ps, lr=0.1))
    group.train_step(*batches(1)[0])
    with pytest.raises(FuseError, match=r"keeps a view of a parameter as '\.state\[a Parameter\]\['flat'\]'"):
        group.keep([1])
    with pytest.raises(FuseError, match="Growing has other parameters than when it was fused"):
        group_of(lambda n, ps: Growing(ps, lr=0.1)).train_step(*batches(1)[0])
    with pytest.raises(FuseError, match="Counting changes an attribute of its class, which all trials have in common"):
        group_of(lambda n, ps: Counting(ps, lr=0.1)).train_step(*batches(1)[0])
    group = group_of(lambda n, ps: Queueing(ps, lr=0.1))
    group.train_step(*batches(1)[0])
    with pytest.raises(FuseError, match=r"'Queueing\.seen' changes while its trial trains, and cannot be saved"):
        states(group)


def test_a_rule_does_not_hide_what_changes_behind_it() -> None:
    models = [model(n) for n in range(2)]
    optimizers = [torch.optim.SGD([*m.parameters()][:2], lr=0.1, momentum=0.9) for m in models]
    fused = trials.fuse(models)
    together = trials.fuse_optimizers(optimizers, fused)
    optimizers[1].param_groups[0]["nesterov"] = True
    with pytest.raises(FuseError, match="optimizer group 0 of SGD: nesterov has changed to True; allowed: changes of"):
        together.step()
    optimizers[1].param_groups[0]["nesterov"] = False
    optimizers[0].add_param_group({"params": [*models[0].parameters()][2:]})
    with pytest.raises(FuseError, match="SGD has other parameters than when it was fused; allowed: all param groups"):
        together.step()


def test_trials_must_agree_in_hooks_and_functions() -> None:
    def some_with_hook(n: int, ps: Iterable[Any]) -> torch.optim.Optimizer:
        return with_hook(n, ps) if n else torch.optim.SGD(ps, lr=0.1)

    def functions(n: int, ps: Iterable[Any]) -> torch.optim.Optimizer:
        made = Remembering(ps, lr=0.1)
        made.rule = lambda k: 1 / (n + k)
        return made

    with pytest.raises(FuseError, match="optimizer: way is 'once per trial', there 'by vectors'"):
        group_of(some_with_hook)
    with pytest.raises(FuseError, match=r"optimizer: Remembering\.rule is"):
        group_of(functions)


def test_one_optimizer_for_two_phases() -> None:
    def twice(n: int, ps: Iterable[Any]) -> Any:
        made = torch.optim.SGD(ps, lr=0.1)
        return {"forward": made, "extra_repr": made}

    with pytest.raises(FuseError, match=r"returned one optimizer for several of .*; allowed: one for each"):
        group_of(twice)
