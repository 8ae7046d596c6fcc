"""A user's own training loop over a fused module: its optimizers fused too."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import trials
from tests.support.fused_and_solo import OPTIMIZERS, close
from trials import FuseError


def network(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def two_groups(n: int, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    weight, *others = parameters
    groups = [{"params": [weight], "lr": 0.01 * (n + 1)}, {"params": others, "weight_decay": 0.1 * n}]
    return torch.optim.Adam(groups, lr=0.02)


CASES: dict[str, Callable[[int, Iterable[Any]], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "param groups": two_groups,
    "once per trial": lambda n, ps: torch.optim.Rprop(ps, lr=0.01 * (n + 1)),
}


def step(outputs: Tensor, optimizer: Any) -> None:
    """One step; the loss is each trial's own, summed over the trials if there are any."""
    optimizer.zero_grad()
    outputs.square().mean((-2, -1)).sum().backward()
    optimizer.step()


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for kind, value in state.items():
            close(actual["state"][index][kind], value, f"{index} {kind}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_fused_optimizers(name: str, own: bool) -> None:
    models = [network(n) for n in range(3)]
    alone = copy.deepcopy(models)
    optimizers, references = (
        [CASES[name](n, model.parameters()) for n, model in enumerate(group)] for group in (models, alone)
    )
    x_KB = torch.randn(3, 5, 4, dtype=torch.float64)
    x_KB = x_KB if own else x_KB[:1].expand(3, 5, 4)
    for model, optimizer, other, reference, x_B in zip(models, optimizers, alone, references, x_KB, strict=True):
        step(model(x_B), optimizer)  # a state to start with
        step(other(x_B), reference)
    fused = trials.fuse(models)
    together = trials.fuse_optimizers(optimizers, fused)
    schedulers = [[lr_scheduler.ExponentialLR(o, 0.9) for o in group] for group in (optimizers, references)]
    for _ in range(5):
        step(fused(trials.PerTrial(x_KB) if own else x_KB[0]), together)
        for model, reference, x_B in zip(alone, references, x_KB, strict=True):
            step(model(x_B), reference)
        for scheduler in (*schedulers[0], *schedulers[1]):
            scheduler.step()
    for row, (model, reference) in enumerate(zip(alone, references, strict=True)):
        for key, value in fused.extract(row).state_dict().items():
            close(value, model.state_dict()[key], f"row {row} {key}")
        assert_same_state(together.extract(row), reference.state_dict())
        ordinary = CASES[name](row, fused.extract(row).parameters())
        ordinary.load_state_dict(together.extract(row))
        assert_same_state(ordinary.state_dict(), reference.state_dict())


@pytest.mark.parametrize("name", ["adam", "once per trial"])
def test_a_module_that_is_converted_takes_its_optimizer_along(name: str) -> None:
    models = [network(n) for n in range(2)]
    alone = copy.deepcopy(models[1])
    fused = trials.fuse(models)
    optimizers = trials.fuse_optimizers([CASES[name](n, m.parameters()) for n, m in enumerate(models)], fused)
    reference = CASES[name](1, alone.parameters())
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(2):
        fused._apply(torch.clone)  # as `to` another device: the same numbers elsewhere
        step(fused(x), optimizers)
        step(alone(x), reference)
    for key, value in fused.extract(1).state_dict().items():
        close(value, alone.state_dict()[key], key)
    assert_same_state(optimizers.extract(1), reference.state_dict())


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


BAD: dict[str, tuple[Callable[[list[nn.Module]], list[Any]], str]] = {
    "too few": (lambda ms: [sgd(ms[0])], "1 optimizers for 2 models; allowed: one for each"),
    "no optimizer": (lambda ms: [sgd(ms[0]), ms[1]], "the optimizer is of type Sequential; allowed: a torch.optim"),
    "other kinds": (
        lambda ms: [sgd(ms[0]), torch.optim.Adam(ms[1].parameters())],
        "optimizer 1 .*optimizer 0: optimizer: type is 'torch.optim.*Adam', there '.*SGD'; allowed: the same for all",
    ),
    "another flag": (lambda ms: [sgd(ms[0]), sgd(ms[1], maximize=True)], "maximize is True, there False"),
    "in another order": (lambda ms: [sgd(ms[1]), sgd(ms[0])], "has a parameter of shape .* that is not the model's"),
    "of both models": (
        lambda ms: [sgd(nn.ModuleList(ms)), sgd(nn.ModuleList(ms))],
        "has a parameter of shape .* that is not the model's",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_optimizers_that_cannot_be_fused(name: str) -> None:
    make, message = BAD[name]
    models = [network(n) for n in range(2)]
    with pytest.raises(FuseError, match=message):
        trials.fuse_optimizers(make(models), trials.fuse(models))


@pytest.mark.parametrize("many", [0, 1 << 17])
def test_trials_that_stop_agreeing_and_agree_again(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.optim.block.MANY_WEIGHTS", many)
    models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double() for _ in range(3)]
    alone = copy.deepcopy(models)
    optimizers, own = ([torch.optim.AdamW(m.parameters(), lr=0.1) for m in each] for each in (models, alone))
    fused = trials.fuse(models)
    together = trials.fuse_optimizers(optimizers, fused)
    x = torch.randn(5, 4, dtype=torch.float64)
    for step in range(6):
        for each in (optimizers, own):
            each[1].param_groups[0]["betas"] = (0.5, 0.8) if step in (2, 3) else (0.9, 0.999)
        together.zero_grad()
        fused(x).square().flatten(1).mean(1).sum().backward()
        together.step()
        for model, optimizer in zip(alone, own, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for row, (model, optimizer) in enumerate(zip(alone, own, strict=True)):
        for name, value in model.state_dict().items():
            close(fused.extract(row).state_dict()[name], value, name)
        for index, state in optimizer.state_dict()["state"].items():
            for kind, value in state.items():
                close(together.extract(row)["state"][index][kind], value, kind)
