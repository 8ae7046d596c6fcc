"""Fused optimizers give each trial what `torch.optim` gives it alone."""

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import Solo, ToyStudy, assert_fused_is_solo, assert_same_trial, close, members
from tests.support.optimizer_settings import SETTINGS
from tests.support.slow_cases import others_slow
from tests.support.states import reloaded
from trials import FuseError, Member, TrialGroup
from trials.fusion.compared.structure import canonical_names, stack, structure
from trials.gate.base import OpenGate
from trials.optim import fuse_optimizers


def model(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), torch.zeros(6)


def test_every_optimizer_of_torch_is_tested() -> None:
    p = [nn.Parameter(torch.zeros(2, 2))]
    tested = {type(make(1, p)).__name__ for make in SETTINGS.values()}
    elsewhere = {"Optimizer", "Muon"}
    refused = {"LBFGS", "SparseAdam"}
    public = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name[0].isupper()}
    assert public - elsewhere - refused <= tested


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_torch(name: str) -> None:
    inputs = [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) for step in range(7)]
    assert_fused_is_solo(model, inputs, SETTINGS[name], steps=7)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_param_groups(kind: type[torch.optim.Optimizer]) -> None:
    def two_groups(n: int, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        weight, bias, *rest = parameters
        groups = [{"params": [bias, *rest], "lr": 0.01 * (n + 1)}, {"params": [weight], "weight_decay": 0.1 * n}]
        return kind(groups, lr=0.002)  # type: ignore[call-arg]

    assert_fused_is_solo(model, [batch()[0]], two_groups)


def test_parameters_outside_the_optimizer_stay() -> None:
    assert_fused_is_solo(model, [batch()[0]], lambda n, ps: torch.optim.Adam([*ps][2:], lr=0.01))


@pytest.mark.parametrize("name", [name for name in SETTINGS if "with decay" not in name])
def test_goes_on_from_an_existing_state(name: str) -> None:
    x, y = batch()
    study = ToyStudy(model, SETTINGS[name], [(x, y)])
    solos = [Solo(study, number) for number in range(3)]
    for solo, steps in zip(solos, (0, 1, 3), strict=True):
        for _ in range(steps):
            solo.step(x, y)
    joined = [Member(n, {"n": n}, solo.model, solo.optimizer) for n, solo in enumerate(solos)]
    group = TrialGroup(study, joined, OpenGate())
    for _ in range(3):
        group.train_step(x, y)
        for solo in solos:
            solo.step(x, y)
    for row, solo in enumerate(solos):
        assert_same_trial(group, row, solo)


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw"])
def test_rate_can_be_set_per_trial(name: str) -> None:
    x, y = batch()
    study = ToyStudy(model, SETTINGS[name], [(x, y)])
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Solo(study, number) for number in range(3)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(solo.optimizer, 0.5 + 0.1 * n) for n, solo in enumerate(solos)]
    for _ in range(4):
        group.train_step(x, y)
        for row, (solo, scheduler) in enumerate(zip(solos, schedulers, strict=True)):
            solo.step(x, y)
            scheduler.step()
            group.set_lr(row, float(scheduler.get_last_lr()[0]))
    for row, solo in enumerate(solos):
        close(group.extract(row)[0], dict(solo.model.state_dict()), f"row {row}")


def test_rate_of_one_param_group() -> None:
    def two_groups(n: int, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.5)

    study = ToyStudy(model, two_groups)
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    group.set_lr(1, 0.25, group=0)
    rates = [[g["lr"] for g in group.extract(row)[1]["param_groups"]] for row in range(2)]
    assert rates == [[0.5, 0.5], [0.25, 0.5]]


def test_rate_zero_changes_nothing() -> None:
    x, y = batch()
    study = ToyStudy(model, lambda n, ps: torch.optim.Adam(ps, lr=0.1 * n))
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    start = group.extract(0)[0]
    group.train_step(x, y)
    after = group.extract(0)[0]
    assert all(torch.equal(start[name], after[name]) for name in start)


# what a setting adds to these is no state
WITH_STATES = [
    name for name in SETTINGS if not any(part in name for part in ("decay", "maximize", "dampening", "nesterov"))
]


