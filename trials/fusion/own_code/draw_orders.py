"""Compares the order in memory of what own code draws for under `vmap` with that in the trial alone.

Random numbers such as dropout's are drawn in the order of memory: of a tensor in ``channels_last``, dropout drops other
elements than of an equal one in the plain order. Some functions give another order under `vmap` than for one trial.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trials.fusion.compared.reads import PLAIN
from trials.fusion.errors import FuseError
from trials.fusion.layers.memory_order import Orders
from trials.fusion.own_code.drawing import Drawn, draws_for_each
from trials.fusion.own_code.inner import Calls, OwnCode, Streams, note_drawn
from trials.fusion.own_code.trees import apart
from trials.fusion.registry import CALLS, arrange


class DrawOrders:
    """What is known of one module's code, with all layers inside, or of a loss."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._equal = set[Hashable]()
        self._went: list[Hashable] = []

    def went(self, call: object, args: Any = (), kwargs: Mapping[str, Any] | None = None, found: Any = None) -> Any:
        """Note that the code has called a function, or a layer by name: orders depend on the way that it goes.

        Returns what the call has `found`, of which yes or no may decide how the code goes on.
        """
        choices = [each for each in (*args, *(kwargs or {}).values()) if _is_choice(each)]
        self._went.append((getattr(call, "__name__", call), isinstance(found, bool) and found, *choices))
        return found

    @contextmanager
    def compared(self, streams: Streams, inputs: Any, alone: Callable[[], object]) -> Iterator[None]:
        """Enter it around a run under `vmap`. It draws nothing itself.

        Args:
            streams: they note what is drawn for.
            inputs: of the code. Orders depend on how they lie in memory.
            alone: runs the code for one trial, on copies, streams included. It is called if the run under `vmap` has
                drawn for something: once for each form of the inputs, each way of the code, and all that it draws for.

        Raises:
            FuseError: the orders differ.
        """
        if streams.drawn is not None:  # the code around it is compared, and with it this
            yield
            return
        together: list[Drawn] = []
        by_itself: list[Drawn] = []
        streams.drawn = together
        self._went.clear()
        try:
            yield
            if not together:
                return
            forms = tuple(_form(leaf) for leaf in tree_leaves(inputs))
            run = len(streams.generators), forms, tuple(self._went), tuple(together)
            if run in self._equal:
                return
            streams.drawn = by_itself
            with Calls(partial(_noting, streams)):
                alone()
        finally:
            streams.drawn = None
        if together != by_itself:
            raise FuseError(
                "it draws random numbers in the order of memory, as dropout does, and under vmap that is another than "
                "in the trial alone; allowed: a forward that can be traced"
            )
        self._equal.add(run)


def _is_choice(value: Any) -> bool:
    """Whether a value may say in which order something is to lie. Measured numbers do not, and are new each time."""
    return isinstance(value, (int, str, torch.memory_format)) or (
        isinstance(value, tuple) and all(type(each) is int for each in value)
    )


def in_orders(
    orders: Orders, output: Any, code: OwnCode, streams: Streams, args: Any, kwargs: dict[str, Any], dims: Any
) -> Any:
    """Return the output of `code` with each trial's tensors in the order in memory that they have alone.

    Args:
        orders: what is known of that.
        output: for all trials.
        code: it has just run.
        streams: they note nothing meanwhile.
        args: its inputs; see `OwnCode.run`.
        kwargs: likewise.
        dims: likewise.
    """
    if code.ran_apart:
        return output
    found, together = apart(output)

    def alone() -> list[Tensor]:
        streams.drawn = []
        try:
            return apart(code.run_first(args, kwargs, dims))[0]
        finally:
            streams.drawn = None

    return together(orders.as_alone(found, apart((args, kwargs))[0], alone))


def _form(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return repr(leaf if isinstance(leaf, PLAIN) else type(leaf))


def _noting(streams: Streams, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of one trial's, as the rule for it would be called for all."""
    if function in CALLS and streams.drawn is not None:
        signature, _ = CALLS[function]
        values = arrange(function.__name__, signature, args, kwargs)
        if draws_for_each(function, dict(zip(signature.parameters, values, strict=True))):
            note_drawn(streams, values, [False] * len(values))
    return function(*args, **kwargs)
