"""Copies an optimizer of any kind, with all that it keeps, onto parameters of its own."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from trials.fusion.compared.contents import contents
from trials.fusion.errors import FuseError
from trials.optim.packed import Unread, inside_of, parameters_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A copy of an optimizer.

    Attributes:
        made: the copy.
        pairs: an optimizer -> its copy, for the whole and for those inside it, as in a Lookahead.
    """

    made: torch.optim.Optimizer
    pairs: Sequence[tuple[torch.optim.Optimizer, torch.optim.Optimizer]]


def duplicate(optimizer: torch.optim.Optimizer, shared: Iterable[Any] = ()) -> Duplicate:
    """Copy `optimizer` with its state, over parameters of its own, also wherever else it mentions the old ones.

    Args:
        optimizer: any.
        shared: objects that the copy has in common with it.

    Raises:
        FuseError: something in it cannot be copied, or would still act on the original.
    """
    own = parameters_of(optimizer)
    pairs = [(each, object.__new__(type(each))) for each in inside_of(optimizer)]
    parameters = [(p, nn.Parameter(p.detach(), p.requires_grad)) for p in own]
    _copy_all(optimizer, pairs, parameters, {id(each): each for each in shared})
    for _, new in pairs:
        count_steps(new)
    made = pairs[0][1]
    refuse_reached(made, [*own, *(old for old, _ in pairs)], f"optimizer {type(optimizer).__name__}")
    return Duplicate(made, pairs)


def give(optimizer: torch.optim.Optimizer, to: torch.optim.Optimizer) -> None:
    """Give `to`, a fresh optimizer of the same kind, copies of all that `optimizer` keeps, over its own parameters.

    Raises:
        FuseError: something in it cannot be copied.
    """
    theirs = inside_of(to)
    pairs = [
        (old, theirs[i] if i < len(theirs) else object.__new__(type(old))) for i, old in enumerate(inside_of(optimizer))
    ]
    _copy_all(optimizer, pairs, list(zip(parameters_of(optimizer), parameters_of(to), strict=True)), {})


def move(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the tensors that `optimizer` keeps beside its parameters to their `device`, as `load_state_dict` would."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    before = {p.device for p in own}
    if before <= {device}:
        return
    found = list(contents(optimizer))
    inside = [value for _, value in found if isinstance(value, torch.optim.Optimizer)]
    memo: dict[int, Any] = {id(each): each for each in (*own, *inside)}
    for path, value in found:
        if isinstance(value, Tensor) and id(value) not in memo:
            follows = value.device in before and not path.endswith("['step']")
            memo[id(value)] = value.to(device) if follows else value
        elif isinstance(value, torch.Generator):
            memo[id(value)] = value
    for each in inside:
        vars(each).update({name: _copied(value, memo, each) for name, value in vars(each).items() if name != "step"})


def shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A shallow copy of `optimizer`, for schedulers one whose steps are counted."""
    made = object.__new__(type(optimizer))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    count_steps(made)
    return made


def stand_in(optimizer: torch.optim.Optimizer) -> Duplicate:
    """An optimizer of the same class and hyperparameters without tensors; it is what schedulers act on."""
    made = shell(optimizer)
    made.param_groups = plain_groups(optimizer.param_groups)
    made.state = cast(Any, Unread("state"))
    return Duplicate(made, [(optimizer, made)])


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of `param_groups` without parameters."""
    return [copy.deepcopy({**group, "params": Unread("parameters")}) for group in groups]


def act_on(value: T, pairs: Sequence[tuple[torch.optim.Optimizer, torch.optim.Optimizer]], what: str) -> T:
    """Copy `value`, such as schedulers, so that it acts on the second optimizer of each pair.

    Raises:
        FuseError: a function in it would still act on the first.
    """
    made = copy.deepcopy(value, {id(old): new for old, new in pairs})
    refuse_reached(made, [old for old, _ in pairs], what)
    for path, part in contents(made, beyond={id(new) for _, new in pairs}):
        if isinstance(part, nn.Parameter):
            raise FuseError(
                f"{what}: a copy for its trial holds a Parameter at '{path}', which would stay as it is; allowed: what "
                "it finds in its optimizer at each step"
            )
    return made


def refuse_reached(value: Any, originals: Iterable[Any], what: str) -> None:
    """Refuse a copy with functions that have enclosed what was copied."""
    forbidden = {id(each) for each in originals}
    for path, part in contents(value):
        if id(part) in forbidden:
            raise FuseError(
                f"{what}: a copy for its trial still reaches the original {type(part).__name__} by '{path}'; allowed: "
                "functions that get what they work on as an argument"
            )


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` a `step` that schedulers need not wrap, nor warn that it was not called."""
    step = type(optimizer).step.__get__(optimizer)

    def counted(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    vars(counted)["_wrapped_by_lr_sched"] = True
    vars(optimizer).update(step=counted, _opt_called=True)


def _copy_all(
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[tuple[torch.optim.Optimizer, torch.optim.Optimizer]],
    parameters: Sequence[tuple[Tensor, Tensor]],
    memo: dict[int, Any],
) -> None:
    """Copy what `optimizer` and those inside it keep, the first of each of `pairs`, into the second.

    `memo` maps ids of further objects to what takes their place.
    """
    memo.update({id(old): new for old, new in (*parameters, *pairs)})
    generators = [value for _, value in contents(optimizer) if isinstance(value, torch.Generator)]
    memo.update({id(each): each.clone_state() for each in generators})
    for p, new_p in parameters:  # such as marks by which an optimizer tells its parameters apart
        vars(new_p).update(_copied(vars(p), memo, optimizer))
    for old, new in pairs:
        # a scheduler puts a `step` of its own there, which steps the original
        vars(new).update({name: _copied(v, memo, optimizer) for name, v in vars(old).items() if name != "step"})


def _copied(value: Any, memo: dict[int, Any], optimizer: torch.optim.Optimizer) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise FuseError(
            f"optimizer {type(optimizer).__name__} keeps a {type(value).__name__} that cannot be copied: {error}"
        ) from error