@pytest.mark.parametrize("name", others_slow(SETTINGS, WITH_STATES))
def test_state_travels_with_its_trial(name: str) -> None:
    x, y = batch()
    study = ToyStudy(model, SETTINGS[name], [(x, y)])
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    for _ in range(2):
        group.train_step(x, y)
    group.keep([2, 1])
    group.train_step(x, y)
    group.add(members(study, [0, 3]))
    group = reloaded(group)
    for _ in range(3):
        group.train_step(x, y)
    for row, (number, steps) in enumerate([(2, 6), (1, 6), (0, 3), (3, 3)]):
        solo = Solo(study, number)
        for _ in range(steps):
            solo.step(x, y)
        assert_same_trial(group, row, solo)


@pytest.mark.parametrize("name", ["sgd, nesterov", "adamw", "rmsprop, centered", "adagrad", "adadelta"])
def test_float32(name: str) -> None:
    x, y = batch()
    study = ToyStudy(lambda n: model(n).float(), SETTINGS[name], [(x.float(), y)])
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    solos = [Solo(study, number) for number in range(3)]
    for _ in range(7):
        group.train_step(x.float(), y)
        for solo in solos:
            solo.step(x.float(), y)
    for row, solo in enumerate(solos):
        for key, value in solo.model.state_dict().items():
            torch.testing.assert_close(group.extract(row)[0][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 6), (7, 3), (8, 9), (12, 10)])
def test_muon(shape: tuple[int, int], adjust: str | None, nesterov: bool) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")

    def make(n: int, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        rate, momentum = 0.02 * (n + 1), 0.9 - 0.2 * n
        return torch.optim.Muon(parameters, rate, 0.1 * n, momentum, nesterov=nesterov, adjust_lr_fn=adjust)

    def layers(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(*shape, bias=False), nn.Linear(shape[1], shape[0] + 5, bias=False))

    assert_fused_is_solo(layers, [torch.randn(6, shape[0], generator=torch.Generator().manual_seed(1))], make, steps=6)


class PartlyTrained(nn.Module):
    """A layer that is used, one that is not, and one that is frozen."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.never, self.always, self.frozen = (nn.Linear(4, 4).double() for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.frozen(x)


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw", "nadam", "adagrad", "adafactor"])
def test_parameters_without_gradient(name: str) -> None:
    group = assert_fused_is_solo(PartlyTrained, [batch()[0]], SETTINGS[name], steps=5)
    group.keep([1, 2])
    group.train_step(*batch())


@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd with momentum", "rprop"])
def test_gradients_that_come_and_go(name: str) -> None:
    """A fused module of the user's own, whose optimizers and schedulers stay theirs."""
    models = [model(n) for n in range(3)]
    alone = [copy.deepcopy(m) for m in models]
    optimizers, solos = ([SETTINGS[name](n, m.parameters()) for n, m in enumerate(ms)] for ms in (models, alone))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (*optimizers, *solos)]
    rows = stack(models, [structure(model) for model in models], [torch.Generator() for _ in models])
    fused = fuse_optimizers(optimizers, rows, [canonical_names(m) for m in models])
    stream = torch.Generator().manual_seed(0)
    for step in range(6):
        fused.zero_grad()
        for index, (key, p) in enumerate(rows.parameters.items()):
            if step % (index + 1) == 0:
                p.grad = torch.randn(p.shape, dtype=p.dtype, generator=stream)
            for k, m in enumerate(alone):
                m.get_parameter(key).grad = None if p.grad is None else p.grad[k].clone()
        fused.step()
        for solo in solos:
            solo.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's optimizers themselves never step
            for scheduler in schedulers:
                scheduler.step()
    for k, (m, solo) in enumerate(zip(alone, solos, strict=True)):
        close({key: p[k].detach() for key, p in rows.parameters.items()}, dict(m.state_dict()), f"row {k}")
        saved, expected = fused.extract(k), solo.state_dict()
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            for kind, value in state.items():
                if isinstance(value, Tensor):
                    close(saved["state"][index][kind].to(value), value, f"row {k} {index} {kind}")


@pytest.mark.parametrize("name", ["sgd with momentum", "adamw", "nadam with decay", "rmsprop, centered", "adadelta"])
def test_long_steps_are_divided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.optim.vector.UNIT_ELEMENTS", {"cpu": 16 * 7})
    group = assert_fused_is_solo(model, [batch()[0]], SETTINGS[name], steps=5)
    steps = [unit for unit in group._units.names if unit.startswith("optimizer step")]
    assert len(steps) == 8  # 4·5 weights in three, 5 biases, 5·3 weights in three, 3 biases


