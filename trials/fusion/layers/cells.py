"""One direction of a recurrent layer of K trials, step by step in time, with few kernels per step and no graph.

Shapes: K trials, T steps, N examples, I inputs, H outputs, G = gates · H, F = I + H. Each step has one product: the two
weights side by side, times input and state stacked as ``[K, F, N]``. N comes last, so that each gate of a cell is one
piece of memory.
"""

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ops = torch.ops.aten


class Cell(abc.ABC):
    """The formulas of one kind of cell, as PyTorch documents them.

    Attributes:
        gates: how many blocks of H rows the product has.
        remembers: whether there is a state beside the output.
    """

    gates: ClassVar[int]
    remembers: ClassVar[bool] = False

    @abc.abstractmethod
    def joined(self, w_ih: Tensor, w_hh: Tensor) -> Tensor:
        """``[K, G, I]`` and ``[K, G, H]``, as PyTorch keeps them, to ``[K, gates · H, I + H]``."""

    @abc.abstractmethod
    def biases(self, b_ih: Tensor, b_hh: Tensor) -> Tensor:
        """The two biases ``[K, G]`` as the product's one, ``[K, gates · H]``."""

    @abc.abstractmethod
    def forward(self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor, Tensor] | None, out: Tensor) -> None:
        """One step.

        Args:
            a: the product ``[K, gates · H, N]``; what the backward needs is left in it.
            h: the output ``[K, H, N]`` of the step before.
            c: the state before, where to put the new one, and its tanh; None where there is none.
            out: where to put the output.
        """

    @abc.abstractmethod
    def backward(
        self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor] | None, dh: Tensor, dc: Tensor | None, out: Tensor
    ) -> Tensor | None:
        """One step back.

        Args:
            a: what `forward` left.
            h: the output of the step before.
            c: the state before, and the tanh of the new one.
            dh: the gradient of the output; may be changed.
            dc: the gradient of the new state; becomes that of the state before.
            out: where to put the gradient of the product.

        Returns:
            The part of the gradient of `h` that does not pass through the product.
        """


class Plain(Cell):
    """Elman's."""

    gates = 1

    def __init__(self, relu: bool) -> None:
        """With ReLU, or else tanh."""
        self._relu = relu

    def joined(self, w_ih: Tensor, w_hh: Tensor) -> Tensor:
        """See `Cell`."""
        return torch.cat((w_ih, w_hh), 2)

    def biases(self, b_ih: Tensor, b_hh: Tensor) -> Tensor:
        """See `Cell`."""
        return b_ih + b_hh

    def forward(self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor, Tensor] | None, out: Tensor) -> None:
        """See `Cell`."""
        out.copy_(a.relu_() if self._relu else a.tanh_())

    def backward(
        self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor] | None, dh: Tensor, dc: Tensor | None, out: Tensor
    ) -> Tensor | None:
        """See `Cell`."""
        if self._relu:
            _ops.threshold_backward.grad_input(dh, a, 0, grad_input=out)
        else:
            _ops.tanh_backward.grad_input(dh, a, grad_input=out)
        return None


class LSTM(Cell):
    """Hochreiter and Schmidhuber 1997, with a forget gate. The gates stand in the order input, forget, output, cell."""

    gates = 4
    remembers = True

    def joined(self, w_ih: Tensor, w_hh: Tensor) -> Tensor:
        """See `Cell`."""
        return self._ordered(torch.cat((w_ih, w_hh), 2))

    def biases(self, b_ih: Tensor, b_hh: Tensor) -> Tensor:
        """See `Cell`."""
        return self._ordered(b_ih + b_hh)

    def _ordered(self, x: Tensor) -> Tensor:
        i, f, g, o = x.chunk(4, 1)
        return torch.cat((i, f, o, g), 1)

    def forward(self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor, Tensor] | None, out: Tensor) -> None:
        """See `Cell`."""
        assert c is not None  # this cell remembers
        before, after, tanh = c
        gates, g = a.tensor_split((before.shape[1] * 3,), 1)
        gates.sigmoid_()
        g.tanh_()
        i, f, o = gates.chunk(3, 1)
        torch.mul(f, before, out=after).addcmul_(i, g)
        torch.tanh(after, out=tanh)
        torch.mul(o, tanh, out=out)

    def backward(
        self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor] | None, dh: Tensor, dc: Tensor | None, out: Tensor
    ) -> Tensor | None:
        """See `Cell`."""
        assert c is not None and dc is not None  # this cell remembers
        before, tanh = c
        size = before.shape[1]
        i, f, o, g = a.chunk(4, 1)
        di, df, do, dg = out.chunk(4, 1)
        torch.mul(dh, tanh, out=do)
        dc.add_(_ops.tanh_backward.grad_input(dh.mul_(o), tanh, grad_input=dh))
        torch.mul(dc, g, out=di)
        torch.mul(dc, before, out=df)
        torch.mul(dc, i, out=dg)
        gates = out[:, : 3 * size]
        _ops.sigmoid_backward.grad_input(gates, a[:, : 3 * size], grad_input=gates)
        _ops.tanh_backward.grad_input(dg, g, grad_input=dg)
        dc.mul_(f)
        return None


