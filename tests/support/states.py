"""Trials out of their group, through a file, and into another."""

import io
from typing import Any

import torch

from trials import TrialGroup
from trials.gate.base import OpenGate
from trials.study import Study
from trials.training.trial_state import TrialState


def states(group: TrialGroup) -> list[dict[str, Any]]:
    """All trials of `group`, as they go to disk."""
    return [group.export(row).plain() for row in range(group.size)]


def reloaded(group: TrialGroup, study: Study | None = None) -> TrialGroup:
    """Another group of the same trials, by way of a file; `study` may differ from theirs."""
    file = io.BytesIO()
    torch.save(states(group), file)
    file.seek(0)
    loaded = [TrialState.from_plain(plain) for plain in torch.load(file, weights_only=True)]
    return TrialGroup(group._study if study is None else study, loaded, OpenGate())
