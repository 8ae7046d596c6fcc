"""What functions that only arrange elements mean for axes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trials.shrinking.axes.axis import Axis, cut, factors_of, is_free, join, keep, one, product, split, total
from trials.shrinking.axes.elementwise import together, use_as_vectors
from trials.shrinking.axes.sizes import Dim
from trials.shrinking.axes.trace import Call, Trace, operation


def arranged(trace: Trace, axes: Sequence[Axis], sizes: Sequence[Any], shape: Sequence[int], call: Call) -> list[Axis]:
    """The axes of a tensor with `axes` that is viewed in other sizes.

    Args:
        trace: of the forward.
        axes: of the tensor.
        sizes: as the code gives them; -1 where it leaves one open.
        shape: the sizes that came out.
        call: the view.
    """
    waiting = factors_of(axes)
    made: list[Axis] = []
    for given, size in zip(sizes, shape, strict=True):
        taken: list[Axis] = []
        need = int(size)
        while need > 1 and waiting:
            first = waiting[0].find()
            if first.size <= need and need % first.size == 0:
                taken.append(first)
                waiting = waiting[1:]
                need //= first.size
            elif first.size % need == 0:
                outer = given.axis if isinstance(given, Dim) and not taken else _outer(need, given, taken, call)
                inner = split(first, outer, f"{call.where} divides it")
                taken.append(outer)
                waiting = factors_of([inner, *waiting[1:]])
                need = 1
            else:
                break
        if need > 1:
            return _irregular(axes, shape, call)
        axis = product(taken) if taken else one()
        if given != -1:
            trace.meet(axis, given, call)
        made.append(axis)
    return made


def _outer(need: int, given: Any, taken: list[Axis], call: Call) -> Axis:
    """The outer part of a factor that is divided: open, or a plain number."""
    return (
        Axis(need)
        if isinstance(given, Dim) or given == -1 or taken
        else Axis(need, f"{call.where} takes {need}, a plain number")
    )


def _irregular(axes: Sequence[Axis], shape: Sequence[int], call: Call) -> list[Axis]:
    reason = f"{call.where} mixes axes"
    for axis in axes:
        keep(axis, reason)
    return [Axis(size, reason) for size in shape]


@operation("view", "reshape", "view_as", "reshape_as")
def _view(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    if call.name.endswith("_as"):
        sizes: Sequence[Any] = [trace.dim(axis) for axis in trace.axes(call.get(1, "other"))]
    else:
        sizes = call.args[1:] or (call.kwargs.get("shape") or call.kwargs.get("size"),)
        if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
            return axes
        if len(sizes) == 1 and not isinstance(sizes[0], int):
            sizes = sizes[0]
    return tuple(arranged(trace, axes, sizes, call.made.shape, call))


@operation("unflatten")
def _unflatten(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, dim, sizes = trace.axes(call.args[0]), call.get(1, "dim"), call.get(2, "sizes")
    dim %= len(axes)
    parts = arranged(trace, axes[dim : dim + 1], sizes, call.made.shape[dim : dim + len(sizes)], call)
    return (*axes[:dim], *parts, *axes[dim + 1 :])


@operation("flatten")
def _flatten(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    if not axes:
        return (one(),)
    start, end = call.get(1, "start_dim", 0) % len(axes), call.get(2, "end_dim", -1) % len(axes)
    return (*axes[:start], product(axes[start : end + 1]), *axes[end + 1 :])


@operation("ravel")
def _ravel(trace: Trace, call: Call) -> tuple[Axis, ...]:
    return (product(trace.axes(call.args[0])),)


@operation("squeeze")
def _squeeze(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, dim = trace.axes(call.args[0]), call.get(1, "dim")
    dims = range(len(axes)) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d % len(axes) for d in dims if axes[d % len(axes)].size == 1}
    return tuple(axis for i, axis in enumerate(axes) if i not in gone)


@operation("unsqueeze")
def _unsqueeze(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, dim = trace.axes(call.args[0]), call.get(1, "dim") % (call.args[0].ndim + 1)
    return (*axes[:dim], one(), *axes[dim:])


@operation("transpose", "swapaxes", "swapdims")
def _transpose(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = list(trace.axes(call.args[0]))
    a, b = call.get(1, "dim0"), call.get(2, "dim1")
    axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


@operation("t", "T", "mT", "H", "mH", "adjoint")
def _t(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    return tuple(reversed(axes)) if len(axes) <= 2 or call.name == "T" else (*axes[:-2], axes[-1], axes[-2])


@operation("permute")
def _permute(trace: Trace, call: Call) -> tuple[Axis, ...]:
    dims = call.args[1:] or (call.kwargs["dims"],)
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    axes = trace.axes(call.args[0])
    return tuple(axes[dim] for dim in dims)


@operation("movedim", "moveaxis")
def _movedim(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    numbered = torch.empty(tuple(range(len(axes))), device="meta")
    moved = torch.movedim(numbered, call.get(1, "source"), call.get(2, "destination"))
    return tuple(axes[number] for number in moved.shape)


@operation("expand", "broadcast_to", "expand_as")
def _expand(trace: Trace, call: Call) -> tuple[Axis, ...]:
    x = call.args[0]
    if call.name == "expand_as":
        return together(trace, [x, call.get(1, "other")], call.made.shape, call)
    sizes = call.args[1:] or (call.kwargs.get("size"),)
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    axes, made = trace.axes(x), []
    for back, (given, size) in enumerate(zip(reversed(sizes), reversed(call.made.shape), strict=True), 1):
        own = axes[-back] if back <= len(axes) else one()
        if own.size == size:
            if given != -1 and size != 1:
                trace.meet(own, given, call)
            made.append(own)
        else:
            made.append(
                given.axis if isinstance(given, Dim) else Axis(int(size), f"{call.where} takes {size}, a plain number")
            )
    return tuple(reversed(made))


@operation("repeat", "tile")
def _repeat(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, made = trace.axes(call.args[0]), []
    for back in range(1, call.made.ndim + 1):
        own, size = (axes[-back] if back <= len(axes) else one()), call.made.shape[-back]
        if own.size == size:
            made.append(own)
        else:
            made.append(total([own] * (size // own.size)) if own.size > 1 else Axis(size, f"{call.where} repeats it"))
    return tuple(reversed(made))


@operation("repeat_interleave")
def _repeat_interleave(trace: Trace, call: Call) -> Any:
    repeats, dim = call.get(1, "repeats"), call.get(2, "dim")
    axes = list(trace.axes(call.args[0]))
    if dim is None or not isinstance(repeats, int):
        for axis in axes:
            keep(axis, f"{call.where}: there is no rule for {call.name} of this form")
        return tuple(Axis(size, call.where) for size in call.made.shape)
    axes[dim] = product([axes[dim], Axis(int(repeats), f"{call.where} repeats it")])
    return tuple(axes)


@operation("cat", "concat", "concatenate", "hstack", "vstack")
def _cat(trace: Trace, call: Call) -> tuple[Axis, ...]:
    tensors = [each for each in call.get(0, "tensors") if each.ndim == call.made.ndim]
    dim = call.get(1, "dim", call.kwargs.get("axis", 0))
    dim = {"hstack": min(1, call.made.ndim - 1), "vstack": 0}.get(call.name, dim) % call.made.ndim
    first = list(trace.axes(tensors[0]))
    for tensor in tensors[1:]:
        for i, axis in enumerate(trace.axes(tensor)):
            if i != dim:
                join(first[i], axis, f"{call.where} joins axes that are made otherwise")
    use_as_vectors(trace, tensors)
    first[dim] = total([trace.axes(tensor)[dim] for tensor in tensors])
    return tuple(first)


@operation("stack")
def _stack(trace: Trace, call: Call) -> tuple[Axis, ...]:
    tensors, dim = call.get(0, "tensors"), call.get(1, "dim", 0) % call.made.ndim
    axes = list(together(trace, list(tensors), tensors[0].shape, call))
    use_as_vectors(trace, tensors)
    return (*axes[:dim], Axis(len(tensors), f"a count of {len(tensors)} stacked tensors"), *axes[dim:])


@operation("chunk", "split", "split_with_sizes", "tensor_split")
def _pieces(trace: Trace, call: Call) -> list[tuple[Axis, ...]]:
    axes = trace.axes(call.args[0])
    dim = call.get(2, "dim", 0) % len(axes)
    parts = cut(axes[dim], [piece.shape[dim] for piece in call.made], f"{call.where} cuts it")
    if call.name in ("split", "split_with_sizes"):
        given = call.get(1, "split_size_or_sections", call.kwargs.get("split_size", call.kwargs.get("split_sizes")))
        sizes = [given] * len(parts) if isinstance(given, int) else given
        for part, size in zip(parts, sizes, strict=True):
            if part.size == size:
                trace.meet(part, size, call)
    return [(*axes[:dim], part, *axes[dim + 1 :]) for part in parts]


@operation("unbind")
def _unbind(trace: Trace, call: Call) -> list[tuple[Axis, ...]]:
    axes = trace.axes(call.args[0])
    dim = call.get(1, "dim", 0) % len(axes)
    _keep_counted(axes[dim], call)
    return [(*axes[:dim], *axes[dim + 1 :])] * len(call.made)


@operation("select", "narrow", "index_select", "roll", "flip", "gather", "scatter", "scatter_add", "take_along_dim")
def _one_axis(trace: Trace, call: Call) -> tuple[Axis, ...]:
    """One axis is picked from, so it stays; the others pass through."""
    axes = list(trace.axes(call.args[0]))
    dims = _picked_axes(call, len(axes))
    for each in dims:
        _keep_counted(axes[each], call)
        axes[each] = axes[each] if call.made.ndim < len(axes) else Axis(call.made.shape[each], call.where)
    if call.made.ndim < len(axes):
        del axes[dims[0]]
    return tuple(
        axis if axis.size == size else Axis(size, call.where) for axis, size in zip(axes, call.made.shape, strict=True)
    )


@operation("index_add", "index_copy")
def _index_add(trace: Trace, call: Call) -> tuple[Axis, ...]:
    """Rows of one tensor are added to some of another's."""
    axes = list(trace.axes(call.args[0]))
    dim, source = call.get(1, "dim") % len(axes), trace.axes(call.get(3, "source", call.kwargs.get("tensor")))
    _keep_counted(axes[dim], call)
    for i, axis in enumerate(source):
        if i != dim:
            join(axes[i], axis, f"{call.where} joins axes that are made otherwise")
    return tuple(axes)