class GRU(Cell):
    """Cho et al. 2014, in PyTorch's variant. The new value's parts from input and state are blocks of their own."""

    gates = 4

    def joined(self, w_ih: Tensor, w_hh: Tensor) -> Tensor:
        """See `Cell`."""
        size = w_hh.shape[2]
        both = torch.cat((w_ih, w_hh), 2)
        from_x = torch.cat((w_ih[:, 2 * size :], torch.zeros_like(w_hh[:, :size])), 2)
        from_h = torch.cat((torch.zeros_like(w_ih[:, :size]), w_hh[:, 2 * size :]), 2)
        return torch.cat((both[:, : 2 * size], from_x, from_h), 1)

    def biases(self, b_ih: Tensor, b_hh: Tensor) -> Tensor:
        """See `Cell`."""
        gates = b_ih.shape[1] // 3 * 2
        return torch.cat((b_ih[:, :gates] + b_hh[:, :gates], b_ih[:, gates:], b_hh[:, gates:]), 1)

    def forward(self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor, Tensor] | None, out: Tensor) -> None:
        """See `Cell`."""
        a[:, : 2 * h.shape[1]].sigmoid_()
        r, z, n, from_h = a.chunk(4, 1)
        n.addcmul_(r, from_h).tanh_()
        torch.lerp(n, h, z, out=out)

    def backward(
        self, a: Tensor, h: Tensor, c: tuple[Tensor, Tensor] | None, dh: Tensor, dc: Tensor | None, out: Tensor
    ) -> Tensor | None:
        """See `Cell`."""
        r, z, n, from_h = a.chunk(4, 1)
        dr, dz, dn, d_from_h = out.chunk(4, 1)
        directly = dh * z
        _ops.tanh_backward.grad_input(dh - directly, n, grad_input=dn)
        torch.sub(h, n, out=dz).mul_(dh)
        torch.mul(dn, from_h, out=dr)
        torch.mul(dn, r, out=d_from_h)
        gates = out[:, : 2 * h.shape[1]]
        _ops.sigmoid_backward.grad_input(gates, a[:, : 2 * h.shape[1]], grad_input=gates)
        return directly


def run(
    cell: Cell,
    x_KTNI: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    states_KNH: tuple[Tensor, ...],
    reverse: bool,
) -> tuple[Tensor, ...]:
    """One direction of one layer.

    Args:
        cell: what is computed in each step.
        x_KTNI: the input; T steps of a batch of N.
        weights: for the input, for the output, the biases of both, and the projection of the output, each with the
            axis K first, in PyTorch's shapes; the last three may be None.
        states_KNH: the first output and, if the cell remembers, the first state.
        reverse: whether time runs backwards.

    Returns:
        ``y_KTNH``, the last output ``[K, N, H]`` and, if the cell remembers, the last state.
    """
    w_ih, w_hh, b_ih, b_hh, projection = weights
    bias = None if b_ih is None or b_hh is None else cell.biases(b_ih, b_hh)
    found: tuple[Tensor, ...] = _InTime.apply(
        cell, reverse, x_KTNI, cell.joined(w_ih, w_hh), bias, projection, *states_KNH
    )
    return found[0], found[0][:, 0 if reverse else -1], *found[1:]


