"""The trials of a group, row by row: all that is neither a model's tensor nor an optimizer's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trials.pinned_memory import copied_to
from trials.training.inputs.batches import Reader
from trials.training.member import Member
from trials.training.progress import Progress
from trials.training.scores.history import History


@dataclass(slots=True)
class Roster:
    """One entry per row in each list.

    Attributes:
        numbers: the trials' numbers in the study.
        params: their hyperparameters.
        epochs_done: how many epochs each has finished.
        progress: their schedulers, loss scales and limits.
        losses_K: their losses in the last step, ``[K]``; NaN before a trial's first.
        histories: their losses and scores so far; see `sums_K` for the epoch under way.
        sums_K: the sums of their losses in that epoch, ``[K]``, float64; of no meaning before its first step.
    """

    numbers: list[int]
    params: list[dict[str, Any]]
    epochs_done: list[int]
    progress: list[Progress]
    losses_K: Tensor
    histories: list[History]
    sums_K: Tensor

    @classmethod
    def of(cls, members: Sequence[Member], progress: list[Progress], like: Tensor) -> "Roster":
        """The roster of trials as they join; `like` gives the type and device of their losses."""
        for member, own in zip(members, progress, strict=True):
            if member.progress is not None:
                own.load_state_dict(member.progress)
        losses_K = like.new_tensor([member.loss for member in members])
        numbers, params = [member.number for member in members], [member.params for member in members]
        histories = [History.of(member.history) for member in members]
        sums_K = torch.tensor([each.total for each in histories], dtype=torch.float64, device=like.device)
        return cls(numbers, params, [member.epoch for member in members], progress, losses_K, histories, sums_K)

    def __len__(self) -> int:
        """K."""
        return len(self.numbers)

    def readers(self) -> list[Reader]:
        """The trials, and the epoch that each trains next, counted from 0, from its place in it on."""
        places = [(history.steps, history.mark) for history in self.histories]
        trials = zip(self.numbers, self.params, self.epochs_done, places, strict=True)
        return [Reader(number, params, epoch, *place) for number, params, epoch, place in trials]

    def note_losses(self, losses_K: Tensor, batches: int) -> None:
        """Keep the losses of a step, ``[K]``: means over that many batches."""
        begun = [history.steps > 0 for history in self.histories]
        self.losses_K, own_K = losses_K, losses_K.double() * batches
        if all(begun):
            self.sums_K = self.sums_K + own_K
        elif any(begun):
            self.sums_K = own_K + torch.where(copied_to(own_K.device, torch.tensor(begun)), self.sums_K, 0.0)
        else:
            self.sums_K = own_K
        for history in self.histories:
            history.steps += batches
            history.mark = ""

    def end_epoch(self) -> None:
        """Count an epoch for every trial."""
        for history, total in zip(self.histories, self.sums_K.tolist(), strict=True):
            history.end_epoch(total)
        self.epochs_done = [epochs + 1 for epochs in self.epochs_done]

    def take(self, rows: Sequence[int]) -> None:
        """Keep only the trials in `rows`, in that order."""
        self.numbers = [self.numbers[row] for row in rows]
        self.params = [self.params[row] for row in rows]
        self.epochs_done = [self.epochs_done[row] for row in rows]
        self.progress = [self.progress[row] for row in rows]
        self.losses_K, self.sums_K = self.losses_K[list(rows)], self.sums_K[list(rows)]
        self.histories = [self.histories[row] for row in rows]

    def part(self, rows: Sequence[int]) -> "Roster":
        """Move the trials in `rows`, in that order, into a roster of their own."""
        other = replace(self)
        other.take(rows)
        self.take([row for row in range(len(self)) if row not in rows])
        return other

    def append(self, other: "Roster") -> None:
        """Add the trials of `other` as rows below these."""
        self.numbers += other.numbers
        self.params += other.params
        self.epochs_done += other.epochs_done
        self.progress += other.progress
        self.losses_K = torch.cat([self.losses_K, other.losses_K])
        self.sums_K = torch.cat([self.sums_K, other.sums_K])
        self.histories += other.histories

    def to(self, device: torch.device) -> None:
        """Move the losses."""
        self.losses_K, self.sums_K = self.losses_K.to(device), self.sums_K.to(device)

    def history(self, row: int) -> dict[str, Any]:
        """The history of the trial in `row`, as plain containers."""
        own = self.histories[row]
        return own.plain(self.sums_K[row].item() if own.steps else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """As plain containers and tensors."""
        return {
            "numbers": list(self.numbers),
            "params": [dict(params) for params in self.params],
            "epochs_done": list(self.epochs_done),
            "losses": self.losses_K.clone(),
            "sums": self.sums_K.clone(),
            "progress": [trial.state_dict() for trial in self.progress],
            "histories": [history.plain(0.0) for history in self.histories],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], progress: list[Progress], device: torch.device) -> "Roster":
        """The roster that `state` was taken of; `progress` is made anew, and loads its own part of `state`."""
        for trial, saved in zip(progress, state["progress"], strict=True):
            trial.load_state_dict(saved)
        params = [dict(params) for params in state["params"]]
        return cls(
            *(list(state["numbers"]), params, list(state["epochs_done"]), progress, state["losses"].to(device)),
            histories=[History.of(plain) for plain in state["histories"]],
            sums_K=state["sums"].to(device),
        )
