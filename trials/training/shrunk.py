"""Builds a study's models as surrogates, and says how their optimizers are scaled."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trials.fusion.own_code.streams import undisturbed
from trials.shrinking.depth import drop, set_branches, shallower
from trials.shrinking.errors import ShrinkError
from trials.shrinking.initial_values import correct
from trials.shrinking.plan import Plan, Shown, plan_of, shown_by
from trials.shrinking.roles import Roles, roles
from trials.shrinking.rules import NONE, Multipliers, clipping, multipliers
from trials.shrinking.settings import Shrink, as_shrink
from trials.shrinking.slicing import Shrunk, apply, scale_tied_heads, try_out, zero_readouts
from trials.study import Study
from trials.training.inputs.batches import batches_of, no_batches

_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Study -> what was found for models of each structure."""


def takes_shrink(study: Study) -> bool:
    """Whether the study's `model` builds surrogates itself."""
    return "shrink" in inspect.signature(study.model).parameters


def model_of(study: Study, params: dict[str, Any], number: int = 0) -> tuple[nn.Module, Roles | None]:
    """Build a trial's model: what the study builds or, if it shrinks, a surrogate, with its roles.

    Raises:
        ShrinkError: it cannot be shrunk. The message names the cause and a way out.
    """
    settings = as_shrink(study.shrink)
    if takes_shrink(study):
        return _of_own_code(study, params, number, settings)
    model = study.model(params)
    if settings is None:
        return model, None
    plan = _planned(study, model, params, number, settings)
    if settings.is_target:
        made = apply(plan, model, settings.readout, settings.fans)
        with torch.no_grad():
            for name in made.zeroed:
                model.get_parameter(name).zero_()
        return model, None
    made = apply(plan, model, settings.readout, settings.fans)
    return made.model, made.roles


def scales_of(found: Roles | None, optimizer: torch.optim.Optimizer) -> dict[str, Multipliers]:
    """The multipliers of all parameters of a surrogate; of those that `optimizer` does not train, those of clipping.

    Raises:
        ShrinkError: there is no rule for the optimizer.
    """
    if found is None:
        return {}
    trained = multipliers(found, optimizer)
    return {name: trained.get(name) or clipping(role) for name, role in found.items()}


def by_id(model: nn.Module, scales: Mapping[str, Multipliers]) -> dict[int, Multipliers]:
    """The id of each parameter of `model` -> its multipliers."""
    return {id(p): scales.get(name, NONE) for name, p in model.named_parameters()}


def inputs_of(study: Study, params: dict[str, Any], number: int = 0) -> Any:
    """The inputs of the first batch that a trial trains on.

    Raises:
        FuseError: the study gives no batches.
    """
    own = study.trial_batches(params, number, 0)
    first = next(iter(batches_of(study, params, 0) if own is None else own), None)
    if first is None:
        raise no_batches(0)
    return first[0]


def _of_own_code(
    study: Study, params: dict[str, Any], number: int, settings: Shrink | None
) -> tuple[nn.Module, Roles | None]:
    build = cast("Any", study.model)
    if settings is None:
        return build(params, 1), None
    if settings.is_target:
        model = build(params, 1)
        with undisturbed():
            narrow = build(params, settings.by)
        shown = _shown(study, narrow, params, number)
        found = roles(model, narrow, settings.fans, shown.uses)
        zero_readouts(model, found, shown.readouts, settings.readout)
        return model, None
    surrogate = build(params, settings.by)
    with undisturbed():
        target = build(params, 1)
    shown = _shown(study, surrogate, params, number)
    depth = shallower(surrogate, settings.depth, shown.branches)
    for model in (surrogate, target):
        drop(model, depth.dropped)
    found = roles(target, surrogate, settings.fans, shown.uses)
    if all(role.shape == role.target_shape for role in found.values()):
        raise ShrinkError(
            f"model(params, {settings.by}) is as wide as model(params, 1); allowed: widths divided by shrink"
        )
    correct(surrogate, target, found)
    set_branches(found, depth)
    for name, p in surrogate.named_parameters():
        if found[name].branch == "last":
            with torch.no_grad():
                p.div_(found[name].r_depth)
    zero_readouts(surrogate, found, shown.readouts, settings.readout)
    scale_tied_heads(surrogate, found)
    return surrogate, found


def _shown(study: Study, model: nn.Module, params: dict[str, Any], number: int) -> Shown:
    table = _plans.setdefault(study, {})
    key = "shown", _structure(model)
    if key not in table:
        with undisturbed():
            table[key] = shown_by(model, inputs_of(study, params, number))
    return cast("Shown", table[key])


def _planned(study: Study, model: nn.Module, params: dict[str, Any], number: int, settings: Shrink) -> Plan:
    """What shrinks in models of this structure; the first surrogate of each is tried."""
    table = _plans.setdefault(study, {})
    key = "plan", _structure(model), repr(settings.by), settings.depth
    if key not in table:
        with undisturbed():
            batch = inputs_of(study, params, number)
            plan = plan_of(model, settings.by, batch, settings.divide, settings.keep, settings.depth)
            tried: Shrunk = apply(plan, model, settings.readout, settings.fans)
            try_out(model, tried, batch)
            table[key] = plan
    return cast("Plan", table[key])


def _structure(model: nn.Module) -> tuple[Any, ...]:
    tensors = chain(model.named_parameters(), model.named_buffers())
    return repr(model), tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


def for_target(given: Shrink | int) -> Shrink:
    """The settings with which the target itself is trained."""
    settings = as_shrink(given)
    assert settings is not None  # it is given
    return replace(settings, is_target=True)
