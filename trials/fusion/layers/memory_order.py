"""The order of a trial's axes in memory, such as that of ``channels_last``. Dropout draws in it, so layers keep it.

An order names the axes of one trial's tensor from the slowest to the fastest; None: they lie as they are numbered.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Order = tuple[int, ...] | None

FORMATS: dict[Order, torch.memory_format] = {
    (0, 2, 3, 1): torch.channels_last,
    (0, 2, 3, 4, 1): torch.channels_last_3d,
}
"""The orders that PyTorch's layers keep."""


def order_of(x: Tensor) -> Order:
    """Return the order of one trial's tensor. One that is sparse has none."""
    if x.layout is not torch.strided:
        return None
    strides = x.stride()
    if strides == _strides(x.shape, range(x.ndim)):
        return None
    # with axes of size 1, a tensor may be contiguous in both orders; its strides say which one a convolution sees
    kept = next((order for order in FORMATS if order is not None and len(order) == x.ndim), None)
    if kept is not None and strides == _strides(x.shape, kept):
        return kept
    if x.is_contiguous():
        return None
    dense = torch.empty_like(x, device="meta").stride()
    found = tuple(sorted(range(x.ndim), key=lambda axis: -dense[axis]))
    return None if found == tuple(range(x.ndim)) else found


def own_orders(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the orders of one trial's tensors that are not the plain one, by name.

    Those of weights in ``channels_last`` are left out: layers with a rule know them.
    """
    found = {name: order_of(tensor) for name, tensor in (*parameters.items(), *buffers.items())}
    return {name: own for name, own in found.items() if own and not (name in parameters and own in FORMATS)}


def kept_order(x: Tensor) -> Order:
    """Return the order of one trial's tensor, if it is one that PyTorch's layers keep; else theirs is the plain one."""
    order = order_of(x)
    return order if order in FORMATS else None


def as_ordered(y_K: Tensor, order: Order) -> Tensor:
    """Return ``y_K`` with trials that lie in `order`: if that is not the plain one, one after another without gaps."""
    if order is None and (y_K.is_contiguous() or order_of(y_K[0]) is None):
        return y_K
    there = [0, *(axis + 1 for axis in order or range(y_K.ndim - 1))]
    if y_K.stride() == _strides(y_K.shape, there):
        return y_K
    return y_K.permute(there).clone(memory_format=torch.contiguous_format).permute(back(there))


class Orders:
    """The orders in which a call of the user's code gives its outputs in the trial alone. `vmap` may give others."""

    def __init__(self) -> None:
        """None is known yet."""
        self._known: dict[object, list[Order] | None] = {}  # None: they need no change

    def as_alone(
        self, found_K: Sequence[Tensor], given: Sequence[Tensor], alone: Callable[[], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Return outputs of all trials in these orders.

        Args:
            found_K: the outputs.
            given: the inputs, of all trials or shared. Orders depend on how they lie in memory.
            alone: computes the outputs of one trial; asked once for each form of the inputs.
        """
        key = tuple((x.shape, x.stride(), x.dtype) for x in given)
        if key not in self._known:
            with torch.no_grad():
                orders = [order_of(y) for y in alone()]
            self._known[key] = None if orders == [order_of(y_K[0]) for y_K in found_K] else orders
        known = self._known[key]
        return list(found_K) if known is None else [as_ordered(*each) for each in zip(found_K, known, strict=True)]


def reordered(x: Tensor, order: Order) -> Tensor:
    """Return one trial's tensor in an order that is `kept_order`'s."""
    return x if order is None else x.clone(memory_format=FORMATS[order])


def back(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return [order.index(axis) for axis in range(len(order))]


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, as PyTorch gives them to a new one."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= max(shape[axis], 1)
    return tuple(found)
