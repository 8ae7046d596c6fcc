"""The base of the ways to fuse K trials' optimizers."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.fusion.rows import Rows, ask_no_gate
from trials.optim.facts import Names
from trials.optim.gradients import Gradients
from trials.optim.optimizer_state import OptimizerState
from trials.optim.registry import Group
from trials.shrinking.rules import Multipliers

OTHER_WAYS = "optimizers that are fused in different ways cannot be merged"
OTHER_STATE = "checkpoint of another optimizer: its state has other parameters or kinds"


def other_parameters(optimizer: torch.optim.Optimizer) -> FuseError:
    """The error of an optimizer whose param groups have changed since it was fused."""
    return FuseError(
        f"optimizer {type(optimizer).__name__} has other parameters than when it was fused; allowed: all param groups "
        "from the start, with a learning rate of 0 until needed"
    )


class FusedOptimizer(abc.ABC):
    """The optimizers of K trials.

    Attributes:
        holders: per trial, an optimizer whose `param_groups` hold its hyperparameters; read there at each step if they
            are the user's own, else after `changed`.
        units: the names of the pieces into which a step is divided.
        scales: what each parameter's settings are multiplied by, and its gradient where it is clipped.
        computes_in: the type in which it computes, if that is coarser than the parameters'.
        may_keep_gradients: whether a step may keep the tensors of its gradients, without a copy.
    """

    units: Sequence[str]
    computes_in: torch.dtype | None = None
    may_keep_gradients = False

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names_K: Sequence[Names],
        rows: Rows,
        holders: Sequence[torch.optim.Optimizer] | None = None,
        scales: Mapping[str, Multipliers] | None = None,
    ) -> None:
        """Copy the state of `optimizers`, which agree in `optimizer_facts`.

        Args:
            optimizers: one per trial, over its own parameters.
            names_K: the names of these parameters.
            rows: the parameters of all trials.
            holders: optimizers whose hyperparameters count; by default `optimizers`.
            scales: what each parameter's settings are multiplied by. Neither holders nor schedulers see it.
        """
        self.scales = scales or {}
        self.holders = list(optimizers if holders is None else holders)
        self._live = holders is None
        self._members = [[names_K[0][id(p)] for p in group["params"]] for group in optimizers[0].param_groups]
        self._order = [name for group in self._members for name in group]
        self._rows = rows

    @property
    def size(self) -> int:
        """K."""
        return len(self.holders)

    @property
    def groups_K(self) -> list[list[Group]]:
        """Per trial, its ordinary `param_groups`."""
        return [holder.param_groups for holder in self.holders]

    @property
    def names(self) -> list[str]:
        """The parameters that are trained, in the optimizers' order."""
        return list(self._order)

    def set_lr(self, row: int, value: float, group: int | None = None) -> None:
        """Set the learning rate of one trial, in one of its param groups or in all."""
        groups = self.groups_K[row]
        for chosen in groups if group is None else [groups[group]]:
            if isinstance(chosen["lr"], Tensor):
                chosen["lr"].fill_(value)
            else:
                chosen["lr"] = float(value)
        self.changed()

    def zero_grad(self) -> None:
        """Forget the gradients, of parameters that are not trained too."""
        self._rows.forget_gradients()

    def train(self, enter: Callable[[int], None] = ask_no_gate) -> None:  # noqa: B027 - most optimizers have one mode
        """Call each optimizer's own `train`, if it has one, unless it was the last of the two.

        Args:
            enter: called with the index of the unit before it runs.
        """

    def eval(self, enter: Callable[[int], None] = ask_no_gate) -> None:  # noqa: B027
        """The same for `eval`."""

    @abc.abstractmethod
    def moved(self) -> None:
        """Follow the parameters to another device."""

    @abc.abstractmethod
    def changed(self) -> None:
        """Read the hyperparameters anew at the next step."""

    @abc.abstractmethod
    def step(
        self, enter: Callable[[int], None] = ask_no_gate, gradients: Gradients | None = None, skip: Sequence[int] = ()
    ) -> None:
        """Update all parameters that have a gradient, as `torch.optim` does.

        Args:
            enter: called with the index of each of `units` before it runs, and again where it may be interrupted.
            gradients: changes the gradients first.
            skip: rows that stay as they are, with their state.
        """

    @abc.abstractmethod
    def check_movable(self) -> None:
        """Make sure that the parameters can move.

        Raises:
            FuseError: the optimizer would still hold their memory after `let_go`.
        """

    @abc.abstractmethod
    def let_go(self) -> None:
        """Hold no memory of the parameters any more, until one of the following, so that they can move.

        Nothing can step until then, so call `check_movable` before, of all that are to move.
        """

    def take(self, rows: Sequence[int]) -> None:
        """Keep only the trials in `rows`, in that order; the parameters were taken before."""
        self.holders = [self.holders[row] for row in rows]

    def move(self, rows: Sequence[int], to: "FusedOptimizer") -> None:
        """Move the trials in `rows`, as `Rows.move`; the parameters were moved before."""
        to.holders = [self.holders[row] for row in rows]
        self.holders = [holder for row, holder in enumerate(self.holders) if row not in rows]

    def append(self, other: "FusedOptimizer") -> None:
        """Take over the trials of `other`, after these, as `Rows.append`; the parameters were added before."""
        self.holders = self.holders + other.holders

    @abc.abstractmethod
    def extract(self, row: int) -> dict[str, Any]:
        """The ordinary `state_dict` of one trial's optimizer."""

    @abc.abstractmethod
    def state(self, row: int) -> OptimizerState:
        """Return a copy of all that one trial's optimizer keeps."""

    def saved(self) -> Callable[[], None]:
        """Return a function that puts all trials back to their present state."""
        state = self.state_dict()
        return lambda: self.load_state_dict(state)

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All trials as plain containers of tensors and numbers."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all trials, also their number.

        Raises:
            FuseError: `state` comes from optimizers of another structure.
        """
