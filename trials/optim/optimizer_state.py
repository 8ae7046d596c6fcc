"""What one trial's optimizer keeps, in a form that goes into any fresh optimizer of the same kind, and to disk."""

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trials.fusion.errors import FuseError
from trials.optim.duplicate import give
from trials.optim.packed import fixed_parts, pack, parameters_of, unpack

ORDINARY, PACKED = "state_dict", "packed"


class OptimizerState(Protocol):
    """One trial's, as it was when it was taken."""

    def give(self, to: torch.optim.Optimizer) -> None:
        """Let `to`, a fresh optimizer over the trial's own parameters, continue from here."""

    def plain(self) -> dict[str, Any]:
        """Return plain containers that ``torch.load(..., weights_only=True)`` reads; see `from_plain`.

        Raises:
            FuseError: the optimizer keeps something that is neither number, text nor tensor.
        """


def from_plain(plain: Mapping[str, Any]) -> OptimizerState:
    """The reverse of `OptimizerState.plain`."""
    if ORDINARY in plain:
        return Ordinary(plain["kind"], plain[ORDINARY])
    return _Packed(plain["kind"], plain[PACKED])


@dataclass(frozen=True, slots=True)
class Ordinary:
    """A `state_dict`, for optimizers that keep nothing else.

    Args:
        kind: the name of their class.
        saved: the `state_dict`.
    """

    kind: str
    saved: Mapping[str, Any]

    def give(self, to: torch.optim.Optimizer) -> None:
        """Like `load_state_dict`, which would also turn what is kept in another type into the parameters' own."""
        parameters = parameters_of(to)
        if type(to).__name__ != self.kind or len(to.param_groups) != len(self.saved["param_groups"]):
            raise _unlike(self.kind, to)
        for group, own in zip(to.param_groups, self.saved["param_groups"], strict=True):
            if len(group["params"]) != len(own["params"]):
                raise _unlike(self.kind, to)
            group.update({name: copy.deepcopy(value) for name, value in own.items() if name != "params"})
        to.state.clear()
        for position, state in self.saved["state"].items():
            p = parameters[position]
            moved = {n: v.to(p.device) if _follows(n, v) else v for n, v in copy.deepcopy(state).items()}
            to.state[p] = moved

    def plain(self) -> dict[str, Any]:
        """See `OptimizerState`."""
        return {"kind": self.kind, ORDINARY: dict(self.saved)}


@dataclass(frozen=True, slots=True)
class Own:
    """All that an optimizer of any kind keeps.

    Args:
        kept: a duplicate of it, which nobody else uses.
        fixed: its `fixed_parts` when its trial began. They are made anew by the study, not saved.
    """

    kept: torch.optim.Optimizer
    fixed: Mapping[str, Hashable]

    def give(self, to: torch.optim.Optimizer) -> None:
        """See `OptimizerState`."""
        give(self.kept, to)

    def plain(self) -> dict[str, Any]:
        """See `OptimizerState`."""
        refuse_changed(self.kept, self.fixed)
        return {"kind": type(self.kept).__name__, PACKED: pack(self.kept)}


@dataclass(frozen=True, slots=True)
class _Packed:
    kind: str
    packed: Mapping[str, Any]

    def give(self, to: torch.optim.Optimizer) -> None:
        parameters = parameters_of(to)
        device = parameters[0].device if parameters else torch.device("cpu")
        if type(to).__name__ != self.kind:
            raise _unlike(self.kind, to)
        try:
            unpack(self.packed, to, device)
        except IndexError as error:  # a parameter that is not there
            raise _unlike(self.kind, to) from error
        if len(parameters_of(to)) != len(parameters):
            raise _unlike(self.kind, to)

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, PACKED: dict(self.packed)}


def refuse_changed(optimizer: torch.optim.Optimizer, fixed: Mapping[str, Hashable]) -> None:
    """Refuse an optimizer that has changed what cannot be saved.

    Raises:
        FuseError: such as an attribute that holds another function than before.
    """
    for name, value in fixed_parts(optimizer).items():
        if fixed.get(name) != value:
            raise FuseError(
                f"'{name}' changes while its trial trains, and cannot be saved; allowed: numbers, text, tensors, and "
                "lists and dictionaries of them"
            )


def _follows(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and name != "step"


def _unlike(kind: str, now: torch.optim.Optimizer) -> FuseError:
    return FuseError(
        f"checkpoint of another optimizer: {kind}; Study.optimizer now gives this trial {type(now).__name__}, or other "
        "parameters"
    )
