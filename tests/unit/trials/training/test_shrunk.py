"""Surrogates in a group equal surrogates alone, with the same multipliers; schedulers see the user's own numbers."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import Batch, ToyStudy, close, members
from tests.support.states import reloaded
from trials import FuseError, Shrink, ShrinkError, ShrinkWarning, TrialGroup
from trials.gate.base import OpenGate
from trials.shrinking.rules import multipliers
from trials.shrinking.scaled_optimizer import clip_gradients, scaled, scaled_groups
from trials.training.audits.audit import Audit, Mismatch
from trials.training.member import build, group_key
from trials.training.shrunk import by_id, for_target

Make = Callable[[int, Iterable[Any]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _narrow() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkWarning)
        yield


def model(n: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))
    ).double()


def data(count: int = 7) -> list[Batch]:
    stream = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 4, dtype=torch.float64, generator=stream), torch.zeros(6)) for _ in range(count)]


class Narrow(ToyStudy):
    """A study of surrogates."""

    shrink = 4
    norm: float | None = None
    value: float | None = None

    def clip_norm(self, params: dict[str, Any]) -> float | None:
        return None if self.norm is None else self.norm * (1 + params["n"])

    def clip_value(self, params: dict[str, Any]) -> float | None:
        return self.value


SETTINGS: dict[str, Make] = {
    "sgd": lambda n, ps: torch.optim.SGD(ps, lr=0.02, momentum=0.4 * n, weight_decay=0.1 * n),
    "adam": lambda n, ps: torch.optim.Adam(ps, lr=0.003 * (n + 1), eps=1e-4),
    "adam, amsgrad": lambda n, ps: torch.optim.Adam(ps, lr=0.003, betas=(0.2 * n, 0.5 + 0.1 * n), amsgrad=True),
    "adamw": lambda n, ps: torch.optim.AdamW(ps, lr=0.003 * (n + 1), weight_decay=0.1 * n, eps=1e-4),
    "adamw, alike": lambda n, ps: torch.optim.AdamW(ps, lr=0.003 * (n + 1), eps=1e-4),
    "nadam": lambda n, ps: torch.optim.NAdam(ps, lr=0.003 * (n + 1), momentum_decay=0.01 * n, eps=1e-4),
    "radam": lambda n, ps: torch.optim.RAdam(ps, lr=0.02 * (n + 1), betas=(0.9 - 0.1 * n, 0.7), eps=1e-4),
    "radamw": lambda n, ps: torch.optim.RAdam(ps, lr=0.02, weight_decay=0.1 * n, decoupled_weight_decay=True, eps=1e-4),
    "adamax": lambda n, ps: torch.optim.Adamax(ps, lr=0.01 * (n + 1), eps=1e-3),
    "rmsprop": lambda n, ps: torch.optim.RMSprop(ps, lr=0.003, momentum=0.4 * n, centered=True, eps=1e-2),
    "adagrad": lambda n, ps: torch.optim.Adagrad(ps, lr=0.01 * (n + 1), lr_decay=0.1 * n, eps=1e-3),
}


def alone(study: Narrow, number: int, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """One surrogate trained by ordinary PyTorch with split param groups."""
    built = build(study, number, {"n": number})
    assert isinstance(built.optimizer, torch.optim.Optimizer) and built.roles is not None
    scales = by_id(built.model, multipliers(built.roles, built.optimizer))
    scaled_groups(built.optimizer, built.roles)
    for inputs, targets in batches:
        built.optimizer.zero_grad()
        study.loss(built.model(inputs), targets).backward()
        own = [(p, scales[id(p)]) for p in built.model.parameters()]
        clip_gradients(own, study.clip_norm({"n": number}), study.clip_value({"n": number}))
        built.optimizer.step()
    return dict(built.model.state_dict())


def assert_group_is_alone(study: Narrow, size: int = 3) -> TrialGroup:
    group = TrialGroup(study, members(study, range(size)), OpenGate())
    for inputs, targets in study.data:
        group.train_step(inputs, targets)
    for row in range(size):
        close(group.extract(row)[0], alone(study, row, study.data), f"row {row}")
    return group


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_alone(name: str) -> None:
    assert_group_is_alone(Narrow(model, SETTINGS[name], data()))


@pytest.mark.parametrize("name", ["sgd", "adamw", "radam"])
def test_one_trial(name: str) -> None:
    assert_group_is_alone(Narrow(model, SETTINGS[name], data()), size=1)


@pytest.mark.parametrize(("norm", "value"), [(0.05, None), (None, 0.01), (0.1, 0.02)])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_clipped(name: str, norm: float | None, value: float | None) -> None:
    study = Narrow(model, SETTINGS[name], data())
    study.norm, study.value = norm, value
    assert_group_is_alone(study)


def test_wide_layers_that_are_updated_trial_by_trial() -> None:
    study = Narrow(lambda n: nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 600), nn.Linear(600, 3)).double(), "adamw")
    study.data = data(3)
    assert_group_is_alone(study, size=2)


def watched(n: int, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """An optimizer that no vectors replace, because it has a hook."""
    optimizer = torch.optim.AdamW(parameters, lr=0.003 * (n + 1), eps=1e-4)
    optimizer.register_step_post_hook(_look)
    return optimizer


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    pass


@pytest.mark.parametrize("name", ["watched", "radam"])
def test_once_per_trial(name: str) -> None:
    study = Narrow(model, watched if name == "watched" else SETTINGS[name], data())
    study.norm = 0.05
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    if name == "radam":
        group.rebuild("loop")
    for inputs, targets in study.data:
        group.train_step(inputs, targets)
    for row in range(2):
        close(group.extract(row)[0], alone(study, row, study.data), f"row {row}")


def test_muon() -> None:
    matrices: Make = lambda n, ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.01 * (n + 1), weight_decay=0.1)  # noqa: E731
    study = Narrow(lambda n: model(n).float(), matrices, [(x.float(), y) for x, y in data(2)])
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    for inputs, targets in study.data:
        group.train_step(inputs, targets)
    for row in range(2):
        found, expected = group.extract(row)[0], alone(study, row, study.data)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-3)


class Scheduled(Narrow):
    """With a scheduler that sets absolute rates."""

    scheduler_every = "step"

    def scheduler(self, params: dict[str, Any], optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01 * (params["n"] + 1), total_steps=8)


def test_schedulers_see_the_users_own_rates() -> None:
    study = Scheduled(model, SETTINGS["adamw"], data())
    group = TrialGroup(study, members(study, range(2)), OpenGate())
    for inputs, targets in study.data:
        group.train_step(inputs, targets)
    for row in range(2):
        built = build(study, row, {"n": row})
        assert isinstance(built.optimizer, torch.optim.Optimizer) and built.roles is not None
        scales = by_id(built.model, multipliers(built.roles, built.optimizer))
        for inputs, targets in study.data:
            built.optimizer.zero_grad()
            study.loss(built.model(inputs), targets).backward()
            with scaled(built.optimizer, scales):
                built.optimizer.step()
            built.schedulers[0].step()
        close(group.extract(row)[0], dict(built.model.state_dict()), f"row {row}")
        rates = [g["lr"] for g in group.extract(row)[1]["param_groups"]]
        assert rates == [pytest.approx(g["lr"]) for g in built.optimizer.param_groups]


@pytest.mark.parametrize("name", ["sgd", "adam", "radam", "adamw"])
def test_the_audit_holds(name: str) -> None:
    study = Narrow(model, SETTINGS[name], data())
    study.norm, study.value = 0.1, 0.05
    found: list[Mismatch] = []
    audit = Audit(study, on_mismatch=found.append)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    for inputs, targets in study.data:
        group.unproven.add("training")
        group.train_step(inputs, targets)
    assert found == []
    assert audit.way == "rules"
    for row in range(3):
        close(group.extract(row)[0], alone(study, row, study.data), f"row {row}")


def test_the_audit_finds_multipliers_that_are_missing() -> None:
    study = Narrow(model, SETTINGS["adamw"], data())
    found: list[Mismatch] = []
    group = TrialGroup(study, members(study, range(2)), OpenGate(), Audit(study, on_mismatch=found.append))
    (optimizer,) = group._optimizers
    optimizer.scales = {}
    optimizer._plan()  # type: ignore[attr-defined]
    optimizer._pack(optimizer._tables(), optimizer.counts())  # type: ignore[attr-defined]
    group.train_step(*study.data[0])
    assert found


@pytest.mark.parametrize("name", ["sgd", "radam"])
def test_state_travels_with_its_trial(name: str) -> None:
    study = Narrow(model, SETTINGS[name], data())
    group = TrialGroup(study, members(study, range(3)), OpenGate())
    for inputs, targets in study.data[:2]:
        group.train_step(inputs, targets)
    group.keep([2, 1])
    group.train_step(*study.data[2])
    group.add(members(study, [0]))
    group = reloaded(group)
    for inputs, targets in study.data[3:5]:
        group.train_step(inputs, targets)
    for row, (number, batches) in enumerate([(2, study.data[:5]), (1, study.data[:5]), (0, study.data[3:5])]):
        close(group.extract(row)[0], alone(study, number, batches), f"row {row}")


class Own(Narrow):
    """A study whose code builds surrogates."""

    def model(self, params: dict[str, Any], shrink: int = 1) -> nn.Module:
        width = 512 // shrink
        made = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
        nn.init.normal_(made.get_parameter("2.weight"), std=math.sqrt(2 / width))
        return made.double()


def test_a_study_may_build_surrogates_itself() -> None:
    study = Own(model, SETTINGS["adamw"], data())
    built = build(study, 0, {"n": 0})
    assert built.roles is not None
    assert built.roles["2.weight"].r_in == 0.25
    assert not built.model.get_parameter("4.weight").any()
    rms = {name: float(p.detach().square().mean().sqrt()) for name, p in built.model.named_parameters()}
    # what PyTorch draws already grows as the rule wants; only the bias must be that of the target
    assert rms["2.weight"] == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    assert rms["0.weight"] == pytest.approx(1 / math.sqrt(12), rel=0.05)
    assert rms["2.bias"] == pytest.approx(1 / math.sqrt(3 * 512), rel=0.15)
    assert_group_is_alone(study, size=2)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def deep(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), *(Residual(width) for _ in range(blocks)), nn.Linear(width, 3)).double()


class Deep(Narrow):
    """A study whose code divides widths; blocks are dropped from what it builds."""

    shrink = Shrink(4, depth=2)  # type: ignore[assignment]

    def model(self, params: dict[str, Any], shrink: int = 1) -> nn.Module:
        return deep(128 // shrink, 4)


class DividesBlocks(Deep):
    def model(self, params: dict[str, Any], shrink: int = 1) -> nn.Module:
        return deep(128 // shrink, 8 if shrink == 1 else 4)


def test_a_study_that_builds_surrogates_itself_may_be_shallower() -> None:
    study = Deep(model, SETTINGS["adamw"], data())
    built = build(study, 0, {"n": 0})
    traced = Narrow(lambda n: deep(128, 4), SETTINGS["adamw"], data())
    traced.shrink = Deep.shrink  # type: ignore[assignment]
    same = build(traced, 0, {"n": 0})
    assert built.roles == same.roles and len(built.roles or {}) == 2 * 6 + 4
    for name, p in built.model.named_parameters():
        theirs = same.model.get_parameter(name)
        assert float(p.square().mean().sqrt()) == pytest.approx(float(theirs.square().mean().sqrt()), rel=0.4), name
    assert_group_is_alone(study, size=2)


def test_blocks_are_not_divided_by_the_studys_own_code() -> None:
    with pytest.raises(ShrinkError, match=r"'5.norm.weight' of the target is absent.*trials\.Shrink\(.*, depth=2\)"):
        build(DividesBlocks(model, "adamw", data()), 0, {"n": 0})


class AsWide(Own):
    def model(self, params: dict[str, Any], shrink: int = 1) -> nn.Module:
        return model(0)


def test_a_study_that_does_not_shrink_is_refused() -> None:
    with pytest.raises(ShrinkError, match=r"model\(params, 4\) is as wide as model\(params, 1\)"):
        build(AsWide(model, "adamw", data()), 0, {"n": 0})


@pytest.mark.parametrize("kind", [Narrow, Own])
def test_the_target_is_trained_with_readouts_as_the_surrogates(kind: type[Narrow]) -> None:
    study = kind(model, "adamw", data())
    study.shrink = for_target(4)  # type: ignore[assignment]
    built = build(study, 0, {"n": 0})
    assert built.roles is None
    readout = [p for name, p in built.model.named_parameters() if name.endswith("weight")][-1]
    assert readout.shape[1] in (24, 512)
    assert not readout.any()


def test_targets_of_other_widths_are_not_fused() -> None:
    def sized(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16 + 2 * n), nn.Linear(16 + 2 * n, 3)).double()

    study = Narrow(sized, "adamw", data())
    study.shrink = Shrink(2, readout="keep")  # type: ignore[assignment]
    one, other = members(study, [0, 1])
    assert group_key(one) != group_key(other)
    with pytest.raises(FuseError):
        TrialGroup(study, [one, other], OpenGate())


def test_an_optimizer_without_a_rule_is_refused() -> None:
    study = Narrow(model, lambda n, ps: torch.optim.Adadelta(ps), data())
    with pytest.raises(ShrinkError, match="no rule of width"):
        TrialGroup(study, members(study, range(2)), OpenGate())


def test_building_surrogates_disturbs_no_random_numbers() -> None:
    study = Narrow(model, "adamw", data())
    first = build(study, 0, {"n": 0})
    again = build(study, 0, {"n": 0})  # now what shrinks is known
    close(dict(first.model.state_dict()), dict(again.model.state_dict()), "weights")
    assert torch.equal(first.rng_state, again.rng_state)
