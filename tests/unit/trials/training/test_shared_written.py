"""Forwards that write to what all trials hold in common: each trial gets its own, or the forward is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.adapted import BASE, Adapted, Forward, adapt, asks, assert_alone, group_of, looks, study_of, train
from tests.support.common_bits import held
from tests.support.fused_and_solo import Solo, assert_same_trial, close, members
from trials import FuseError, TrialGroup
from trials.fusion.errors import RefusedError
from trials.gate.base import OpenGate
from trials.training.audits.audit import Audit


def add_in_place(m: Adapted, x: Tensor) -> Tensor:
    """The same for all trials."""
    with torch.no_grad():
        m.base.weight.mul_(0.9)
    return asks(m, x)


def follow(m: Adapted, x: Tensor) -> Tensor:
    """A teacher that follows the trained weights: each trial's own."""
    if m.training:
        with torch.no_grad():
            m.base.weight.mul_(0.9).add_(m.up.weight @ m.down.weight, alpha=0.1)
    return asks(m, x)


def follow_by_data(m: Adapted, x: Tensor) -> Tensor:
    m.base.weight.data.add_((m.up.weight @ m.down.weight).data)
    return looks(m, x)


def renew_data(m: Adapted, x: Tensor) -> Tensor:
    m.base.weight.data = m.base.weight.data * 0.9 + (m.up.weight @ m.down.weight).data
    return looks(m, x)


def starts(m: Any) -> None:
    """Keep where the trained weights begin."""
    m.register_buffer("start", m.up.weight.detach().clone())


def catch_up(m: Any, x: Tensor) -> Tensor:
    """A teacher that begins where the trained weights do: at first it is given the values that it has."""
    if m.training:
        with torch.no_grad():
            m.base.weight.add_(torch.cat([m.up.weight - m.start] * 2, 1), alpha=0.5)
    return asks(m, x)


def catch_up_by_data(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.base.weight.data.add_(torch.cat([m.up.weight - m.start] * 2, 1).data, alpha=0.5)
    return looks(m, x)


def in_evaluation(m: Adapted, x: Tensor) -> Tensor:
    if not m.training:
        with torch.no_grad():
            m.base.weight.add_(m.up.weight @ m.down.weight)
    return asks(m, x)


WRITING: dict[str, Forward] = {
    "in place": add_in_place, "a teacher": follow, "by data": follow_by_data, "new data": renew_data,
    "in evaluation": in_evaluation, "later than at first": catch_up, "later by data": catch_up_by_data,
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", WRITING)
def test_forward_that_writes_to_the_base(name: str, size: int) -> None:
    study = study_of(lambda n: Adapted(WRITING[name], starts))
    group = group_of(study, size)
    train(group, study)
    scores = group.evaluate()
    assert held(group) == {"base.bias"}
    solos = [Solo(study, number) for number in range(size)]
    for row, solo in enumerate(solos):
        for batch in study.data:
            solo.step(*batch)
        close(scores[row], solo.score(), "score")
        assert_same_trial(group, row, solo)


def test_writing_goes_on_after_the_state_before_it_is_back() -> None:
    """As in an audit that looks again."""
    study = study_of(lambda n: Adapted(follow))
    group = group_of(study)
    put_back = group.saved()
    train(group, study)
    put_back()
    train(group, study)
    assert held(group) == {"base.bias"}
    assert_alone(group, study)


def test_audits_of_a_forward_that_writes() -> None:
    study = study_of(lambda n: Adapted(follow))
    audit = Audit(study)
    group = TrialGroup(study, members(study, range(3)), OpenGate(), audit)
    train(group, study)
    group.evaluate()
    assert audit.done >= 2
    assert not audit.mismatches
    assert_alone(group, study)


@pytest.mark.parametrize("by_layer", [False, True])
def test_layer_that_writes_to_its_base(by_layer: bool) -> None:
    """By its own code, in a graph or in a forward that runs as a whole."""

    class Follower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64), requires_grad=False)
            self.other = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9).add_(self.other)
            return x @ self.weight if isinstance(x, Tensor) else x

    def extra(m: Any) -> None:
        m.follower = Follower()

    def forward(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.follower(adapt(m, x)) @ m.follower.other
        return y if by_layer or len(x) else x

    study = study_of(lambda n: Adapted(forward, extra))
    group = group_of(study)
    train(group, study)
    assert held(group) == BASE
    assert_alone(group, study)


def test_forward_that_writes_later_is_refused_and_what_was_exported_is_not_used() -> None:
    def late(m: Adapted, x: Tensor) -> Tensor:
        if len(x) < 5:
            with torch.no_grad():
                m.base.weight.add_(m.up.weight @ m.down.weight)
        return looks(m, x)

    study = study_of(lambda n: Adapted(late))
    group = group_of(study)
    train(group, study)
    state = group.export(1)
    with pytest.raises(RefusedError, match=r"'base\.weight', which all trials hold in common, though not"):
        group.train_step(study.data[0][0][:3], study.data[0][1][:3])
    with pytest.raises(FuseError, match=r"'base\.weight' of trial 1.*has been changed in place"):
        state.member(study)


def test_forward_that_trains_what_was_frozen() -> None:
    def thaw(m: Adapted, x: Tensor) -> Tensor:
        m.base.weight.requires_grad_(True)
        return looks(m, x)

    study = study_of(lambda n: Adapted(thaw))
    with pytest.raises(FuseError, match=r"requires_grad|trains a parameter"):
        train(group_of(study), study)


class Taught(nn.Module):
    """A teacher of which trials have some parameters in common from the start, and others not."""

    def __init__(self) -> None:
        super().__init__()
        self.pupil, self.teacher = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double() for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for own, other in zip(self.teacher.parameters(), self.pupil.parameters(), strict=True):
                    own.lerp_(other, 0.1)
        return self.pupil(x) - self.teacher(x)


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_in_common_is_put_back_too(size: int) -> None:
    study = study_of(lambda n: Taught())
    group = group_of(study, size)
    train(group, study)
    assert_alone(group, study)
