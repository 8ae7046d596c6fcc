"""Frozen parameters that are equal in some trials of a group only, such as those that one seed has drawn."""

from torch import nn

from tests.support.adapted import Adapted, assert_alone, study_of, train
from tests.support.common_bits import held
from tests.support.fused_and_solo import ToyStudy, members
from trials import TrialGroup
from trials.fusion.shared_base import Bases
from trials.gate.base import OpenGate


def of_two_seeds(number: int) -> nn.Module:
    """Trials 0 and 1 have one base, trials 2 and 3 another."""
    model = Adapted()
    nn.init.constant_(model.base.weight, 0.1 * (1 + number // 2))
    return model


def adopted(study: ToyStudy, numbers: tuple[int, ...]) -> TrialGroup:
    own, bases = members(study, numbers), Bases()
    for member in own:
        bases.adopt(member.model)
    return TrialGroup(study, own, OpenGate())


def test_trials_that_waited_with_one_base_train_with_others_that_have_another() -> None:
    study = study_of(of_two_seeds)
    group = adopted(study, (0, 1, 2))
    assert held(group) == {"base.bias"}
    train(group, study)
    assert_alone(group, study)


def test_so_do_those_that_join_and_those_that_come_back_from_their_states() -> None:
    study = study_of(of_two_seeds)
    group = adopted(study, (0, 1, 2))
    group.rebuild("vmap")
    own, bases = members(study, (1, 2, 3)), Bases()
    for member in own:
        bases.adopt(member.model)
    group.add(own)
    train(group, study)
    assert_alone(group, study, {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 3})
