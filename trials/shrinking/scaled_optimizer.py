"""Applies multipliers to an ordinary optimizer: once, for a user's own loop, or during single steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trials.shrinking.errors import ShrinkError
from trials.shrinking.roles import Roles
from trials.shrinking.rules import NONE, Multipliers, multipliers

Group = dict[str, Any]

RECTIFIED = 5.0
"""RAdam normalizes its steps once the length of its average is above this (Liu et al. 2020)."""


def scaled_groups(optimizer: torch.optim.Optimizer, roles: Roles) -> None:
    """Multiply rate, weight decay and eps for each parameter, for a training loop of your own.

    It splits `param_groups` in place, so that a scheduler must be made afterwards. Schedulers that set absolute rates
    (OneCycleLR, `eta_min`, ReduceLROnPlateau's `min_lr`) then set the wrong ones; `Study.shrink` has no such limit.
    Clip with `clip_gradients`.

    Args:
        optimizer: over parameters of the surrogate, before its first step.
        roles: the surrogate's.

    Raises:
        ShrinkError: see `multipliers`; or the groups were scaled before, or have a scheduler already.
    """
    kind = type(optimizer).__name__
    if optimizer in _scaled:
        raise ShrinkError(f"the groups of this {kind} were scaled before; allowed: once")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ShrinkError(f"{kind} has a scheduler already; allowed: trials.scaled_groups before it is made")
    found = multipliers(roles, optimizer)
    names = roles.names()
    own = {id(p): found[names[id(p)]] for group in optimizer.param_groups for p in group["params"]}
    optimizer.param_groups[:] = _split(optimizer.param_groups, lambda p, _: replace(own[id(p)], unrectified=1.0))
    _scaled[optimizer] = None
    first = {id_: Multipliers(unrectified=m.unrectified) for id_, m in own.items() if m.unrectified != 1}
    if first:
        _scale_first_steps(optimizer, first)


_scaled: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, by_id: Mapping[int, Multipliers]) -> Iterator[None]:
    """While entered, `optimizer` steps with multiplied settings. Afterwards its groups are as they were.

    Args:
        optimizer: of a kind with a rule, whose steps change no settings.
        by_id: the id of a parameter -> its multipliers; none: as it is.
    """
    own = optimizer.param_groups

    def now(parameter: Tensor, group: Group) -> Multipliers:
        return _in_next_step(by_id.get(id(parameter), NONE), group, optimizer.state.get(parameter, {}))

    optimizer.param_groups = _split(own, now)
    try:
        yield
    finally:
        optimizer.param_groups = own


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[tuple[Tensor, Multipliers]], norm: float | None = None, value: float | None = None
) -> None:
    """Clip gradients as `clip_grad_value_` and then `clip_grad_norm_` do, by the multipliers of each parameter.

    Args:
        parameters: each with its multipliers.
        norm: the largest norm of all gradients; None: any.
        value: the largest absolute value of a gradient; None: any.
    """
    given = [(p.grad, m) for p, m in parameters if p.grad is not None]
    if value is not None:
        for gradient, m in given:
            gradient.clamp_(-value * m.clip_value, value * m.clip_value)
    if norm is not None and given:
        norms = [torch.linalg.vector_norm(gradient) * m.clip_norm for gradient, m in given]
        total = torch.linalg.vector_norm(torch.stack(norms))
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        for gradient, _ in given:
            gradient.mul_(factor)


def is_rectified(step: float, beta2: float) -> bool:
    """Whether RAdam's step with this number, from 1, is normalized."""
    limit = 2 / (1 - beta2) - 1
    power: float = beta2**step
    return limit - 2 * step * power / (1 - power) > RECTIFIED


def _in_next_step(m: Multipliers, group: Group, state: Mapping[str, Any]) -> Multipliers:
    """What a parameter's multipliers are in its next step: `unrectified` counts only in RAdam's first."""
    if m.unrectified == 1:
        return m
    if is_rectified(float(state.get("step", 0.0)) + 1, float(group["betas"][1])):
        return replace(m, unrectified=1.0)
    # decay inside the gradient follows it; of decay beside it, rate × decay is what stays
    decay = m.decay / m.unrectified if group.get("decoupled_weight_decay") else m.decay
    return replace(m, rate=m.rate * m.unrectified, decay=decay, unrectified=1.0)


def _split(groups: Sequence[Group], of: Callable[[Tensor, Group], Multipliers]) -> list[Group]:
    """Param groups of which each has one set of multipliers, applied."""
    made: list[Group] = []
    for group in groups:
        parts: dict[Multipliers, list[int]] = {}
        for position, p in enumerate(group["params"]):
            parts.setdefault(of(p, group), []).append(position)
        for m, positions in parts.items():
            factors = {"lr": m.rate, "weight_decay": m.decay, "eps": m.eps}
            part = {**group, **{name: group[name] * f for name, f in factors.items() if name in group and f != 1}}
            for name in ("params", "param_names"):
                if name in group:
                    part[name] = [group[name][i] for i in positions]
            made.append(part)
    return made


def _scale_first_steps(optimizer: torch.optim.Optimizer, first: Mapping[int, Multipliers]) -> None:
    """Multiply the rates of steps that are not rectified, only while they run."""
    entered = ExitStack()

    def before(_: object, args: object, kwargs: object) -> None:
        entered.close()  # a step before may have raised
        entered.enter_context(scaled(optimizer, first))

    def after(_: object, args: object, kwargs: object) -> None:
        entered.close()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
