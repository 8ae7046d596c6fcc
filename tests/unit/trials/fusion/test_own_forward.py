"""Models whose `forward` was assigned to the module, as patches do, in place of their class's."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_and_solo import ToyStudy
from tests.support.two_layers import TwoLayers, assert_fused_is_alone, batches, plain
from trials import FuseError


def patched(factor: float) -> TwoLayers:
    """A model with another forward than its class has."""
    model = TwoLayers(plain).double()

    def forward(x: Tensor) -> Tensor:
        return model.b(model.a(x).relu()) * factor

    model.forward = forward  # type: ignore[method-assign]
    return model


def around(inside: nn.Module) -> nn.Module:
    return nn.Sequential(inside, nn.Linear(4, 4)).double()


@pytest.mark.parametrize("is_inside", [False, True])
def test_it_is_what_all_trials_run(is_inside: bool) -> None:
    torch.manual_seed(0)
    study = ToyStudy(lambda n: around(patched(2.0)) if is_inside else patched(2.0), batches=batches())
    assert_fused_is_alone(study, 3)


@pytest.mark.parametrize("is_inside", [False, True])
def test_trials_with_different_ones_are_not_fused(is_inside: bool) -> None:
    study = ToyStudy(lambda n: around(patched(n + 1)) if is_inside else patched(n + 1), batches=batches())
    with pytest.raises(FuseError, match="forward is code of its own"):
        assert_fused_is_alone(study, 2)