def _picked_axes(call: Call, count: int) -> list[int]:
    """Which of the `count` axes it picks from; all if it names none, since it flattens the tensor then."""
    if call.name == "flip":  # axes one by one, or as one sequence
        given = call.args[1:] or call.kwargs["dims"]
    elif call.name == "roll":
        given = call.get(2, "dims")
    else:
        given = call.get(2 if call.name == "take_along_dim" else 1, "dim")
    dims = [each for each in tree_leaves(given) if each is not None]
    return dims or list(range(count))


@operation("getitem")
def _getitem(trace: Trace, call: Call) -> tuple[Axis, ...]:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    return _indexed(trace, call.args[0], index, call, call.made.shape)


def _indexed(trace: Trace, x: Tensor, index: tuple[Any, ...], call: Call, shape: Sequence[int]) -> tuple[Axis, ...]:
    axes = trace.axes(x)
    arrays = [each for each in index if isinstance(each, (Tensor, list))]
    if len(arrays) > 1 or any(isinstance(a, list) or a.dtype == torch.bool for a in arrays):
        for axis in axes:
            keep(axis, f"{call.where} picks elements")
        return tuple(Axis(size, call.where) for size in shape)
    taken = sum(1 for each in index if each is not None and each is not Ellipsis)
    made: list[Axis] = []
    position = 0
    if not any(each is Ellipsis for each in index):
        index = (*index, Ellipsis)
    for each in index:
        if each is None:
            made.append(one())
        elif each is Ellipsis:
            made += axes[position : position + len(axes) - taken]
            position += len(axes) - taken
        else:
            made += _by_one_index(trace, axes[position], each, call)
            position += 1
    return tuple(made)


