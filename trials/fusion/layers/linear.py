"""Fully connected layers, of one input and of two.

Shapes: K trials, B examples, N of them in all, I and J inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.registry import JointLayer, Layer, lift, rule
from trials.fusion.rows import Rows, ask_no_gate
from trials.fusion.shared_base import only
from trials.shrinking.tied import TiedHead

_FEW_WEIGHTS = 1 << 12
"""Below this, copying a gradient costs less than a derivative of our own."""

_PART_PRODUCTS = 1 << 22
"""Multiply this many numbers before asking the gate again: a third of a millisecond of one core."""

_PART_OF_ONE = 1 << 25
"""The same for a matrix that all trials have in common: half a millisecond, because its kernel is faster."""

_FEW_ROWS = 64
"""Fewer examples than these do not pay for reading that matrix anew."""

_PART_WEIGHTS = 1 << 18
"""Read this many weights, for few examples, before asking again: the same time."""


@rule(nn.Linear)
class FusedLinear(Layer):
    """`nn.Linear` of K trials: one batched product."""

    weight_KOI: Tensor
    bias_KO: Tensor | None

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KOI = rows.require(self.path, "weight")
        self.bias_KO = rows.get(self.path, "bias")
        self.again = rows.again

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KB...I`` or ``x_B...I`` to ``y_KB...O``; without the axis K if neither input nor weights have it."""
        return multiplied(x, per_trial, self.weight_KOI, self.bias_KO, self.again)


@rule(TiedHead)
class FusedTiedHead(FusedLinear):
    """A surrogate's head that is tied to its embedding, of K trials."""

    def __init__(self, module: TiedHead, path: str) -> None:
        """See `Layer`."""
        super().__init__(module, path)
        self._multiplier = module.multiplier

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """See `FusedLinear.run`."""
        return super().run(x * self._multiplier, per_trial, training)


def multiplied(
    x: Tensor, per_trial: bool, weight_KOI: Tensor, bias_KO: Tensor | None, again: Callable[[], None] = ask_no_gate
) -> tuple[Tensor, bool]:
    """See `FusedLinear.run`; `again` is called between parts."""
    if (weight_OI := only(weight_KOI)) is not None:
        return _by_one_matrix(x, per_trial, weight_OI, bias_KO, again)
    return (own if per_trial else shared)(x, weight_KOI, bias_KO, again), True


def own(x: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None, again: Callable[[], None] = ask_no_gate) -> Tensor:
    """``x_K...I`` to ``y_K...O``; `again` is called between parts."""
    size, out = weight_KOI.shape[:2]
    if size == 1:
        return _one(x, weight_KOI, bias_KO)
    if (weight_OI := only(weight_KOI)) is not None:
        return _by_one_matrix(x, True, weight_OI, bias_KO, again)[0]
    x_KNI = x if x.ndim == 3 else x.reshape(size, -1, x.shape[-1])
    y_KNO = _product(x_KNI, weight_KOI, bias_KO, again)
    return y_KNO if x.ndim == 3 else y_KNO.view(*x.shape[:-1], out)


def shared(x: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None, again: Callable[[], None] = ask_no_gate) -> Tensor:
    """``x_...I``, the same for all trials, to ``y_K...O``; `again` is called between parts."""
    size, out, width = weight_KOI.shape
    if size == 1:
        return _one(x, weight_KOI, bias_KO).unsqueeze(0)
    if (weight_OI := only(weight_KOI)) is not None:
        return lift(*_by_one_matrix(x, False, weight_OI, bias_KO, again), size)
    x_NI = x if x.ndim == 2 else x.reshape(-1, width)
    x_KNI = x_NI.expand(size, *x_NI.shape)  # a view: no K copies of the input
    y_KNO = _product(x_KNI, weight_KOI, bias_KO, again)
    return y_KNO if x.ndim == 2 else y_KNO.view(size, *x.shape[:-1], out)


def _by_one_matrix(
    x: Tensor, per_trial: bool, weight_OI: Tensor, bias_KO: Tensor | None, again: Callable[[], None]
) -> tuple[Tensor, bool]:
    """All trials' ``x_...I`` by the frozen matrix that they have in common: ``y_...O``, and whether it has the axis K.

    The bias may be each trial's own.
    """
    bias_O = only(bias_KO)
    added = None if bias_O is not None or bias_KO is None else bias_KO
    long = x.device.type == "cpu" and x.numel() * len(weight_OI) > _PART_OF_ONE
    if long and not torch.is_autocast_enabled("cpu"):
        y: Tensor = _LongProduct.apply(x, weight_OI, bias_O, again)
    else:
        y = functional.linear(x, weight_OI, bias_O)
    if added is None:
        return y, per_trial
    ndim = y.ndim if per_trial else y.ndim + 1
    return y + added.view(len(added), *[1] * (ndim - 2), -1).to(y.dtype), True


