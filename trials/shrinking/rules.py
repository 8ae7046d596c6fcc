"""The rules of width and depth: what multiplies an optimizer's settings for each parameter of a surrogate.

The target trains with the settings as they are. A surrogate trains with each of them times its multiplier, so that both
move their functions alike. Sources: TP5, Tensor Programs V (arXiv 2203.03466, tables 3 and 8); SC, the spectral
condition (2310.17813); CP, CompleteP (2505.01618); WA, weight averaging and decay (2405.13698).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from trials.shrinking.errors import ShrinkError, ShrinkWarning
from trials.shrinking.roles import Role, Roles

Group = Mapping[str, Any]
"""A param group of an optimizer, or its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """What one parameter's settings are multiplied by.

    Attributes:
        rate: the learning rate.
        decay: the weight decay, of either sort.
        eps: the term in the denominator.
        clip_value: the limit of each gradient.
        clip_norm: the gradient, only where the norm of all gradients is computed.
        unrectified: a further factor of the rate, for RAdam's first steps.
    """

    rate: float = 1.0
    decay: float = 1.0
    eps: float = 1.0
    clip_value: float = 1.0
    clip_norm: float = 1.0
    unrectified: float = 1.0


NONE = Multipliers()
"""Those of a parameter that has not shrunk."""


def multipliers(roles: Roles, optimizer: torch.optim.Optimizer, norm_type: float = 2.0) -> dict[str, Multipliers]:
    """Return the multipliers of each parameter that `optimizer` trains, by its name in the surrogate.

    Args:
        roles: the surrogate's.
        optimizer: over parameters of the surrogate.
        norm_type: of the norm that is clipped.

    Raises:
        ShrinkError: there is no rule for the optimizer or a setting of it, or it has parameters of another model.
    """
    names, found = roles.names(), {}
    for index, group in enumerate(optimizer.param_groups):
        rule = rule_of(type(optimizer), group, f"optimizer group {index} of {type(optimizer).__name__}")
        for p in group["params"]:
            if id(p) not in names:
                raise ShrinkError(
                    f"optimizer group {index} of {type(optimizer).__name__} has a parameter of shape {list(p.shape)} "
                    "that is not the surrogate's; allowed: parameters of the model for which the roles were found"
                )
            role = roles[names[id(p)]]
            if rule.is_l2_inside and group["weight_decay"]:
                _refuse_first_step(names[id(p)], role, p, index)
            found[names[id(p)]] = rule(role, norm_type)
    _warn_of_gradients(roles, optimizer, names)
    return found


