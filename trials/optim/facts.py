"""What must be equal in the optimizers of fused trials, and which optimizers cannot be fused."""

import inspect
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from trials.fusion.compared.contents import contents
from trials.fusion.compared.describe import Describer
from trials.fusion.errors import FuseError
from trials.fusion.ways import Way
from trials.optim.duplicate import Duplicate, duplicate, stand_in
from trials.optim.packed import fixed_parts, parameters_of
from trials.optim.registry import RULES, Rule

Names = Mapping[int, str]
"""The id of each parameter of a user's model -> its name."""

VECTOR_TYPES = (torch.float32, torch.float64)
"""Other types round as `torch.optim` does only if it is `torch.optim` itself that computes."""

_HOOKS = ("step_pre_hooks", "step_post_hooks", "state_dict_pre_hooks", "state_dict_post_hooks")


def optimizer_facts(names: Names, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Hashable]:
    """Return what must be equal in the optimizers of fused trials.

    Args:
        names: the names of the parameters of the trial's model.
        optimizer: the trial's own.

    Raises:
        FuseError: the optimizer cannot be fused with its settings. The message names the setting and what is allowed.
    """
    kind = type(optimizer)
    name = kind.__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FuseError(f"the optimizer is of type {name}; allowed: a torch.optim.Optimizer")
    if kind is torch.optim.SparseAdam:
        raise FuseError(f"optimizer {name} cannot be fused: fused gradients are dense; allowed: Adam")
    if _needs_closure(kind):
        raise FuseError(
            f"optimizer {kind.__module__}.{name} cannot be fused: its step() evaluates the model anew, as often as "
            "each trial needs; allowed: one whose step() needs no closure, such as torch.optim.AdamW, "
            "torch.optim.SGD with momentum, or torch.optim.Rprop for whole batches"
        )
    _refuse_parameters(names, optimizer)
    made = rule_of(optimizer)
    facts: dict[tuple[str, str], Hashable] = {("optimizer", "type"): f"{kind.__module__}.{name}"}
    facts["optimizer", "way"] = "by vectors" if made is not None else "once per trial"
    for index, group in enumerate(optimizer.param_groups):
        owner = f"optimizer group {index}"
        for flag in ("differentiable", "capturable"):
            if group.get(flag):
                raise FuseError(f"{owner} of {name}: {flag}=True cannot be fused; allowed: False")
        facts[owner, "parameters"] = tuple(names[id(p)] for p in group["params"])
    if made is None:
        _refuse_own_ways(names, optimizer)
        facts.update({("optimizer", part): value for part, value in fixed_parts(optimizer).items()})
    else:
        settings = _settings(made, optimizer)
        facts.update({(f"optimizer group {index}", flag): value for (index, flag), value in settings.items()})
    return facts


def rule_of(optimizer: torch.optim.Optimizer) -> type[Rule] | None:
    """Return the rule for exactly this class. None: it runs unchanged, once per trial."""
    parameters = list(parameters_of(optimizer))
    plain = all(p.dtype in VECTOR_TYPES for p in parameters)
    plain = plain and len({*map(id, parameters)}) == len(parameters)  # one that is named twice moves twice in a step
    settings = getattr(optimizer, "defaults", ())  # a wrapper may have set none
    numbers = all(_is_number(group.get(name)) for group in optimizer.param_groups for name in settings)
    unchanged = plain and numbers and not _hooks(optimizer) and not _replaced_in(optimizer)
    return RULES.get(type(optimizer)) if unchanged else None


def holder_of(optimizer: torch.optim.Optimizer, way: Way = "rules") -> Duplicate:
    """What holds the hyperparameters of a trial fused in `way`: all of its optimizer, unless a rule has the rest."""
    return stand_in(optimizer) if way == "rules" and rule_of(optimizer) is not None else duplicate(optimizer)


