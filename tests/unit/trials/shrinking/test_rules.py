"""The table of multipliers, and which optimizers have none."""

import copy
import warnings
from collections.abc import Iterable
from math import log2, sqrt
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.own_optimizers import Adapting
from trials import Multipliers, ShrinkError, ShrinkWarning, multipliers, roles, scaled_groups, shrink
from trials.shrinking.rules import initial_factor

S = 4


def model(n: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8 * n), nn.Linear(8 * n, 8 * n), nn.Linear(8 * n, 2))


def table(kind: str, **settings: Any) -> dict[str, Multipliers]:
    surrogate = model(1)
    parameters: Iterable[Any] = surrogate.parameters()
    if kind == "Muon":
        parameters = [p for p in surrogate.parameters() if p.ndim == 2]
    optimizer = getattr(torch.optim, kind)(parameters, **settings)
    return multipliers(roles(model(S), surrogate), optimizer)


HIDDEN, INPUT, BIAS, OUTPUT, SCALAR = "1.weight", "0.weight", "1.bias", "2.weight", "2.bias"


def column(found: dict[str, Multipliers], what: str) -> list[float]:
    return [getattr(found[name], what) for name in (HIDDEN, INPUT, BIAS, OUTPUT, SCALAR)]


def test_sgd() -> None:
    found = table("SGD", momentum=0.9)
    assert column(found, "rate") == [1, 1 / S, 1 / S, S, 1]
    assert column(found, "decay") == [1, S, S, 1 / S, 1]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"])
def test_adam_and_its_kin(kind: str) -> None:
    found = table(kind, weight_decay=0.0)
    assert column(found, "rate") == [S, 1, 1, S, 1]
    assert column(found, "eps") == [S, S, S, 1, 1]
    assert column(found, "decay") == ([1 / S, 1, 1, 1 / S, 1] if kind == "AdamW" else [1, S, S, 1 / S, 1])
    assert column(found, "unrectified") == ([1 / S, 1 / S, 1 / S, 1, 1] if kind == "RAdam" else [1] * 5)


def test_decoupled_decay_keeps_rate_times_decay() -> None:
    for kind in ("Adam", "NAdam", "RAdam"):
        found = table(kind, weight_decay=0.1, decoupled_weight_decay=True)
        assert column(found, "decay") == [1 / S, 1, 1, 1 / S, 1]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon(adjust: str) -> None:
    found = table("Muon", adjust_lr_fn=adjust)
    assert found[HIDDEN].rate == pytest.approx(1 if adjust == "original" else sqrt(S))
    assert found[HIDDEN].eps == 1
    # the first layer: 32 rows of 3 in the target, 8 of 3 in the surrogate
    adjusted = sqrt(32 / 3) / sqrt(8 / 3) if adjust == "original" else sqrt(32) / sqrt(8)
    assert found[INPUT].rate == pytest.approx(sqrt(1 / S) * adjusted)
    assert all(m.rate * m.decay == pytest.approx(1) for m in found.values())


def test_clipping() -> None:
    found = table("SGD")
    assert column(found, "clip_value") == [S, S, S, 1, 1]
    assert column(found, "clip_norm") == [1, S**-0.5, S**-0.5, S**0.5, 1]


def test_initial_values() -> None:
    found = roles(model(S), model(1))
    assert [initial_factor(found[name]) for name in (HIDDEN, INPUT, BIAS, OUTPUT, SCALAR)] == [S**0.5, 1, 1, S, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda ps: torch.optim.Adadelta(ps), "no rule of width for torch.optim.*Adadelta; allowed: Adagrad, Adam, Ad"),
        (lambda ps: torch.optim.Rprop(ps), "Rprop"),
        (lambda ps: Adapting(ps, lr=0.1), "no rule of width for tests.support.own_optimizers.Adapting"),
        (lambda ps: torch.optim.Adagrad(ps, initial_accumulator_value=0.1), "initial_accumulator_value=0.1"),
        (lambda ps: torch.optim.SGD([nn.Parameter(torch.zeros(7))]), r"shape \[7\] that is not the surrogate's"),
    ],
)
def test_what_has_no_rule_is_refused(make: Any, said: str) -> None:
    surrogate = model(1)
    found, own = roles(model(S), surrogate), list(surrogate.parameters())
    with pytest.raises(ShrinkError, match=said):
        multipliers(found, make(own))


