"""What a study gives to train on."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.fused_and_solo import ToyStudy
from trials import FuseError
from trials.training.inputs.batches import Reader, rounds

BATCH = torch.ones(1, 2), torch.zeros(1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, r"Study\.batches returned None; allowed: pairs \(inputs, targets\)"),
        ([BATCH, None, BATCH], r"Study\.batches gave a NoneType; allowed: pairs \(inputs, targets\)"),
        ([], "the study gave no batches in epoch 3"),
    ],
)
def test_what_is_no_batch_ends_no_epoch(given: Any, says: str) -> None:
    study = ToyStudy(lambda n: nn.Linear(2, 1))
    study.data = given
    with pytest.raises(FuseError, match=says):
        list(rounds(study, [Reader(0, {}, 3)]))
