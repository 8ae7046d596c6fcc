"""Frozen parameters that all trials have in common are held once, and no trial ever gets another's."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.adapted import (
    BASE,
    WAYS,
    Adapted,
    adapt,
    asks,
    assert_alone,
    data,
    group_of,
    study_of,
    train,
)
from tests.support.common_bits import frozen, held, held_bytes, trained
from tests.support.fused_and_solo import OPTIMIZERS, Solo, ToyStudy, assert_same_trial, close, members
from trials import FuseError, TrialGroup, build_member
from trials.fusion.shared_base import Bases, same_bits
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit
from trials.training.shared import revived
from trials.training.trial_state import TrialState


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_holds_the_base_once(name: str, size: int) -> None:
    forward, way = WAYS[name]
    study = study_of(lambda n: Adapted(forward))
    group = group_of(study, size)
    train(group, study)
    assert held(group) == BASE
    assert any(way in how for _, how in group.ways()) or size == 1
    assert_alone(group, study)
    close(group.evaluate(), [_score(study, row) for row in range(size)], "score")


def _score(study: ToyStudy, number: int) -> float:
    solo = Solo(study, number)
    for batch in study.data:
        solo.step(*batch)
    return solo.score()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("every", [False, True])
def test_memory_of_a_group(optimizer: str, every: bool) -> None:
    """Also where an optimizer is given the frozen parameters."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a = frozen(lambda: nn.Linear(256, 256)), nn.Linear(256, 2, bias=False)
            self.b = nn.Linear(2, 256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x) + self.b(self.a(x))
            return y

    own = OPTIMIZERS[optimizer]
    batch = torch.randn(4, 256), torch.zeros(4)
    study = ToyStudy(lambda n: Wide(), lambda n, ps: own(n % 3, ps if every else trained(ps)), [batch])
    size = 16
    group = group_of(study, size)
    group.train_step(*batch)
    solo = Solo(study, 1)
    solo.step(*batch)
    base = sum(p.nbytes for p in solo.model.parameters() if not p.requires_grad)
    adapter = sum(2 * p.nbytes for p in solo.model.parameters() if p.requires_grad)
    adapter += sum(t.nbytes for state in solo.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    assert held_bytes(group) <= 1.2 * (base + size * adapter)
    assert size * base > 4 * (base + size * adapter)  # so that copies of the base would show


def test_models_give_up_their_bases() -> None:
    study = study_of(lambda n: Adapted())
    own, bases = members(study, range(3)), Bases()
    for member in own:
        bases.adopt(member.model)
    places = {dict(member.model.named_parameters())["base.weight"].data_ptr() for member in own}
    assert len(places) == 1
    group = TrialGroup(study, own, OpenGate())
    kept = dict(own[0].model.named_parameters())["base.weight"]
    assert kept.data_ptr() == group._fused.rows.parameters["base.weight"].data_ptr() not in places
    train(group, study)
    assert_alone(group, study)


def test_trials_that_come_back_from_their_states_hold_one_base_meanwhile() -> None:
    study = study_of(lambda n: Adapted())
    group = group_of(study)
    states = [group.export(row) for row in range(3)]
    back = revived(study, states, "rules")
    assert len({dict(each.model.named_parameters())["base.weight"].data_ptr() for each in back}) == 1


def test_bases_are_adopted_only_from_models_that_live_and_are_as_they_were() -> None:
    bases, models = Bases(), [Adapted() for _ in range(4)]
    bases.adopt(models[0])
    gone = weakref.ref(models[0])
    del models[0]
    gc.collect()
    assert gone() is None
    first, second, third = (dict(model.named_parameters())["base.weight"] for model in models)
    bases.adopt(models[0])
    first.data = first.data + 1  # elsewhere now
    bases.adopt(models[1])
    assert second.data_ptr() != first.data_ptr()
    second.data[0, 0] = -second.data[0, 0]
    bases.adopt(models[2])
    assert third.data_ptr() != second.data_ptr()


def test_models_that_share_a_frozen_base_already() -> None:
    base = frozen(lambda: nn.Linear(4, 4)).double()

    def make(n: int) -> nn.Module:
        model = Adapted()
        model.base = base
        return model

    study = study_of(make)
    group = group_of(study)
    train(group, study)
    assert held(group) == BASE
    assert_alone(group, study)


def number_in(value: float) -> Callable[[Tensor], None]:
    def change(weight: Tensor) -> None:
        weight.view(-1)[0] = value

    return change


BITS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], bool]] = {
    "nan": (number_in(float("nan")), number_in(float("nan")), True),
    "other nan": (number_in(float("nan")), lambda w: w.view(torch.int64)[0].fill_(0x7FF8000000000001), False),
    "minus zero": (number_in(0.0), number_in(-0.0), False),
    "one rounding": (number_in(1.0), number_in(1.0 + 2**-52), False),
}


