"""The table of update rules: how one kind of `torch.optim` optimizer updates the parameters of K trials at once.

A new optimizer is a `Rule` in one file of this folder, imported in `trials/optim/__init__.py`. Shapes: K trials, N
weights of a trial.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trials.shrinking.rules import Multipliers

Group = dict[str, Any]
Numbers = Mapping[str, NDArray[Any]]
"""A name -> one number per trial (``[K]``), or of several steps (``[steps, K]``)."""

Tensors = list[Tensor]


class Rule(abc.ABC):
    """The update of one param group.

    `update` sees parameters as ``[K, N]`` and everything that may differ between trials as ``[K, 1]``; the formulas are
    those of the single-tensor form in `torch.optim`.
    """

    flags: ClassVar[tuple[str, ...]] = ("maximize",)
    """The settings that must be equal for all trials. All others in a param group are numbers that may differ."""

    kinds: tuple[str, ...] = ()
    """The names of the state's tensors, as in a `state_dict`."""

    counts: ClassVar[tuple[str, ...]] = ("step",)
    """The names of the state's numbers."""

    computes_in: ClassVar[torch.dtype | None] = None
    """The type in which it computes, if that is coarser than the parameters'."""

    multi_tensor: ClassVar[str | None] = None
    """The kernel in `multi_tensor_kernel` that does what `update` does."""

    elementwise: ClassVar[bool] = True
    """Whether parameters may be updated side by side or in pieces. If not, each comes in its own shape."""

    def __init__(self, group: Group, kind: type[torch.optim.Optimizer]) -> None:
        """Read the flags of one trial's param group, of an optimizer of class `kind`."""
        self.maximize = bool(group.get("maximize", False))

    def start(self, state: Mapping[str, Any], like: Tensor) -> dict[str, float]:
        """The counts of one parameter whose ordinary state is `state`."""
        return {name: float(state.get(name, 0.0)) for name in self.counts}

    def saved(self, group: Group, counts: Mapping[str, float], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The ordinary state of one parameter; empty: it has none yet."""
        if not counts["step"]:
            return {}
        return {**{name: torch.tensor(value) for name, value in counts.items()}, **tensors}

    def switches(self) -> dict[str, bool]:
        """What `multi_tensor` is told besides state and coefficients."""
        return {"maximize": self.maximize}

    @abc.abstractmethod
    def coefficients(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """Compute what `update` needs in this step, in float64.

        Args:
            h: the param group's numbers, ``[K]``; betas are ``beta1``, ``beta2``.
            counts: the state's numbers in several steps, this step included, ``[steps, K]``.
        """

    def count(self, h: Numbers, counts: Numbers) -> dict[str, NDArray[Any]]:
        """The counts after one more step."""
        return {"step": counts["step"] + 1}

    @abc.abstractmethod
    def update(self, p: Tensor, g: Tensor, s: dict[str, Tensor], c: dict[str, Tensor], a: Tensor, b: Tensor) -> None:
        """Update `p` and the state `s` in place.

        Args:
            p: parameters ``[K, N]``.
            g: their gradients; not to be changed.
            s: the state's tensors, each ``[K, N]``.
            c: the coefficients, each ``[K, 1]``.
            a: scratch space ``[K, N]``.
            b: the same.
        """


class SinglePass(Rule):
    """A rule for which PyTorch has a kernel that passes over the memory once, for trials of the same numbers."""

    shared: ClassVar[frozenset[str]]
    """The numbers that must be equal for all trials for `update_common`; the rate need not."""

    @abc.abstractmethod
    def kernel(self, p: Tensors, g: Tensors, s: dict[str, Tensors], h: Mapping[str, float], step: Tensor) -> None:
        """Update `p` and the state `s` in place; it descends, whatever `maximize` says.

        Args:
            p: parameters, or a piece of one; each contiguous.
            g: their gradients.
            s: kind -> the state's tensors.
            h: the numbers, as for `coefficients`.
            step: how many steps, this one included; a scalar.
        """

    def update_common(
        self,
        p: Tensors,
        g: Tensors,
        s: dict[str, Tensors],
        c: dict[str, Tensor],
        common: Mapping[str, float],
        step: Tensor,
        work: tuple[Tensors, Tensors],
    ) -> None:
        """`update` of trials that agree in `shared` (values in `common`) and in `step`; all tensors ``[K, n]``.

        The kernel moves zeros at a rate of 1, which is then each trial's own: ``c["rate"]``.
        """
        g = [decay(own, gradient, c, a) for own, gradient, a in zip(p, g, work[0], strict=True)]
        moved = list(work[1])
        torch._foreach_zero_(moved)
        self.kernel(moved, g, s, {**common, "lr": 1.0, "weight_decay": 0.0}, step)
        for own, way in zip(p, moved, strict=True):
            own.addcmul_(way, c["rate"])


RULES: dict[type[torch.optim.Optimizer], type[Rule]] = {}

RuleType = TypeVar("RuleType", bound=type[Rule])


def rule(*names: str) -> Callable[[RuleType], RuleType]:
    """Register the decorated `Rule` for the optimizers of these names in `torch.optim`, if this PyTorch has them."""

    def register(made: RuleType) -> RuleType:
        for name in names:
            kind = getattr(torch.optim, name, None)
            if kind is not None:
                RULES[kind] = made
        return made

    return register


def decayed(h: Numbers, decoupled: bool = False) -> dict[str, NDArray[Any]]:
    """Weight decay as a coefficient: added to the gradient, or what the parameters are multiplied by."""
    decay = h["weight_decay"]
    if not decay.any():
        return {}
    return {"keep": 1 - h["lr"] * decay} if decoupled else {"decay": decay}


def decay(p: Tensor, g: Tensor, c: dict[str, Tensor], scratch: Tensor) -> Tensor:
    """Apply the result of `decayed`. Returns the gradient to use."""
    if "keep" in c:
        p.mul_(c["keep"])
    if "decay" in c:
        return torch.mul(p, c["decay"], out=scratch).add_(g)
    return g


def scaled(rate: NDArray[Any], eps: NDArray[Any], root: NDArray[Any] | float = 1.0) -> dict[str, NDArray[Any]]:
    """The coefficients of `move`: with the rate in the denominator, one kernel needs no vector and is twice as fast."""
    still = np.abs(rate) < 1e-30
    safe = np.where(still, 1.0, rate)
    return {"root": np.where(still, 0.0, root / safe), "eps": np.where(still, np.inf, eps / safe)}


def move(p: Tensor, direction: Tensor, square: Tensor, c: dict[str, Tensor], out: Tensor) -> None:
    """``p -= rate * direction / (root * sqrt(square) + eps)``."""
    p.addcdiv_(direction, torch.sqrt(square, out=out).mul_(c["root"]).add_(c["eps"]), value=-1)


def scaled_numbers(numbers: dict[str, NDArray[Any]], scales: Multipliers) -> dict[str, NDArray[Any]]:
    """The numbers of `numbers_of` for a parameter with these multipliers."""
    factors = {"lr": scales.rate, "weight_decay": scales.decay, "eps": scales.eps}
    made = {name: values * factors[name] if name in factors else values for name, values in numbers.items()}
    if scales.unrectified != 1:
        made["unrectified"] = np.full_like(made["lr"], scales.unrectified)
    return made


def numbers_of(groups: list[Group]) -> dict[str, NDArray[Any]]:
    """The numbers of K trials' same param group as vectors, without those that only some of the trials have."""
    made: dict[str, NDArray[Any]] = {}
    for name, value in groups[0].items() if groups else ():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number or name == "betas") or not all(name in group for group in groups):
            continue
        if name == "betas":
            pairs = np.array([[float(beta) for beta in group["betas"]] for group in groups])
            made["beta1"], made["beta2"] = pairs[:, 0], pairs[:, 1]
        else:
            made[name] = np.array([float(group[name]) for group in groups])
    return made


def by_trial(numbers: Mapping[str, NDArray[Any]]) -> list[dict[str, float]]:
    """One dictionary per trial."""
    return [dict(zip(numbers, own, strict=True)) for own in zip(*(v.tolist() for v in numbers.values()), strict=True)]


def common_of(numbers_K: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Those that are equal for all trials."""
    first = numbers_K[0] if numbers_K else {}
    return {name: value for name, value in first.items() if all(own[name] == value for own in numbers_K)}
