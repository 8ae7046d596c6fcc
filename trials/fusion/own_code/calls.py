"""What computes a function that the code of a module calls under `vmap`, where that is not the function itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trials.fusion.own_code.autocast import TrialByTrial, has_parts
from trials.fusion.own_code.inner import Call, Streams
from trials.fusion.own_code.together import Together
from trials.fusion.own_code.values import ASKING, Value
from trials.fusion.registry import CALLS
from trials.fusion.rows import Rows

Outside = Call | Value | TrialByTrial
"""What is computed outside the `vmap`, for all trials."""


def instead(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], rows: Rows, together: Together
) -> Outside | None:
    """Return what computes a call; None: the function itself does, under the `vmap`.

    Args:
        function: what the code calls.
        args: its arguments.
        kwargs: those by name.
        rows: the trials.
        together: the rules for such code.

    Raises:
        FuseError: only one trial after another can call it.
    """
    together.check_call(function)
    if function in ASKING:
        if not _is_mapped(args, kwargs):
            return None
        together.check_layer(args, kwargs, function=True)
        return Value(function, rows.size)
    if (call := by_rule(function, args, kwargs, rows, together)) is not None:
        return call
    if function in CALLS or not has_parts(function, args, kwargs):
        return None
    together.looped.add(function.__name__)
    return TrialByTrial(function)


def by_rule(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], streams: Streams, together: Together
) -> Call | None:
    """Return the rule for a call, whose random numbers come from `streams`; None: there is none. See `instead`."""
    if function is Tensor.new and len(args) > 1 and all(isinstance(size, (int, torch.Size)) for size in args[1:]):
        function = Tensor.new_empty  # its name today
    if function not in CALLS or CALLS[function][0].bind(*args, **kwargs).arguments.get("inplace"):
        return None  # no rule that knows this option changes its input
    together.check_layer(args, kwargs, function=True)
    return Call(function, streams)


def _is_mapped(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether one of the tensors is each trial's own."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return any(map(torch._C._functorch.is_batchedtensor, tensors))