def _warn_of_gradients(roles: Roles, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Where steps follow the size of gradients, layers that give these another power of the width do not transfer."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    decays = [g for g in optimizer.param_groups if g["weight_decay"] and rule_of(type(optimizer), g, "").is_l2_inside]
    if not (is_sgd or decays):
        return
    trained = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
    if is_sgd and any(roles[name].tied for name, _ in trained):
        warnings.warn(
            "an embedding tied to the head transfers only at moderate rates of SGD; allowed: Adam or AdamW, or a head "
            "of its own",
            ShrinkWarning,
            stacklevel=3,
        )
    kept = [name for name, p in trained if roles[name].kind == "output" and bool(p.detach().any())]
    if not kept or optimizer.state:
        return
    consequence, instead = (
        (
            "with SGD, the layers before it move further in the target",
            "Adam or AdamW, or readout='zero' for a last layer",
        )
        if is_sgd
        else ("weight_decay inside the gradient is stronger in the surrogate", "AdamW, or decoupled_weight_decay=True")
    )
    warnings.warn(
        f"the outputs of '{kept[0]}' do not shrink, and it does not begin at zero: {consequence}, by the root of the "
        f"factor, until it has been trained; allowed: {instead}",
        ShrinkWarning,
        stacklevel=3,
    )


def clipping(role: Role, norm_type: float = 2.0) -> Multipliers:
    """The multipliers of a parameter that no optimizer trains, for the norm of all gradients."""
    return Multipliers(clip_value=_gradient(role), clip_norm=_clip_norm(role, norm_type))


def initial_factor(role: Role, keeps: bool = False) -> float:
    """What the RMS of a parameter's initial values is multiplied by (TP5, SC; depth: CP).

    With `keeps`, a readout keeps the size of what it puts out at the beginning, as that of the target has it.
    """
    width: float = role.r_in**-1 if role.kind == "output" and not keeps else role.r_in**-0.5
    return width / role.r_depth if role.branch == "last" else width


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of a kind of optimizer, for one param group.

    Attributes:
        rate: role -> the multiplier of the rate.
        is_l2_inside: whether the decay is added to the gradient before it is normalized.
        scales_eps: whether eps is compared with gradients.
        unrectified: whether the first steps are not normalized.
    """

    rate: Callable[[Role], float]
    is_l2_inside: bool = False
    scales_eps: bool = True
    unrectified: bool = False

    def __call__(self, role: Role, norm_type: float = 2.0) -> Multipliers:
        """The multipliers of a parameter."""
        rate = self.rate(role)
        gradient = _gradient(role)
        return Multipliers(
            rate=rate,
            decay=_l2_decay(role) if self.is_l2_inside else 1 / rate,
            eps=gradient if self.scales_eps else 1.0,
            clip_value=gradient,
            clip_norm=_clip_norm(role, norm_type),
            unrectified=_sgd(role) / rate if self.unrectified else 1.0,
        )


def rule_of(kind: type[torch.optim.Optimizer], group: Group, what: str) -> Rule:
    """Return the rule for an optimizer of exactly this class with the settings in `group`.

    Raises:
        ShrinkError: there is none. The message begins with `what`.
    """
    name = kind.__name__
    if getattr(torch.optim, name, None) is not kind or name not in _RULES:
        raise ShrinkError(
            f"{what}: there is no rule of width for {kind.__module__}.{name}; allowed: {', '.join(sorted(_RULES))} of "
            "torch.optim"
        )
    if group.get("initial_accumulator_value"):
        raise ShrinkError(
            f"{what}: initial_accumulator_value={group['initial_accumulator_value']} does not follow the gradients' "
            "size; allowed: 0"
        )
    return _RULES[name](kind, group)


def _hidden_like_adam(role: Role) -> float:
    """The rate of updates that are normalized to the size of the rate (TP5, table 8)."""
    return _depth(role, 1.0) / role.r_in


def _sgd(role: Role) -> float:
    """The rate of updates in proportion to gradients, with any momentum (TP5, table 8)."""
    return _depth(role, role.r_depth) * role.r_out / role.r_in


def _muon(adjust: str | None) -> Callable[[Role], float]:
    """The rate of updates that are made orthogonal (SC), beside the factor with which PyTorch adjusts it."""

    def rate(role: Role) -> float:
        adjusted = _adjusted(adjust, role.target_shape) / _adjusted(adjust, role.shape)
        return _depth(role, 1.0) * sqrt(role.r_out / role.r_in) * adjusted

    return rate


def _adjusted(adjust: str | None, shape: tuple[int, ...]) -> float:
    rows, columns = shape[:2]
    if adjust == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))


def _depth(role: Role, inner: float) -> float:
    """The factor of depth on a rate (CP, with the branches' factor folded into their last layers)."""
    return {"none": 1.0, "last": 1 / role.r_depth, "inner": inner}[role.branch]


def _gradient(role: Role) -> float:
    """How much larger a single gradient is than the target's."""
    return 1 / (role.r_out * (role.r_depth if role.branch == "inner" else 1.0))


def _l2_decay(role: Role) -> float:
    """A decay that is to stay as small beside the gradient; right only while it is small."""
    depth = {"none": 1.0, "last": role.r_depth, "inner": 1 / role.r_depth}[role.branch]
    return depth * role.r_in / role.r_out


def _clip_norm(role: Role, norm_type: float) -> float:
    """Undoes how much larger gradients are, and how many fewer."""
    fewer = role.r_out * role.r_in * (1.0 if role.branch == "none" else role.r_depth)
    root: float = fewer ** (1 / norm_type)
    return 1 / (_gradient(role) * root)


def _refuse_first_step(name: str, role: Role, parameter: Tensor, index: int) -> None:
    if role.kind == "output" and not bool(parameter.detach().any()):
        raise ShrinkError(
            f"optimizer group {index}: weight_decay is added to the gradient, and the readout '{name}' is zero, so "
            "that the first step of all layers below it would be nothing but decay at full size; allowed: AdamW (or "
            "decoupled_weight_decay=True), weight_decay=0, or readout='keep'"
        )


def _normalized(kind: type[torch.optim.Optimizer], group: Group) -> Rule:
    decoupled = bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW))
    return Rule(_hidden_like_adam, is_l2_inside=not decoupled, unrectified=kind is torch.optim.RAdam)


_RULES: dict[str, Callable[[type[torch.optim.Optimizer], Group], Rule]] = {
    "SGD": lambda kind, group: Rule(_sgd, scales_eps=False),
    "Muon": lambda kind, group: Rule(_muon(group["adjust_lr_fn"]), scales_eps=False),
    **{name: _normalized for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")},
}
