"""The optimizers of K trials with one or several each, handled as one."""

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Any

import torch

from trials.fusion.errors import FuseError
from trials.fusion.graph.trace import FORWARD
from trials.optim.fused import FusedOptimizer

Given = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
"""A trial's optimizer, or several by the phase of training that each belongs to."""


def by_phase(given: Given) -> dict[str, torch.optim.Optimizer]:
    """A trial's optimizers by phase; a single one belongs to `forward`.

    Raises:
        FuseError: there is none, or two phases have the same.
    """
    if not isinstance(given, Mapping):
        return {FORWARD: given}
    if not given:
        raise FuseError("Study.optimizer returned no optimizers; allowed: one, or a dictionary of at least one")
    if len({id(optimizer) for optimizer in given.values()}) < len(given):
        raise FuseError(f"Study.optimizer returned one optimizer for several of {list(given)}; allowed: one for each")
    return dict(given)


def as_given(found: Mapping[str, Any]) -> Any:
    """What belongs to the optimizers, as the user knows it: by phase only where there are several."""
    return found[FORWARD] if list(found) == [FORWARD] else dict(found)


class Optimizers:
    """Those of K trials, one `FusedOptimizer` per phase."""

    def __init__(self, fused: Mapping[str, FusedOptimizer]) -> None:
        """Of at least one phase."""
        self._fused = dict(fused)

    def __getitem__(self, phase: str) -> FusedOptimizer:
        """That of a phase."""
        return self._fused[phase]

    def __iter__(self) -> Iterator[FusedOptimizer]:
        """All, in the order of the phases."""
        return iter(self._fused.values())

    def items(self) -> ItemsView[str, FusedOptimizer]:
        """All, by phase."""
        return self._fused.items()

    def saved(self) -> Callable[[], None]:
        """See `FusedOptimizer.saved`."""
        saved = [optimizer.saved() for optimizer in self]

        def put_back() -> None:
            for one in saved:
                one()

        return put_back

    @property
    def holders(self) -> list[dict[str, torch.optim.Optimizer]]:
        """Per trial, what holds the hyperparameters of each phase."""
        return [dict(zip(self._fused, own, strict=True)) for own in zip(*(o.holders for o in self), strict=True)]

    def changed(self) -> None:
        """Read the hyperparameters anew at the next step."""
        for optimizer in self:
            optimizer.changed()

    def moved(self) -> None:
        """Follow the parameters to another device."""
        for optimizer in self:
            optimizer.moved()

    def set_lr(self, row: int, value: float, group: int | None) -> None:
        """See `FusedOptimizer.set_lr`; in all phases."""
        for optimizer in self:
            optimizer.set_lr(row, value, group)

    def let_go(self, *others: "Optimizers") -> None:
        """See `FusedOptimizer.let_go`; with `others`, of all or none.

        Raises:
            FuseError: the parameters of one cannot move. Then all train on where they are.
        """
        together = self, *others
        for each in together:
            each.check_movable()
        for each in together:
            for optimizer in each:
                optimizer.let_go()

    def check_movable(self) -> None:
        """See `FusedOptimizer.check_movable`."""
        for optimizer in self:
            optimizer.check_movable()

    def take(self, rows: Sequence[int]) -> None:
        """Keep only the trials in `rows`."""
        for optimizer in self:
            optimizer.take(rows)

    def move(self, rows: Sequence[int], to: "Optimizers") -> None:
        """Move the trials in `rows` to where others were, which had the same phases."""
        for phase, optimizer in self._fused.items():
            optimizer.move(rows, to[phase])

    def append(self, other: "Optimizers") -> None:
        """Take over the trials of `other`, which have the same phases."""
        for phase, optimizer in self._fused.items():
            optimizer.append(other[phase])

    def extract(self, row: int) -> dict[str, Any]:
        """The ordinary `state_dict` of one trial's optimizer, or of each of them by phase."""
        found: dict[str, Any] = as_given({phase: optimizer.extract(row) for phase, optimizer in self._fused.items()})
        return found
