"""The trials of a group, row by row: all that is neither a model's tensor nor an optimizer's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trials.training.batches import Reader
from trials.training.member import Member
from trials.training.progress import Progress


@dataclass(slots=True)
class Roster:
    """One entry per row in each list.

    Attributes:
        numbers: the trials' numbers in the study.
        params: their hyperparameters.
        epochs_done: how many epochs each has finished.
        progress: their schedulers, loss scales and limits.
        losses_K: their losses in the last step, ``[K]``; NaN before a trial's first.
    """

    numbers: list[int]
    params: list[dict[str, Any]]
    epochs_done: list[int]
    progress: list[Progress]
    losses_K: Tensor

    @classmethod
    def of(cls, members: Sequence[Member], progress: list[Progress], like: Tensor) -> "Roster":
        """The roster of trials as they join; `like` gives the type and device of their losses."""
        for member, own in zip(members, progress, strict=True):
            if member.progress is not None:
                own.load_state_dict(member.progress)
        losses_K = like.new_tensor([member.loss for member in members])
        numbers, params = [member.number for member in members], [member.params for member in members]
        return cls(numbers, params, [member.epoch for member in members], progress, losses_K)

    def __len__(self) -> int:
        """K."""
        return len(self.numbers)

    def readers(self) -> list[Reader]:
        """The trials, and the epoch that each trains next, counted from 0."""
        return [Reader(*trial) for trial in zip(self.numbers, self.params, self.epochs_done, strict=True)]

    def end_epoch(self) -> None:
        """Count an epoch for every trial."""
        self.epochs_done = [epochs + 1 for epochs in self.epochs_done]

    def take(self, rows: Sequence[int]) -> None:
        """Keep only the trials in `rows`, in that order."""
        self.numbers = [self.numbers[row] for row in rows]
        self.params = [self.params[row] for row in rows]
        self.epochs_done = [self.epochs_done[row] for row in rows]
        self.progress = [self.progress[row] for row in rows]
        self.losses_K = self.losses_K[list(rows)]

    def append(self, other: "Roster") -> None:
        """Add the trials of `other` as rows below these."""
        self.numbers += other.numbers
        self.params += other.params
        self.epochs_done += other.epochs_done
        self.progress += other.progress
        self.losses_K = torch.cat([self.losses_K, other.losses_K])

    def to(self, device: torch.device) -> None:
        """Move the losses."""
        self.losses_K = self.losses_K.to(device)

    def state_dict(self) -> dict[str, Any]:
        """As plain containers and tensors."""
        return {
            "numbers": list(self.numbers),
            "params": [dict(params) for params in self.params],
            "epochs_done": list(self.epochs_done),
            "losses": self.losses_K.clone(),
            "progress": [trial.state_dict() for trial in self.progress],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], progress: list[Progress], device: torch.device) -> "Roster":
        """The roster that `state` was taken of; `progress` is made anew, and loads its own part of `state`."""
        for trial, saved in zip(progress, state["progress"], strict=True):
            trial.load_state_dict(saved)
        params = [dict(params) for params in state["params"]]
        return cls(list(state["numbers"]), params, list(state["epochs_done"]), progress, state["losses"].to(device))
