"""The kernels of `multi_tensor`: the formulas of `adam` and `sgd`. Importing this needs Triton.

A rule runs several of PyTorch's kernels, each of which rounds its result. So must these, or their bits are others:
they are compiled without fusing a product and a sum (`LAUNCH`), except where PyTorch's own compiler fuses them.
"""

import triton
import triton.language as tl

BLOCK = 1024
LAUNCH = {"enable_fp_fusion": False}
_GIVEN = "chunks", "addresses", "columns", "first", "table", "factor", "limit", "alive"
"""Each is compiled for once, not for each size and alignment: a step that is recorded must find its kernel compiled."""


@triton.jit
def _of_trial(table, row: tl.constexpr):
    return tl.load(table + row * tl.num_programs(1) + tl.program_id(1))


@triton.jit
def _root(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _ratio(x, y):
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def _mixed(old, new, share):
    """`torch.lerp`."""
    small = tl.abs(share) < 0.5
    return tl.fma(tl.where(small, share, share - 1), new - old, tl.where(small, old, new))


@triton.jit
def _places(chunks, addresses, columns, like, alive, first, block: tl.constexpr):
    """Where this program's weights, their gradients and their state are, and which of them it updates."""
    chunk = chunks + 4 * (first + tl.program_id(0))
    tensor, size, column, start = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
    trial = tl.program_id(1).to(tl.int64)
    here = start + tl.arange(0, block)
    p = tl.load(addresses + 2 * tensor).to(like.dtype) + trial * size + here
    g = tl.load(addresses + 2 * tensor + 1).to(like.dtype) + trial * size + here
    if alive is not None:
        size = tl.where(tl.load(alive + trial) != 0, size, 0)
    return p, g, trial * columns + column + here, here < size


@triton.jit
def _gradient(at, inside, factor, limit, maximize: tl.constexpr):
    """See `Gradients.apply`."""
    g = tl.load(at, mask=inside, other=0.0)
    if limit is not None:
        most = tl.load(limit + tl.program_id(1)).to(g.dtype)
        g = tl.where(g > most, most, tl.where(g < -most, -most, g))
    if factor is not None:
        g = g * tl.load(factor + tl.program_id(1)).to(g.dtype)
    if maximize:
        g = -g
    return g


@triton.jit
def _decayed(p, g, table, keep: tl.constexpr, decay: tl.constexpr):
    """See `registry.decay`."""
    if keep >= 0:
        p = p * _of_trial(table, keep)
    if decay >= 0:
        g = p * _of_trial(table, decay) + g
    return p, g


@triton.jit(do_not_specialize=[*_GIVEN, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def adam(  # noqa: PLR0913
    chunks,
    addresses,
    columns,
    first,
    table,
    factor,
    limit,
    alive,
    block: tl.constexpr,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq=None,
    new1: tl.constexpr = -1,
    new2: tl.constexpr = -1,
    root: tl.constexpr = -1,
    eps: tl.constexpr = -1,
    rate: tl.constexpr = -1,
    keep: tl.constexpr = -1,
    decay: tl.constexpr = -1,
    maximize: tl.constexpr = False,
):
    """Do what `trials.optim.adam.Adam.update` does. The arguments: see `multi_tensor.MultiTensor`."""
    p_at, g_at, s_at, inside = _places(chunks, addresses, columns, exp_avg, alive, first, block)
    p = tl.load(p_at, mask=inside, other=0.0)
    p, g = _decayed(p, _gradient(g_at, inside, factor, limit, maximize), table, keep, decay)
    mean = _mixed(tl.load(exp_avg + s_at, mask=inside, other=0.0), g, _of_trial(table, new1))
    square = _mixed(tl.load(exp_avg_sq + s_at, mask=inside, other=0.0), g * g, _of_trial(table, new2))
    tl.store(exp_avg + s_at, mean, mask=inside)
    tl.store(exp_avg_sq + s_at, square, mask=inside)
    if max_exp_avg_sq is not None:
        before = tl.load(max_exp_avg_sq + s_at, mask=inside, other=0.0)
        square = tl.maximum(before, square, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sq + s_at, square, mask=inside)
    divisor = _root(square) * _of_trial(table, root) + _of_trial(table, eps)
    tl.store(p_at, p - _ratio(mean, divisor), mask=inside)


@triton.jit(do_not_specialize=[*_GIVEN, "momentum_buffer"])
def sgd(  # noqa: PLR0913
    chunks,
    addresses,
    columns,
    first,
    table,
    factor,
    limit,
    alive,
    block: tl.constexpr,
    momentum_buffer,
    minus_rate: tl.constexpr = -1,
    decay: tl.constexpr = -1,
    momentum: tl.constexpr = -1,
    old: tl.constexpr = -1,
    new: tl.constexpr = -1,
    nesterov: tl.constexpr = False,
    maximize: tl.constexpr = False,
):
    """Do what `trials.optim.sgd.SGD.update` does."""
    p_at, g_at, s_at, inside = _places(chunks, addresses, columns, momentum_buffer, alive, first, block)
    p = tl.load(p_at, mask=inside, other=0.0)
    p, g = _decayed(p, _gradient(g_at, inside, factor, limit, maximize), table, -1, decay)
    if momentum >= 0:
        buffer = tl.load(momentum_buffer + s_at, mask=inside, other=0.0) * _of_trial(table, old)
        buffer = buffer + g * _of_trial(table, new)
        tl.store(momentum_buffer + s_at, buffer, mask=inside)
        g = buffer * _of_trial(table, momentum) + g if nesterov else buffer
    tl.store(p_at, p + g * _of_trial(table, minus_rate), mask=inside)