def test_trials_that_are_updated_one_by_one_may_be_interrupted_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.optim.block.ROW_COLUMNS", 1)
    asked: list[list[int]] = []
    for elements in (1 << 15, 2 * 43, 1):  # a trial has 43 weights
        monkeypatch.setattr("trials.optim.block.ROWS_ELEMENTS", elements)
        group = assert_fused_is_solo(model, [batch()[0]], ALIKE["adamw"], steps=1, size=4)
        asked.append([])
        group._phases[0].optimizer.step(asked[-1].append)
    assert asked == [[0] * 2, [0] * 3, [0] * 5], "before its coefficients, after them, and between its parts"


def test_where_work_is_queued_a_unit_is_asked_for_once() -> None:
    group = assert_fused_is_solo(model, [batch()[0]], ALIKE["adamw"], steps=1, size=4)
    optimizer, rows = group._phases[0].optimizer, group._fused.rows
    rows.parameters = {name: nn.Parameter(p.detach().to("meta")) for name, p in rows.parameters.items()}
    optimizer.moved()
    for p in rows.parameters.values():
        p.grad = torch.zeros_like(p)
    asked: list[int] = []
    optimizer.step(asked.append)
    assert asked == [0], "a second time would be a unit of nothing, and spoil what this one is known to cost"


def test_optimizers_that_cannot_be_fused() -> None:
    x = torch.zeros(3)
    refused = {
        r"LBFGS .*evaluates the model anew.*step\(\) needs no closure, such as torch\.optim\.AdamW": lambda n, ps: (
            torch.optim.LBFGS(ps)
        ),
        "SparseAdam cannot be fused: fused gradients are dense": lambda n, ps: torch.optim.SparseAdam([*ps]),
        "differentiable=True cannot be fused": lambda n, ps: torch.optim.Adam(ps, differentiable=True),
        r"parameter of shape \[3\] that is not the model's": lambda n, ps: torch.optim.SGD([*ps, nn.Parameter(x)]),
    }
    for message, make in refused.items():
        study = ToyStudy(model, make)
        with pytest.raises(FuseError, match=message):
            TrialGroup(study, members(study, range(2)), OpenGate())
    study = ToyStudy(model, lambda n, ps: (torch.optim.SGD if n else torch.optim.Rprop)(ps))
    with pytest.raises(
        FuseError, match=r"optimizer: type is 'torch\.optim\.sgd\.SGD', there 'torch\.optim\.rprop\.Rprop'"
    ):
        TrialGroup(study, members(study, range(2)), OpenGate())


ALIKE: dict[str, Callable[[int, Iterable[Any]], torch.optim.Optimizer]] = {
    "adam": lambda n, ps: torch.optim.Adam(ps, lr=0.01 * (n + 1), weight_decay=0.1 * n),
    "adamw": lambda n, ps: torch.optim.AdamW(ps, lr=0.01 * (n + 1), weight_decay=0.1 * n),
    "adam, amsgrad, ascending": lambda n, ps: torch.optim.Adam(ps, lr=0.01 * n, amsgrad=True, maximize=True),
    "adamw, ascending": lambda n, ps: torch.optim.AdamW(ps, lr=0.01 * n, maximize=True),
    "adamw, all different": lambda n, ps: torch.optim.AdamW(
        ps, lr=0.01, betas=(0.8, 0.9 + n / 50), eps=10.0 ** (n - 8)
    ),
}


@pytest.mark.parametrize("elements", [1 << 18, 16 * 7])
@pytest.mark.parametrize(("columns", "many"), [(1, 0), (1 << 20, 0), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ALIKE)
def test_kernels_of_a_single_pass(
    name: str, size: int, columns: int, elements: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.optim.block.ROW_COLUMNS", columns)
    monkeypatch.setattr("trials.optim.block.MANY_WEIGHTS", many)
    monkeypatch.setattr("trials.optim.vector.UNIT_ELEMENTS", {"cpu": elements})
    assert_fused_is_solo(model, [batch()[0]], ALIKE[name], steps=5, size=size)
