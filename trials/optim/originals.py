"""Runs any optimizer without a rule: K originals, each over its trial's rows of the parameters."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trials.fusion.errors import FuseError
from trials.fusion.rows import Rows
from trials.optim.facts import Names, shell
from trials.optim.fused import FusedOptimizer, go_on
from trials.optim.gradients import Gradients


class Originals(FusedOptimizer):
    """The user's own optimizers, copied, each over parameters that are views of its trial's rows."""

    units = ("one trial's optimizer step",)

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names_K: Sequence[Names],
        rows: Rows,
        holders: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """See `FusedOptimizer`."""
        super().__init__(optimizers, names_K, rows, holders)
        self._originals = [_copy(optimizer) for optimizer in optimizers]
        self._bind()

    def changed(self) -> None:
        """See `FusedOptimizer`; nothing is kept here."""

    def step(
        self, enter: Callable[[int], None] = go_on, gradients: Gradients | None = None, skip: Sequence[int] = ()
    ) -> None:
        """See `FusedOptimizer`."""
        change = gradients or Gradients()
        changed = {name: None if p.grad is None else change.apply(p.grad) for name, p in self._rows.parameters.items()}
        for row, (original, mine) in enumerate(zip(self._originals, self._views(), strict=True)):
            if row in skip:
                continue
            enter(0)
            for group, source in zip(original.param_groups, self.groups_K[row], strict=True):
                group.update({name: value for name, value in source.items() if name != "params"})
            for name, view in mine.items():
                grad = changed[name]
                view.grad = None if grad is None else grad[row]
            original.step()
            for view in mine.values():
                view.grad = None

    def moved(self) -> None:
        """See `FusedOptimizer`."""
        saved = [original.state_dict()["state"] for original in self._originals]
        self._bind()
        for original, own in zip(self._originals, saved, strict=True):
            _restore(original, own)

    def take(self, rows: Sequence[int]) -> None:
        """See `FusedOptimizer`."""
        super().take(rows)
        self._originals = [self._originals[row] for row in rows]
        self._bind()

    def append(self, other: FusedOptimizer) -> None:
        """See `FusedOptimizer`."""
        if not isinstance(other, Originals):
            raise FuseError("optimizers that are fused in different ways cannot be merged")
        super().append(other)
        self._originals = self._originals + other._originals
        self._bind()

    def state_dict(self) -> dict[str, Any]:
        """See `FusedOptimizer`."""
        return {"trials": [copy.deepcopy(self.extract(row)) for row in range(self.size)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FusedOptimizer`."""
        if "trials" not in state:
            raise FuseError("checkpoint of another optimizer: its state has other parameters or kinds")
        self.load_groups([saved["param_groups"] for saved in state["trials"]])
        self._originals = [_copy(self._originals[0]) for _ in state["trials"]]
        self._bind()
        for original, saved in zip(self._originals, state["trials"], strict=True):
            _restore(original, saved["state"])

    def _state(self, row: int) -> dict[int, dict[str, Any]]:
        return copy.deepcopy(self._originals[row].state_dict()["state"])

    def _views(self) -> list[dict[str, nn.Parameter]]:
        """Per trial, its parameters by name."""
        return [
            {
                name: p
                for own, group in zip(self._members, o.param_groups, strict=True)
                for name, p in zip(own, group["params"], strict=True)
            }
            for o in self._originals
        ]

    def _bind(self) -> None:
        for row, mine in enumerate(self._views()):
            for name, view in mine.items():
                view.data = self._rows.parameters[name].detach()[row]


def _copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of `optimizer` with its state, over parameters of its own, also wherever else it mentions the old ones."""
    made = shell(optimizer)
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach()) for g in optimizer.param_groups for p in g["params"]}
    for name, value in list(vars(made).items()):
        if name != "step":
            vars(made)[name] = copy.deepcopy(value, memo)
    return made


def _restore(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Like `load_state_dict`, which would also cast state of another type to that of the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for position, own in state.items():
        p = parameters[position]
        optimizer.state[p] = {
            name: value.to(p.device, copy=True)
            if isinstance(value, Tensor) and name != "step"
            else copy.deepcopy(value)
            for name, value in own.items()
        }