def refuse_views(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps views of its parameters, because its trial's row moves."""
    own = {id(p) for p in parameters_of(optimizer)}
    storages = {p.untyped_storage().data_ptr() for p in parameters_of(optimizer) if p.numel()}
    for path, value in contents(optimizer):
        if not isinstance(value, Tensor) or id(value) in own or value.layout is not torch.strided:
            continue
        if value.numel() and value.untyped_storage().data_ptr() in storages:
            raise FuseError(
                f"optimizer {type(optimizer).__name__} keeps a view of a parameter as '{path}'; allowed: the "
                "parameter itself, or a copy"
            )


def _refuse_ids(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that tells its parameters apart by ``id(p)``: its copy has others."""
    own = {id(p) for p in parameters_of(optimizer)}
    for path, value in contents(optimizer):
        kept = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
        if isinstance(value, Mapping):
            kept += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            kept += value
        if any(type(each) is int and each in own for each in kept):
            raise FuseError(
                f"optimizer {type(optimizer).__name__} keeps id(p) of a parameter in '{path}', and its copy has other "
                "parameters; allowed: the parameter itself, also as a key"
            )


def _settings(made: type[Rule], optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Hashable]:
    """Return the settings that the rule `made` wants to be equal, by param group."""
    describe = Describer()
    groups = enumerate(optimizer.param_groups)
    return {(index, flag): describe(group.get(flag)) for index, group in groups for flag in made.flags}


def _refuse_parameters(names: Names, optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        unknown = [list(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise FuseError(
                f"optimizer group {index} of {type(optimizer).__name__} has a parameter of shape {unknown[0]} that is "
                "not the model's"
            )


def _refuse_own_ways(names: Names, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what a copy of the optimizer, over views of its trial's rows, would do in another way."""
    name = type(optimizer).__name__
    refuse_views(optimizer)
    _refuse_ids(optimizer)
    if method := _replaced_in(optimizer):
        raise FuseError(
            f"optimizer {name} has a {method}() of its own on this instance; allowed: a method of its class"
        )
    own = {id(p) for p in parameters_of(optimizer)}
    for path, value in contents(optimizer):
        if id(value) in names and id(value) not in own:
            raise FuseError(
                f"optimizer {name} keeps the parameter '{names[id(value)]}' as '{path}' and does not train it; "
                "allowed: those in its param groups"
            )
        if isinstance(value, nn.Module) and any(True for _ in value.buffers()):
            raise FuseError(f"optimizer {name} keeps a module with buffers as '{path}'; allowed: its parameters")
    if _keeps_gradients(optimizer):
        raise FuseError(
            f"zero_grad() of optimizer {name} leaves gradients; allowed: one that sets them to None, as "
            "torch.optim.Optimizer.zero_grad does"
        )


def _keeps_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its own `zero_grad`, if it has one, does not set gradients to None."""
    if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
        return False
    tried = duplicate(optimizer).made
    for p in parameters_of(tried):
        p.grad = torch.zeros_like(p)
    tried.zero_grad()
    return any(p.grad is not None for p in parameters_of(tried))


def _replaced_in(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of a method of its class that is another on this instance, or nothing."""
    kind, own = type(optimizer), vars(optimizer)
    names = (name for name, value in own.items() if callable(value) and callable(getattr(kind, name, None)))
    return next((name for name in names if not hasattr(own[name], "_wrapped_by_lr_sched")), "")


def _is_number(value: Any) -> bool:
    """Whether a setting is a number, switch or text, or a pair of them: what vectors have for all trials."""
    if isinstance(value, (tuple, list)):
        return all(_is_number(each) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    closure = list(inspect.signature(kind.step).parameters.values())[1:2]
    return (
        bool(closure) and closure[0].default is closure[0].empty and closure[0].kind is closure[0].POSITIONAL_OR_KEYWORD
    )


def _hooks(optimizer: torch.optim.Optimizer) -> bool:
    everywhere = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    return bool(everywhere) or any(getattr(optimizer, f"_optimizer_{name}", None) for name in _HOOKS)