@pytest.mark.parametrize("name", BITS)
def test_bits_are_compared(name: str) -> None:
    one, other, equal = BITS[name]

    def make(n: int) -> nn.Module:
        model = Adapted()
        with torch.no_grad():
            (other if n == 1 else one)(model.base.weight)
        return model

    study = study_of(make)
    group = group_of(study)
    assert held(group) == (BASE if equal else {"base.bias"})
    for row in range(3):
        assert same_bits(group.extract(row)[0]["base.weight"], make(row).state_dict()["base.weight"])


@pytest.mark.parametrize(
    "kind", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_bits_of_every_kind(kind: torch.dtype) -> None:
    one = torch.arange(6).view(2, 3).to(kind)
    assert same_bits(one, one.clone())
    assert same_bits(one.t(), one.t().contiguous())
    other = one.clone()
    other[0, 0] = 1
    assert not same_bits(one, other)
    assert not same_bits(one, one[:1])


def test_frozen_in_one_trial_only() -> None:
    study = study_of(lambda n: Adapted(extra=lambda m: m.base.weight.requires_grad_(n == 1)))
    with pytest.raises(FuseError, match="requires_grad"):
        group_of(study)


class Decayed(torch.optim.Optimizer):
    """Shrinks all its parameters, those without a gradient too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)


def test_optimizer_that_changes_what_has_no_gradient() -> None:
    study = ToyStudy(lambda n: Adapted(), lambda n, ps: Decayed(ps), data())
    group = group_of(study)
    assert not held(group)
    train(group, study)
    assert_alone(group, study)


def test_tied_weight_of_which_one_use_is_adapted() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = frozen(lambda: nn.Embedding(6, 4))
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight
            self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.table((x > 0).long().sum(-1))
            z: Tensor = self.head(y) + self.b(self.a(y))
            return z

    study = study_of(lambda n: Tied().double())
    group = group_of(study)
    train(group, study)
    assert held(group) == {"table.weight"}
    assert_alone(group, study)


def differing(at: int) -> Callable[[int], nn.Module]:
    """Trials from number `at` on have another base."""

    def make(n: int) -> nn.Module:
        model = Adapted()
        if n >= at:
            nn.init.eye_(model.base.weight)
        return model

    return make


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("equal", [True, False])
def test_trials_that_join(equal: bool, merges: bool) -> None:
    study = study_of(differing(9 if equal else 2))
    group, later = group_of(study, 2), members(study, (2, 3))
    train(group, study)
    if merges:
        other = TrialGroup(study, later, OpenGate())
        train(other, study)
        group.merge(other)
    else:
        group.add(later)
    assert held(group) == (BASE if equal else {"base.bias"})
    assert_alone(group, study, {0: 0, 1: 1})
    assert_alone(group, study, {2: 2, 3: 3}, steps=3 if merges else 0)
    train(group, study, 3, 6)
    assert_alone(group, study, {0: 0, 1: 1}, steps=6)


def test_split_merge_keep_and_rebuild() -> None:
    study = study_of(lambda n: Adapted(asks))
    group = group_of(study, 4)
    train(group, study)
    other = group.split([1, 3])
    assert held(group) == held(other) == BASE
    train(group, study, 3, 6)
    other.use_units()
    train(other, study, 3, 6)
    group.use_units()
    group.merge(other)
    group.keep([3, 1, 2])
    group.rebuild("vmap")
    assert held(group) == BASE
    assert_alone(group, study, {0: 3, 1: 2, 2: 1}, steps=6)
    group.to("cpu")
    train(group, study, 6, 9)
    assert_alone(group, study, {0: 3, 1: 2, 2: 1}, steps=9)
    group.keep([])


def test_states_refer_to_the_base_and_files_hold_it_in_full(tmp_path: Any) -> None:
    study = study_of(lambda n: Adapted())
    group = group_of(study)
    train(group, study)
    state = group.export(2)
    base = group._fused.rows.once["base.weight"]
    assert state.tensors["base.weight"].data_ptr() == base.data_ptr()
    assert state.tensors["up.weight"].data_ptr() != group._fused.rows.parameters["up.weight"][2].data_ptr()
    torch.save(state.plain(), tmp_path / "trial.pt")
    loaded = TrialState.from_plain(torch.load(tmp_path / "trial.pt", weights_only=True))
    assert same_bits(loaded.tensors["base.weight"], base)
    again = TrialGroup(study, [loaded], OpenGate())
    train(again, study, 3, 6)
    assert_alone(again, study, {0: 2}, steps=6)


@pytest.mark.parametrize("name", WAYS)
def test_audits(name: str) -> None:
    study = study_of(lambda n: Adapted(WAYS[name][0]))
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    train(group, study)
    group.evaluate()
    assert audit.done >= 2
    assert not audit.mismatches
    assert held(group) == BASE
    assert_alone(group, study)


def test_shaken_parameters_come_back() -> None:
    study = study_of(lambda n: Adapted())
    group = group_of(study)
    train(group, study)
    put_back, state = group.saved(), group.export(0)
    group.shake(1, 0.1)
    assert not same_bits(group.export(0).tensors["base.weight"], state.tensors["base.weight"])
    group.train_step(*study.data[0])
    put_back()
    assert held(group) == BASE
    assert_alone(group, study)


def test_study_says_what_is_shared() -> None:
    study = study_of(differing(2))
    study.shared = ("base.*",)
    group = group_of(study, 2)
    assert held(group) == BASE
    for join in (group.add, lambda late: group.merge(TrialGroup(study, late, OpenGate()))):
        with pytest.raises(FuseError, match=r"parameter 'base\.weight' differs between the trials that join"):
            join(members(study, (2,)))
    train(group, study)
    assert_alone(group, study)
    with pytest.raises(FuseError, match=r"'base\.weight' is not to be shared, as 'base\.\*'.*differs between trials"):
        group_of(study, 3)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("up.*",), r"'up\.weight' is not to be shared.*it is trainable"),
        (("base.*", "lower.*"), r"'lower\.\*', which fits no parameter.*'base|'down"),
    ],
)
def test_study_says_what_cannot_be_shared(patterns: tuple[str, ...], message: str) -> None:
    study = study_of(lambda n: Adapted())
    study.shared = patterns
    with pytest.raises(FuseError, match=message):
        group_of(study)


def test_state_of_an_optimizer_for_what_was_frozen_later_is_kept() -> None:
    """A parameter that was trained and then frozen: its state says so, and joins trials that have none."""

    class Late(ToyStudy):
        def optimizer(self, params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
            made = OPTIMIZERS["adamw"](params["n"], model.parameters())
            if params["n"] == 0:
                assert isinstance(model, Adapted)
                model.base.weight.requires_grad_(True)
                model(data()[0][0]).sum().backward()
                made.step()
                made.zero_grad()
                model.base.weight.requires_grad_(False)
            return made

    study = Late(lambda n: Adapted(), batches=data())
    group = TrialGroup(study, members(study, (0,)), OpenGate())
    group.add(members(study, (1, 2)))
    for row in range(3):
        solo = Solo(study, row)
        assert_same_trial(group, row, solo)
    train(group, study)
    assert_alone(group, study)
    rest = TrialGroup(study, members(study, (1, 2)), OpenGate())
    rest.add(members(study, (0,)))
    train(rest, study)
    assert_alone(rest, study, {0: 1, 1: 2, 2: 0})


def test_integer_buffers_are_each_trials_own() -> None:
    def extra(m: Any) -> None:
        m.register_buffer("packed", torch.arange(16, dtype=torch.int8).view(4, 4))

    def forward(m: Any, x: Tensor) -> Tensor:
        return adapt(m, x) @ (m.packed.double() * 0.01)

    study = study_of(lambda n: Adapted(forward, extra))
    group = group_of(study)
    train(group, study)
    assert held(group) == BASE
    assert group._fused.rows.buffers["packed"].stride(0) != 0
    assert_alone(group, study)


def test_built_alone_a_trial_is_as_ever() -> None:
    study = study_of(lambda n: Adapted())
    own = build_member(study, 0, {"n": 0})
    group_of(study)
    assert same_bits(own.model.state_dict()["base.weight"], Adapted().state_dict()["base.weight"])