def test_decay_inside_adam_with_a_readout_of_zeros_is_refused() -> None:
    surrogate = model(1)
    found = roles(model(S), surrogate)
    nn.init.zeros_(surrogate.get_parameter(OUTPUT))
    for kind in ("Adam", "RAdam", "RMSprop", "Adagrad"):
        optimizer = getattr(torch.optim, kind)(surrogate.parameters(), weight_decay=0.1)
        with pytest.raises(ShrinkError, match=r"readout '2.weight' is zero.*allowed: AdamW"):
            multipliers(found, optimizer)
    multipliers(found, torch.optim.AdamW(surrogate.parameters(), weight_decay=0.1))
    multipliers(found, torch.optim.SGD(surrogate.parameters(), weight_decay=0.1))


def test_a_tied_embedding_with_sgd_warns() -> None:
    class Tied(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8 * n), nn.Linear(8 * n, 9, bias=False)
            self.head.weight = self.embed.weight

    surrogate = Tied(1)
    found = roles(Tied(S), surrogate)
    with pytest.warns(ShrinkWarning, match="moderate rates"):
        multipliers(found, torch.optim.SGD(surrogate.parameters()))


def test_sgd_warns_where_outputs_stay_and_do_not_begin_at_zero() -> None:
    surrogate = model(1)
    found = roles(model(S), surrogate)
    with pytest.warns(ShrinkWarning, match=r"the outputs of '2.weight' do not shrink, and it does not begin at zero"):
        multipliers(found, torch.optim.SGD(surrogate.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        multipliers(found, torch.optim.Adam(surrogate.parameters()))
        nn.init.zeros_(surrogate[2].weight)  # type: ignore[arg-type]
        multipliers(found, torch.optim.SGD(surrogate.parameters()))


def test_decay_inside_the_gradient_warns_of_readouts_that_are_kept() -> None:
    surrogate = model(1)
    found = roles(model(S), surrogate)
    with pytest.warns(ShrinkWarning, match=r"'2.weight' .* weight_decay inside the gradient is stronger in the surrog"):
        multipliers(found, torch.optim.Adam(surrogate.parameters(), weight_decay=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        multipliers(found, torch.optim.AdamW(surrogate.parameters(), weight_decay=0.1))


def drift_by_decay(readouts_like_their_rule: bool) -> float:
    """The power of the width with which a small L2 decay inside Adam changes the first layer's outputs."""
    by, changes = [4, 1], []
    for scale in by:
        total = 0.0
        for seed in range(2):
            torch.manual_seed(seed)
            target = nn.Sequential(*(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3)))
            target.double()
            made = target if scale == 1 else shrink(target, scale, torch.randn(2, 16).double(), readout="keep").model
            if readouts_like_their_rule:
                made.get_parameter("4.weight").data.mul_(sqrt(scale))
            ends = [_first_after(target, copy.deepcopy(made), decay) for decay in (0.0, 1e-3)]
            total += float((ends[1] - ends[0]).abs().mean())
        changes.append(total)
    return log2(changes[1] / changes[0]) / log2(by[0])


def _first_after(target: nn.Module, made: Any, decay: float) -> torch.Tensor:
    stream = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-3, weight_decay=decay)
    scaled_groups(optimizer, roles(target, made))
    for _ in range(20):
        x = torch.randn(64, 16, generator=stream, dtype=torch.float64)
        optimizer.zero_grad()
        (made(x) - torch.sin(x[:, :3])).square().mean().backward()
        optimizer.step()
    return made[0](x).detach()


def test_decay_inside_the_gradient_moves_all_widths_alike_if_gradients_follow_their_rule() -> None:
    assert abs(drift_by_decay(readouts_like_their_rule=True)) < 0.2
    assert drift_by_decay(readouts_like_their_rule=False) < -0.25


def test_groups_are_split_and_scaled_once() -> None:
    surrogate = model(1)
    found, own = roles(model(S), surrogate), list(surrogate.parameters())
    optimizer = torch.optim.AdamW(own, lr=0.5, weight_decay=0.25, eps=0.125)
    scaled_groups(optimizer, found)
    settings = {
        tuple(p.shape): (g["lr"], g["weight_decay"], g["eps"]) for g in optimizer.param_groups for p in g["params"]
    }
    assert settings[8, 8] == (0.5 * S, 0.25 / S, 0.125 * S)
    assert settings[2, 8] == (0.5 * S, 0.25 / S, 0.125)
    assert settings[2,] == (0.5, 0.25, 0.125)
    with pytest.raises(ShrinkError, match="scaled before"):
        scaled_groups(optimizer, found)


def test_groups_are_scaled_before_a_scheduler_is_made() -> None:
    surrogate = model(1)
    found, own = roles(model(S), surrogate), list(surrogate.parameters())
    optimizer = torch.optim.SGD(own, lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ShrinkError, match="has a scheduler already"):
        scaled_groups(optimizer, found)


def test_a_model_that_is_gone_is_refused() -> None:
    found = roles(model(S), model(1))
    with pytest.raises(ShrinkError, match="exists no more"):
        found.names()