def _by_one_index(trace: Trace, axis: Axis, index: Any, call: Call) -> list[Axis]:
    if isinstance(index, slice):
        length = len(range(*index.indices(axis.size)))
        if length == axis.size:
            if isinstance(index.stop, int) and is_free(axis) and index.stop == axis.size:
                trace.meet(axis, index.stop, call)
            return [axis]
        _keep_counted(axis, call)
        return [Axis(length, call.where)]
    _keep_counted(axis, call)
    return list(trace.axes(index)) if isinstance(index, Tensor) else []


@operation("setitem")
def _setitem(trace: Trace, call: Call) -> tuple[Axis, ...]:
    """`call.made` is the part that was written to."""
    part: tuple[Axis, ...] = _getitem(trace, call)
    value = call.args[2]
    for back, axis in enumerate(reversed(trace.axes(value) if isinstance(value, Tensor) else ()), 1):
        if axis.size == part[-back].size:
            join(part[-back], axis, f"{call.where} joins axes that are made otherwise")
    return part


def _keep_counted(axis: Axis, call: Call) -> None:
    if is_free(axis):
        keep(axis, f"{call.where} picks some of its elements")


@operation("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _pixels(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    factor = int(call.get(1, "upscale_factor", call.kwargs.get("downscale_factor", call.kwargs.get("groups"))))
    if call.name == "channel_shuffle":
        _keep_counted(axes[1], call)
        return axes
    spatial = [Axis(size, call.where) for size in call.made.shape[-2:]]
    for axis in axes[-2:]:
        keep(axis, call.where)
    if call.name == "pixel_unshuffle":
        return (*axes[:-3], product([axes[-3], Axis(factor**2, call.where)]), *spatial)
    outer = Axis(axes[-3].size // factor**2)
    inner = split(axes[-3], outer, f"{call.where} divides it")
    keep(inner, f"{call.where} makes pixels of it")
    return (*axes[:-3], outer, *spatial)


@operation("unfold")
def _unfold(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    if len(axes) != 4 or call.made.ndim != 3:  # Tensor.unfold
        for axis in axes:
            keep(axis, f"{call.where}: there is no rule for Tensor.unfold")
        return tuple(Axis(size, call.where) for size in call.made.shape)
    kernel = Axis(call.made.shape[1] // axes[1].size, call.where)
    return (axes[0], product([axes[1], kernel]), Axis(call.made.shape[2], call.where))
