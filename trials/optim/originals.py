"""Runs any optimizer without a rule: K originals, each over its trial's rows of the parameters."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.fusion.own_code.streams import drawing_from
from trials.fusion.row_moves import give_back
from trials.fusion.rows import Rows, ask_no_gate
from trials.optim.duplicate import duplicate, move
from trials.optim.facts import Names, refuse_views
from trials.optim.fused import OTHER_STATE, OTHER_WAYS, FusedOptimizer, other_parameters
from trials.optim.gradients import Gradients
from trials.optim.optimizer_state import OptimizerState, Own, refuse_changed
from trials.optim.packed import class_values, fixed_parts, pack, parameters_of, unpack
from trials.shrinking.rules import NONE, Multipliers
from trials.shrinking.scaled_optimizer import scaled

MODES = ("train", "eval")
"""Methods of optimizers that train other weights than they evaluate, such as schedule-free ones."""


class Originals(FusedOptimizer):
    """The user's own optimizers, copied, each over parameters that are views of its trial's rows.

    A copy keeps everything of the optimizer: state, attributes, and what it stores in its param groups. If the user's
    optimizers are themselves the holders, their groups and those of the copies are the same before and after each step.
    """

    may_keep_gradients = True

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names_K: Sequence[Names],
        rows: Rows,
        holders: Sequence[torch.optim.Optimizer] | None = None,
        scales: Mapping[str, Multipliers] | None = None,
    ) -> None:
        """See `FusedOptimizer`. `holders`, if given, are duplicates that become this object's own."""
        super().__init__(optimizers, names_K, rows, holders, scales)
        self._originals = list(holders) if holders is not None else [_sharing(o) for o in optimizers]
        self._fixed = fixed_parts(self._originals[0])
        self._training_K: list[bool | None] = [None] * len(self._originals)
        self._seen = False
        self.units = ("one trial's optimizer step",)
        if any(hasattr(optimizers[0], mode) for mode in MODES):
            self.units = (*self.units, "one trial's optimizer mode")
        self._bind()

    def changed(self) -> None:
        """See `FusedOptimizer`; nothing is kept here."""

    def step(
        self, enter: Callable[[int], None] = ask_no_gate, gradients: Gradients | None = None, skip: Sequence[int] = ()
    ) -> None:
        """See `FusedOptimizer`."""
        change = gradients or Gradients()
        parameters = self._rows.parameters
        changed = [
            None if (g := parameters[name].grad) is None else change.scaled(self.scales.get(name, NONE)).apply(g)
            for name in self._order
        ]
        absent = self._rows.absent()
        absent_rows = [absent.get(name, frozenset()) for name in self._order]
        for row, original in enumerate(self._originals):
            if row in skip:
                continue
            enter(0)
            for p, grad, missing in zip(self._parameters_K[row], changed, absent_rows, strict=True):
                p.grad = None if grad is None or row in missing else grad[row]
            self._call(row, partial(self._step_scaled, row) if self.scales else original.step)
            for p in self._parameters_K[row]:
                p.grad = None

    def train(self, enter: Callable[[int], None] = ask_no_gate) -> None:
        """See `FusedOptimizer`."""
        self._switch(True, enter)

    def eval(self, enter: Callable[[int], None] = ask_no_gate) -> None:
        """See `FusedOptimizer`."""
        self._switch(False, enter)

    def moved(self) -> None:
        """See `FusedOptimizer`."""
        for original in self._originals:
            move(original, self._device)
        self._bind()

    def check_movable(self) -> None:
        """See `FusedOptimizer`."""
        for original in self._originals:
            refuse_views(original)  # they could not be told from others afterwards

    def let_go(self) -> None:
        """See `FusedOptimizer`."""
        for own in self._parameters_K:
            for p in own:
                give_back(p)

    def take(self, rows: Sequence[int]) -> None:
        """See `FusedOptimizer`."""
        super().take(rows)
        self._originals = [self._originals[row] for row in rows]
        self._training_K = [self._training_K[row] for row in rows]
        self._bind()

    def move(self, rows: Sequence[int], to: FusedOptimizer) -> None:
        """See `FusedOptimizer`."""
        assert isinstance(to, Originals)  # of the same structure
        super().move(rows, to)
        stay = [row for row in range(len(self._originals)) if row not in rows]
        to._originals, self._originals = ([self._originals[row] for row in own] for own in (rows, stay))
        to._training_K, self._training_K = ([self._training_K[row] for row in own] for own in (rows, stay))
        to._fixed = self._fixed
        for each in (self, to):
            each._bind()

    def append(self, other: FusedOptimizer) -> None:
        """See `FusedOptimizer`."""
        if not isinstance(other, Originals):
            raise FuseError(OTHER_WAYS)
        super().append(other)
        self._originals = self._originals + other._originals
        self._training_K = self._training_K + other._training_K
        self._bind()

    def state_dict(self) -> dict[str, Any]:
        """See `FusedOptimizer`."""
        self._read_holders()
        for original in self._originals:
            refuse_changed(original, self._fixed)
        return {"trials": [pack(original) for original in self._originals], "training": list(self._training_K)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FusedOptimizer`."""
        if "trials" not in state or not self._originals:
            raise FuseError(OTHER_STATE)
        originals = [duplicate(self._originals[0]).made for _ in state["trials"]]
        for original, saved in zip(originals, state["trials"], strict=True):
            unpack(saved, original, self._device)
        self._become(originals, state["training"])

    def state(self, row: int) -> OptimizerState:
        """See `FusedOptimizer`."""
        self._read_holders()
        return Own(duplicate(self._originals[row]).made, self._fixed)

    def saved(self) -> Callable[[], None]:
        """See `FusedOptimizer`; it need not be plain, as in a checkpoint."""
        self._read_holders()
        kept, training = [duplicate(original).made for original in self._originals], list(self._training_K)
        return lambda: self._become([duplicate(each).made for each in kept], training)

    def extract(self, row: int) -> dict[str, Any]:
        """See `FusedOptimizer`."""
        self._read_holders()
        found: dict[str, Any] = copy.deepcopy(self._originals[row].state_dict())
        return found

    @property
    def _device(self) -> torch.device:
        return self._rows.generators[0].device

    def _become(self, originals: Sequence[torch.optim.Optimizer], training_K: Sequence[bool | None]) -> None:
        self._originals = list(originals)
        self.holders, self._live = list(originals), False
        self._training_K = list(training_K)
        self._bind()

    def _switch(self, training: bool, enter: Callable[[int], None]) -> None:
        for row, original in enumerate(self._originals):
            mode = getattr(original, MODES[0] if training else MODES[1], None)
            if mode is not None and self._training_K[row] is not training:
                enter(len(self.units) - 1)
                self._call(row, mode)
            self._training_K[row] = training

    def _call(self, row: int, method: Callable[[], Any]) -> None:
        """Let one original change its parameters, groups and state."""
        original = self._originals[row]
        if self._live:
            _copy_groups(self.holders[row], original)
        self._check_parameters(row)
        before = None if self._seen else class_values(original)
        with drawing_from(self._rows.generators[row]):
            method()
        if before is not None and class_values(original) != before:
            raise FuseError(
                f"optimizer {type(original).__name__} changes an attribute of its class, which all trials have in "
                "common; allowed: attributes of its own"
            )
        self._seen = True
        self._check_parameters(row)
        self._write_back(row)
        if self._live:
            _copy_groups(original, self.holders[row])

    def _step_scaled(self, row: int) -> None:
        own = {id(p): self.scales[n] for n, p in zip(self._order, self._parameters_K[row], strict=True)}
        with scaled(self._originals[row], own):
            self._originals[row].step()

    def _read_holders(self) -> None:
        if self._live:
            for holder, original in zip(self.holders, self._originals, strict=True):
                _copy_groups(holder, original)

    def _check_parameters(self, row: int) -> None:
        now = [id(p) for p in parameters_of(self._originals[row])]
        if now != [id(p) for p in self._parameters_K[row]]:
            raise other_parameters(self._originals[row])

    def _write_back(self, row: int) -> None:
        """Copy into the rows what an optimizer has assigned as new data."""
        for name, p, memory in zip(self._order, self._parameters_K[row], self._memory_K[row], strict=True):
            if _memory(p) == memory:
                continue
            own = self._rows.parameters[name].detach()[row]
            if (p.shape, p.dtype) != (own.shape, own.dtype):
                raise FuseError(
                    f"optimizer {type(self._originals[row]).__name__} gives '{name}' another shape or type; allowed: "
                    "new values"
                )
            own.copy_(p.detach().clone())
            p.data = own

    def _bind(self) -> None:
        """Let each original's parameters be views of its trial's rows."""
        self._parameters_K = [parameters_of(original) for original in self._originals]
        self._memory_K = []
        for row, (original, mine) in enumerate(zip(self._originals, self._parameters_K, strict=True)):
            refuse_views(original)
            for name, p in zip(self._order, mine, strict=True):
                p.data = self._rows.parameters[name].detach()[row]
            self._memory_K.append([_memory(p) for p in mine])


def _sharing(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A duplicate that has the settings in its param groups in common with `optimizer`."""
    values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return duplicate(optimizer, values).made


def _copy_groups(source: torch.optim.Optimizer, into: torch.optim.Optimizer) -> None:
    """Copy all that the param groups hold but parameters."""
    if len(source.param_groups) != len(into.param_groups):
        raise FuseError(
            f"optimizer {type(source).__name__} has other param groups than when it was fused; allowed: all from the "
            "start, with a learning rate of 0 until needed"
        )
    for theirs, group in zip(source.param_groups, into.param_groups, strict=True):
        parameters = group["params"]
        group.clear()
        group.update(theirs, params=parameters)


def _memory(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()
