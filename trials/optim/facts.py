"""What must be equal in the optimizers of fused trials, and which optimizers cannot be fused."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trials.fusion.errors import FuseError
from trials.optim.registry import RULES, Group, Rule

Names = Mapping[int, str]
"""The id of each parameter of a user's model -> its name."""

VECTOR_TYPES = (torch.float32, torch.float64)
"""Other types round as `torch.optim` does only if it is `torch.optim` itself that computes."""


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
    made = rule_of(optimizer)
    facts: dict[tuple[str, str], Hashable] = {("optimizer", "type"): f"{kind.__module__}.{name}"}
    for index, group in enumerate(optimizer.param_groups):
        owner = f"optimizer group {index}"
        for flag in ("differentiable", "capturable"):
            if group.get(flag):
                raise FuseError(f"{owner} of {name}: {flag}=True cannot be fused; allowed: False")
        unknown = [list(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise FuseError(f"{owner} of {name} has a parameter of shape {unknown[0]} that is not the model's")
        if made is not None:
            facts.update({(owner, flag): _hashable(group.get(flag)) for flag in made.flags})
        facts[owner, "parameters"] = tuple(names[id(p)] for p in group["params"])
    return facts


def rule_of(optimizer: torch.optim.Optimizer) -> type[Rule] | None:
    """Return the rule for exactly this class. None: it runs unchanged, once per trial."""
    plain = all(p.dtype in VECTOR_TYPES for group in optimizer.param_groups for p in group["params"])
    return RULES.get(type(optimizer)) if plain and not _hooks(optimizer) else None


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and hyperparameters without tensors; it is what schedulers act on."""
    made = shell(optimizer)
    made.param_groups = plain_groups([{**group, "params": []} for group in optimizer.param_groups])
    made.state = defaultdict(dict)
    return made


def shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A shallow copy of `optimizer`. To schedulers it looks like one whose steps they count already."""
    made = object.__new__(type(optimizer))
    # a scheduler puts a `step` of its own there, which steps the original
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    step = type(optimizer).step.__get__(made)

    def counted(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    vars(counted)["_wrapped_by_lr_sched"] = True
    vars(made).update(step=counted, _opt_called=True)
    return made


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[Group]:
    """`param_groups` without tensors, so that a checkpoint of them holds numbers only."""
    return [{k: float(v) if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in g.items()} for g in groups]


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    closure = list(inspect.signature(kind.step).parameters.values())[1:2]
    return (
        bool(closure) and closure[0].default is closure[0].empty and closure[0].kind is closure[0].POSITIONAL_OR_KEYWORD
    )


def _hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _hashable(value: object) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