def _unseen(backward: Any) -> Any:
    """Spare `backward`, which makes many short calls, what function modes cost for each."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return backward(*args)

    return call


class _InTime(torch.autograd.Function):
    """All steps of one direction, with a derivative of our own."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        reverse: bool,
        x_KTNI: Tensor,
        w_KGF: Tensor,
        bias_KG: Tensor | None,
        projection_KPH: Tensor | None,
        *states_KNH: Tensor,
    ) -> tuple[Tensor, ...]:
        """``y_KTNH`` and, if the cell remembers, the last state."""
        size, steps, batch, width = x_KTNI.shape
        x_TKIN = x_KTNI.permute(1, 0, 3, 2)
        xh = w_KGF.new_empty(steps + 1, size, w_KGF.shape[2], batch)
        xh[:steps, :, :width] = x_TKIN.flip(0) if reverse else x_TKIN
        h = xh[:, :, width:]
        h[0] = states_KNH[0].mT
        a = w_KGF.new_empty(steps, size, w_KGF.shape[1], batch)
        c = tanh = plain = None
        hidden = w_KGF.shape[1] // cell.gates
        if cell.remembers:
            c, tanh = (w_KGF.new_empty(steps + more, size, hidden, batch) for more in (1, 0))
            c[0] = states_KNH[1].mT
        if projection_KPH is not None:
            plain = w_KGF.new_empty(steps, size, hidden, batch)
        for step in range(steps):
            if bias_KG is None:
                torch.bmm(w_KGF, xh[step], out=a[step])
            else:
                torch.baddbmm(bias_KG.unsqueeze(2), w_KGF, xh[step], out=a[step])
            memory = None if c is None or tanh is None else (c[step], c[step + 1], tanh[step])
            cell.forward(a[step], h[step], memory, h[step + 1] if plain is None else plain[step])
            if plain is not None and projection_KPH is not None:
                h[step + 1] = torch.bmm(projection_KPH, plain[step])
        ctx.cell, ctx.reverse, ctx.width = cell, reverse, width
        ctx.save_for_backward(xh, a, w_KGF, projection_KPH, c, tanh, plain)
        y_TKHN = h[1:].flip(0) if reverse else h[1:]
        y_KTNH = y_TKHN.permute(1, 0, 3, 2).contiguous()
        return (y_KTNH,) if c is None else (y_KTNH, c[-1].mT.contiguous())

    @staticmethod
    @_unseen
    @once_differentiable
    def backward(ctx: Any, dy_KTNH: Tensor, *dc_KNH: Tensor) -> tuple[Tensor | bool | None, ...]:
        """The gradients of all inputs."""
        cell, reverse, width = ctx.cell, ctx.reverse, ctx.width
        xh, a, w_KGF, projection_KPH, c, tanh, plain = ctx.saved_tensors
        steps, needs_x = len(a), ctx.needs_input_grad[2]
        dy_TKHN = dy_KTNH.permute(1, 0, 3, 2)
        dy_TKHN = dy_TKHN.flip(0) if reverse else dy_TKHN.contiguous()
        h = xh[:, :, width:]
        da, dw = torch.empty_like(a), torch.zeros_like(w_KGF)
        dp = None if projection_KPH is None else torch.zeros_like(projection_KPH)
        dx = xh.new_empty(steps, *xh.shape[1:2], width, xh.shape[3]) if needs_x else None
        back = (w_KGF if needs_x else w_KGF[:, :, width:]).mT
        dh = torch.zeros_like(dy_TKHN[0])
        dc = dc_KNH[0].mT.contiguous() if dc_KNH else None
        for step in reversed(range(steps)):
            dh = dh.add_(dy_TKHN[step])
            if dp is not None:
                dp.baddbmm_(dh, plain[step].mT)
                dh = torch.bmm(projection_KPH.mT, dh)
            memory = None if c is None else (c[step], tanh[step])
            directly = cell.backward(a[step], h[step], memory, dh, dc, da[step])
            dw.baddbmm_(da[step], xh[step].mT)
            both = torch.bmm(back, da[step])
            dh = both[:, width:] if needs_x else both
            if directly is not None:
                dh = dh.add_(directly)
            if dx is not None:
                dx[step] = both[:, :width]
        if dx is not None:
            dx = (dx.flip(0) if reverse else dx).permute(1, 0, 3, 2)
        db = da.sum((0, 3)) if ctx.needs_input_grad[4] else None
        return None, None, dx, dw, db, dp, dh.mT, *(() if dc is None else (dc.mT,))
