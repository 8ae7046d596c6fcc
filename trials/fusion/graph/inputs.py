"""How a model is called with the inputs of a batch, and which of them its graph takes."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from trials.fusion.own_code.trees import PLAIN_KINDS


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's arguments: of ``model(**inputs)`` for a dict, ``model(*inputs)`` for a tuple or list.

    For anything else, those of ``model(inputs)``.
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def moved(tree: Any, device: torch.device) -> Any:
    """Return `tree` with its tensors on `device`. Those in pinned memory are copied while the host continues."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, tree)


def unknown_inputs(model: nn.Module, method: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a method's inputs that a graph takes, and the others' defaults, which it is traced with.

    It takes the first, and all without a default.
    """
    given = list(inspect.signature(getattr(model, method)).parameters.values())
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not given or given[0].kind in variable:
        return [], {}
    fixed = {i.name: i.default for i in given[1:] if i.kind not in variable and i.default is not i.empty}
    return [i.name for i in given if i.kind not in variable and i.name not in fixed], fixed


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a graph takes.

    A graph was traced with unknown tensors, so its code may have taken branches such as ``mask is not None``. It stands
    for calls with tensors there, and with the defaults everywhere else.

    Attributes:
        signature: of the user's method.
        names: the graph's inputs, in its order.
        fixed: the method's other inputs, and the defaults with which it was traced.
        first_alone: whether one positional input is all that the graph takes.
    """

    signature: inspect.Signature
    names: tuple[str, ...]
    fixed: dict[str, Any]
    first_alone: bool

    @classmethod
    def of(cls, model: nn.Module, method: str, graph: fx.Graph) -> "Inputs":
        """Those of `graph`, traced from a method of `model`."""
        signature = inspect.signature(getattr(model, method))
        names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
        first = next(iter(signature.parameters.values()), None)
        by_position = first is not None and first.kind is not first.KEYWORD_ONLY
        fixed = {i.name: i.default for i in signature.parameters.values() if i.default is not i.empty}
        return cls(signature, names, fixed, by_position and first is not None and names == (first.name,))

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """Return the graph's inputs in its order, from those of a call; None: it does not stand for that call."""
        if self.first_alone and len(args) == 1 and not kwargs:
            return args if type(args[0]) in PLAIN_KINDS else None
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        own = tuple(given.pop(name, None) for name in self.names)
        if not all(type(value) in PLAIN_KINDS for value in own):
            return None
        if not all(name in self.fixed and _is_same(value, self.fixed[name]) for name, value in given.items()):
            return None
        return own


def _is_same(value: Any, default: Any) -> bool:
    """Whether code cannot tell a plain value from a default."""
    return value is default or (
        isinstance(value, (bool, int, float, str)) and type(value) is type(default) and repr(value) == repr(default)
    )
