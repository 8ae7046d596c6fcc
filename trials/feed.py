"""What trials are trained on: one loader for all, or each trial's own batches."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from trials.fusion import FuseError
from trials.study import Study


def batches_of(
    study: Study, trials: Sequence[tuple[dict[str, Any], int]], epoch: int
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """What `TrialGroup.train_step` is called with in an epoch, counted from 0.

    Args:
        study: the user's.
        trials: hyperparameters and number of each.
        epoch: which one.

    Raises:
        FuseError: the trials' own batches differ in number or shape.
    """
    own = [study.trial_batches(params, number, epoch) for params, number in trials]
    if own[0] is None:
        for inputs_B, targets_B in study.batches(epoch):
            yield inputs_B, targets_B, False
        return
    for pairs in zip_longest(*[() if each is None else each for each in own]):
        if None in pairs:
            raise FuseError("Study.trial_batches gave some trials more batches than others; allowed: equally many")
        if len({(x.shape, y.shape) for x, y in pairs}) > 1:
            raise FuseError("Study.trial_batches gave batches of different shapes; allowed: equal ones for all trials")
        inputs, targets = zip(*pairs, strict=True)
        yield torch.stack(inputs), torch.stack(targets), True
