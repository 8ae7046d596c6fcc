"""Compares the order in memory of what own code draws for under `vmap` with that in the trial alone.

Random numbers such as dropout's are drawn in the order of memory: of a tensor in ``channels_last``, dropout drops other
elements than of an equal one in the plain order. Some functions give another order under `vmap` than for one trial.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from trials.fusion.compared.reads import PLAIN
from trials.fusion.errors import FuseError
from trials.fusion.own_code.drawing import Drawn, draws_for_each
from trials.fusion.own_code.inner import Calls, Streams, note_drawn
from trials.fusion.own_code.streams import saved
from trials.fusion.registry import CALLS, arrange


class DrawOrders:
    """What is known of one module's code, or of a loss.

    Args:
        is_inside: whether code around it is compared as a whole, with this.
    """

    def __init__(self, is_inside: bool = False) -> None:
        self._is_inside, self._equal = is_inside, set[Hashable]()

    @contextmanager
    def compared(self, streams: Streams, inputs: Any, alone: Callable[[], object]) -> Iterator[None]:
        """Enter it around a run under `vmap`. It draws nothing itself.

        Args:
            streams: they note what is drawn for.
            inputs: of the code. Orders depend on how they lie in memory, so those of one form are compared once.
            alone: runs the code for one trial, if the run under `vmap` has drawn for something.

        Raises:
            FuseError: the orders differ.
        """
        form = tuple(_form(leaf) for leaf in tree_leaves(inputs))
        if self._is_inside or form in self._equal:
            yield
            return
        together: list[Drawn] = []
        by_itself: list[Drawn] = []
        streams.drawn = together
        try:
            yield
            if together:
                streams.drawn = by_itself
                restore = saved({}, streams.generators)
                with Calls(partial(_noting, streams)):
                    alone()
                restore()
        finally:
            streams.drawn = None
        if together != by_itself:
            raise FuseError(
                "it draws random numbers in the order of memory, as dropout does, and under vmap that is another than "
                "in the trial alone; allowed: a forward that can be traced"
            )
        self._equal.add(form)


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