class _LongProduct(torch.autograd.Function):
    """A product with a frozen matrix that asks the gate between its parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, again: Callable[[], None]) -> Tensor:
        """``x_...I`` to ``y_...O``."""
        ctx.save_for_backward(weight_OI)
        ctx.again = again
        return _in_parts(x, weight_OI.t(), bias_O, again)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input."""
        (weight_OI,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need whole products
            return grad @ weight_OI, None, None, None
        return _in_parts(grad, weight_OI, None, ctx.again), None, None, None


def _in_parts(x: Tensor, weight_IO: Tensor, bias_O: Tensor | None, again: Callable[[], None]) -> Tensor:
    """``x_...I @ weight_IO + bias_O``."""
    width, out = weight_IO.shape
    x_NI = x.reshape(-1, width)
    y_NO = x.new_empty(len(x_NI), out)
    for part in _parts(len(x_NI), max(_PART_OF_ONE // (width * out), _FEW_ROWS), again):
        if bias_O is None:
            torch.mm(x_NI[part], weight_IO, out=y_NO[part])
        else:
            torch.addmm(bias_O, x_NI[part], weight_IO, out=y_NO[part])
    return y_NO.view(*x.shape[:-1], out)


def _product(x_KNI: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None, again: Callable[[], None]) -> Tensor:
    # autocast casts only for PyTorch's own derivative
    if weight_KOI.numel() < _FEW_WEIGHTS or torch.is_autocast_enabled(x_KNI.device.type):
        return _multiplied(x_KNI, weight_KOI, bias_KO)
    y_KNO: Tensor = _Product.apply(x_KNI, weight_KOI, bias_KO, again)
    return y_KNO


def _multiplied(x_KNI: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None, out: Tensor | None = None) -> Tensor:
    weight_KIO = weight_KOI.mT
    if bias_KO is None:
        return torch.bmm(x_KNI, weight_KIO, out=out)
    return torch.baddbmm(bias_KO.unsqueeze(1), x_KNI, weight_KIO, out=out)


class _Product(torch.autograd.Function):
    """A batched product whose derivative needs no copies, and runs in parts where it is long.

    PyTorch's own returns the weight's gradient transposed, to be copied into the weight's memory order. Where its
    kernel does not take the memory order of the output's gradient, as after a loss, it goes trial by trial.
    """

    @staticmethod
    def forward(
        ctx: Any, x_KNI: Tensor, weight_KOI: Tensor, bias_KO: Tensor | None, again: Callable[[], None]
    ) -> Tensor:
        """``y_KNO``."""
        ctx.save_for_backward(x_KNI, weight_KOI)
        ctx.again = again
        rows = _rows_at_once(x_KNI, weight_KOI)
        if rows >= len(x_KNI):
            return _multiplied(x_KNI, weight_KOI, bias_KO)
        y_KNO = x_KNI.new_empty(*x_KNI.shape[:2], weight_KOI.shape[1])
        for part in _parts(len(x_KNI), rows, again):
            _multiplied(x_KNI[part], weight_KOI[part], None if bias_KO is None else bias_KO[part], y_KNO[part])
        return y_KNO

    @staticmethod
    def backward(ctx: Any, grad_KNO: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs."""
        x_KNI, weight_KOI = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        grad_KNO = grad_KNO.contiguous()
        rows = _rows_at_once(x_KNI, weight_KOI)
        of_bias = grad_KNO.sum(1) if for_bias else None
        if rows >= len(x_KNI) or torch.is_grad_enabled():  # second derivatives need whole products
            of_x = torch.bmm(grad_KNO, weight_KOI) if for_x else None
            return of_x, torch.bmm(grad_KNO.mT, x_KNI) if for_weight else None, of_bias, None
        of_x = torch.empty_like(x_KNI, memory_format=torch.contiguous_format) if for_x else None
        of_weight = torch.empty_like(weight_KOI, memory_format=torch.contiguous_format) if for_weight else None
        for part in _parts(len(x_KNI), rows, ctx.again):
            if of_x is not None:
                torch.bmm(grad_KNO[part], weight_KOI[part], out=of_x[part])
            if of_x is not None and of_weight is not None:
                ctx.again()
            if of_weight is not None:
                torch.bmm(grad_KNO[part].mT, x_KNI[part], out=of_weight[part])
        return of_x, of_weight, of_bias, None


def _rows_at_once(x_KNI: Tensor, weight_KOI: Tensor) -> int:
    """Return how many trials to multiply before asking the gate again."""
    size, out, width = weight_KOI.shape
    if x_KNI.device.type != "cpu":
        return size
    return max(min(_PART_PRODUCTS // (x_KNI.shape[1] * out * width or 1), _PART_WEIGHTS // (out * width)), 1)


def _parts(size: int, rows: int, again: Callable[[], None]) -> Iterator[slice]:
    """Trials or examples, `rows` at a time, and `again` in between."""
    for start in range(0, size, rows):
        if start:
            again()
        yield slice(start, start + rows)


def _one(x: Tensor, weight_1OI: Tensor, bias_1O: Tensor | None) -> Tensor:
    """One trial's ``x_...I`` to ``y_...O``."""
    bias = None if bias_1O is None else bias_1O.squeeze(0)
    return functional.linear(x, weight_1OI.squeeze(0), bias)


@rule(nn.Bilinear)
class FusedBilinear(JointLayer):
    """`nn.Bilinear` of K trials."""

    weight_KOIJ: Tensor
    bias_KO: Tensor | None

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.weight_KOIJ = rows.require(self.path, "weight")
        self.bias_KO = rows.get(self.path, "bias")

    def run_joint(self, values: Sequence[Tensor], per_trial: Sequence[bool], training: bool) -> tuple[Tensor, bool]:
        """``[K]B...I`` and ``[K]B...J`` to ``y_KB...O``."""
        left, right = ("k...", "...")[not per_trial[0]], ("k...", "...")[not per_trial[1]]
        y = torch.einsum(f"{left}i,koij,{right}j->k...o", values[0], self.weight_KOIJ, values[1])
        if self.bias_KO is None:
            return y, True
        size, out = self.bias_KO.shape
        return y + self.bias_KO.view(size, *[1] * (y.ndim - 2), out), True
