"""What layers with weights, products of tensors, norms and pooling mean for axes."""

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from trials.shrinking.axes.axis import Axis, is_free, join, keep, product, total
from trials.shrinking.axes.sizes import Dim
from trials.shrinking.axes.trace import Call, Trace, Work, keep_tensors, operation


@operation("linear")
def _linear(trace: Trace, call: Call) -> tuple[Axis, ...]:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    axes, (out, into) = trace.axes(x), trace.axes(weight)
    join(axes[-1], into, f"{call.where} joins axes that are made otherwise")
    trace.contract(x, weight, into, call.where)
    if bias is not None:
        join(out, trace.axes(bias)[0], call.where)
        trace.use(bias, (0,), ())
    trace.use(weight, (0,), (1,))
    trace.work.append(Work((*axes, out)))
    return (*axes[:-1], out)


@operation("bilinear")
def _bilinear(trace: Trace, call: Call) -> tuple[Axis, ...]:
    one_input, other = trace.axes(call.args[0]), trace.axes(call.args[1])
    out, first, second = trace.axes(call.get(2, "weight"))
    join(one_input[-1], first, call.where)
    join(other[-1], second, call.where)
    if call.get(3, "bias") is not None:
        join(out, trace.axes(call.get(3, "bias"))[0], call.where)
    trace.work.append(Work((*one_input, second, out)))
    return (*one_input[:-1], out)


@operation("matmul", "rmatmul", "bmm", "mm", "mv", "dot", "inner")
def _matmul(trace: Trace, call: Call) -> tuple[Axis, ...]:
    a, b = call.args[0], call.get(1, "other", call.kwargs.get("mat2"))
    if call.name == "rmatmul":
        a, b = b, a
    return _product(trace, a, b, call)


@operation("addmm", "baddbmm", "addmv", "addbmm")
def _addmm(trace: Trace, call: Call) -> tuple[Axis, ...]:
    made = _product(trace, call.args[1], call.args[2], call)
    added = trace.axes(call.args[0])
    for back in range(1, len(added) + 1):
        if added[-back].size == made[-back].size:
            join(added[-back], made[-back], call.where)
    trace.use(call.args[0], range(len(added)), ())
    return made


def _product(trace: Trace, a: Tensor, b: Tensor, call: Call) -> tuple[Axis, ...]:
    left, right = trace.axes(a), trace.axes(b)
    into = right[-2] if len(right) > 1 else right[0]
    join(left[-1], into, f"{call.where} joins axes that are made otherwise")
    trace.contract(a, b, into, call.where)
    trace.use(b, (len(right) - 1,) if len(right) > 1 else (), (max(len(right) - 2, 0),))
    trace.use(a, (len(left) - 2,) if len(left) > 1 else (), (len(left) - 1,))
    tail = [*(left[-2:-1] if len(left) > 1 else ()), *(right[-1:] if len(right) > 1 else ())]
    batch_shape = call.made.shape[: call.made.ndim - len(tail)]
    batch: list[Axis] = []
    for back in range(1, len(batch_shape) + 1):
        size = batch_shape[-back]
        found = [x[-back - 2] for x in (left, right) if len(x) >= back + 2 and x[-back - 2].size == size]
        for other in found[1:]:
            join(found[0], other, call.where)
        batch.append(found[0] if found else Axis(size, call.where))
    made = (*reversed(batch), *tail)
    trace.work.append(Work((*made, into)))
    return made


@operation("einsum")
def _einsum(trace: Trace, call: Call) -> tuple[Axis, ...]:
    equation, tensors = call.args[0].replace(" ", ""), list(call.args[1:])
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = list(tensors[0])
    if "..." in equation or "->" not in equation:
        keep_tensors(trace, tensors, f"{call.where}: there is no rule for an einsum with '...' or without '->'")
        return tuple(Axis(size, call.where) for size in call.made.shape)
    inputs, output = equation.split("->")
    terms = list(zip(inputs.split(","), tensors, strict=True))
    by_letter = _lettered(trace, terms, call)
    for letters, tensor in terms:
        out = [i for i, letter in enumerate(letters) if letter in output]
        trace.use(tensor, out, [i for i, letter in enumerate(letters) if letter not in output])
    for letter in set(by_letter) - set(output):
        holders = [tensor for letters, tensor in terms if letter in letters]
        if len(holders) > 1:
            trace.contract(holders[0], holders[1], by_letter[letter], call.where)
        elif is_free(by_letter[letter]):
            keep(by_letter[letter], f"{call.where}: what a sum gives depends on the number of elements")
    trace.work.append(Work(tuple(by_letter.values())))
    return tuple(by_letter[letter] for letter in output)


def _lettered(trace: Trace, terms: Sequence[tuple[str, Tensor]], call: Call) -> dict[str, Axis]:
    """The axis of each letter of an equation."""
    found: dict[str, Axis] = {}
    for letters, tensor in terms:
        for letter, axis in zip(letters, trace.axes(tensor), strict=True):
            if letter in found and found[letter].size == axis.size:
                join(found[letter], axis, f"{call.where} joins axes that are made otherwise")
            elif letter not in found or found[letter].size == 1:
                found[letter] = axis
    return found


@operation("conv1d", "conv2d", "conv3d")
def _conv(trace: Trace, call: Call) -> tuple[Axis, ...]:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    axes, own = trace.axes(x), trace.axes(weight)
    nd = weight.ndim - 2
    channels = axes[-nd - 1]
    groups = call.get(6, "groups", 1)
    out = own[0]
    if groups == 1:
        join(channels, own[1], f"{call.where} joins axes that are made otherwise")
    else:
        _grouped(channels, out, own[1], groups, call)
    trace.use(weight, (0,), (1,))
    return _convolved(trace, call, axes, own, out, bias, nd)


@operation("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(trace: Trace, call: Call) -> tuple[Axis, ...]:
    x, weight, bias = call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    axes, own = trace.axes(x), trace.axes(weight)
    nd = weight.ndim - 2
    groups = call.get(6, "groups", 1)
    join(axes[-nd - 1], own[0], f"{call.where} joins axes that are made otherwise")
    out = own[1]
    if groups != 1:
        out = Axis(own[1].size * int(groups))
        _grouped(own[0], out, own[1], groups, call)
    else:
        trace.use(weight, (1,), (0,))
    return _convolved(trace, call, axes, own, out, bias, nd)


def _grouped(channels: Axis, out: Axis, per_group: Axis, groups: int, call: Call) -> None:
    """Channels in groups: `Dim` of groups that shrink with them, or a plain number of groups that get narrower."""
    reason = f"{call.where} groups axes otherwise"
    count = groups.axis if isinstance(groups, Dim) else Axis(groups, f"{call.where} has {groups} groups")
    of_inputs = channels.size // count.size == per_group.size  # those of a transposed convolution count its outputs
    other = Axis((out if of_inputs else channels).size // count.size)
    if is_free(count):
        for width in (per_group, other):
            keep(width, f"the width of each of {count.size} groups, whose number shrinks")
    join(channels, product([count, per_group if of_inputs else other]), reason)
    join(out, product([count, other if of_inputs else per_group]), reason)


def _convolved(
    trace: Trace, call: Call, axes: Sequence[Axis], own: Sequence[Axis], out: Axis, bias: Any, nd: int
) -> tuple[Axis, ...]:
    if bias is not None:
        join(out, trace.axes(bias)[0], call.where)
        trace.use(bias, (0,), ())
    for axis in (*own[2:], *axes[-nd:]):
        keep(axis, "a spatial axis")
    spatial = [Axis(size, "a spatial axis") for size in call.made.shape[-nd:]]
    trace.work.append(Work((*axes[: -nd - 1], *spatial, *own)))
    return (*axes[: -nd - 1], out, *spatial)


@operation("embedding")
def _embedding(trace: Trace, call: Call) -> tuple[Axis, ...]:
    index, weight = call.get(0, "input"), call.get(1, "weight")
    rows, width = trace.axes(weight)
    keep(rows, "the rows of an embedding")
    trace.use(weight, (1,), (0,))
    return (*trace.axes(index), width)


@operation("embedding_bag")
def _embedding_bag(trace: Trace, call: Call) -> Any:
    rows, width = trace.axes(call.get(1, "weight"))
    keep(rows, "the rows of an embedding")
    outputs = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)]
    first = (Axis(outputs[0].shape[0], "an axis of the batch"), width)
    return [first, *(tuple(Axis(size, call.where) for size in each.shape) for each in outputs[1:])]


@operation("batch_norm", "instance_norm", "group_norm")
def _norm_of_channels(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = trace.axes(call.args[0])
    for tensor in call.tensors[1:]:
        join(axes[1], trace.axes(tensor)[0], call.where)
        trace.use(tensor, (0,), ())
    return axes


@operation("layer_norm", "rms_norm")
def _layer_norm(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, shape = trace.axes(call.args[0]), call.get(1, "normalized_shape")
    for axis, size in zip(axes[-len(shape) :], shape, strict=True):
        trace.meet(axis, size, call)
    for tensor in call.tensors[1:]:
        for axis, other in zip(axes[-len(shape) :], trace.axes(tensor), strict=True):
            join(axis, other, call.where)
        trace.use(tensor, range(len(shape)), ())
    return axes


_POOLS = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool fractional_max_pool max_unpool"


@operation(*(f"{name}{n}d{more}" for name in _POOLS.split() for n in (1, 2, 3) for more in ("", "_with_indices")))
def _pooled(trace: Trace, call: Call) -> Any:
    digit = re.search(r"(\d)d", call.name)
    return _by_places(trace, call, int(digit[1]) if digit else call.args[0].ndim - 2)


@operation("interpolate", "upsample", "grid_sample", "local_response_norm")
def _resized(trace: Trace, call: Call) -> Any:
    return _by_places(trace, call, call.args[0].ndim - 2)


def _by_places(trace: Trace, call: Call, nd: int) -> Any:
    """Only the last `nd` axes, the spatial ones, may change."""
    axes = trace.axes(call.args[0])
    for axis in axes[-nd:]:
        keep(axis, "a spatial axis")
    outputs = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)]
    return [(*axes[:-nd], *(Axis(size, "a spatial axis") for size in each.shape[-nd:])) for each in outputs]


@operation("pad")
def _pad(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, made = trace.axes(call.args[0]), []
    for axis, size in zip(axes, call.made.shape, strict=True):
        if axis.size != size:
            keep(axis, f"{call.where} pads it")
        made.append(axis if axis.size == size else Axis(size, f"{call.where} pads it"))
    return tuple(made)


@operation("scaled_dot_product_attention")
def _attention(trace: Trace, call: Call) -> tuple[Axis, ...]:
    query, key, value = (call.get(i, name) for i, name in enumerate(("query", "key", "value")))
    q, k, v = map(trace.axes, (query, key, value))
    join(q[-1], k[-1], call.where)
    join(k[-2], v[-2], call.where)
    trace.contract(query, key, q[-1], call.where)
    for one_axis, other in zip(k[:-2], v[:-2], strict=True):
        join(one_axis, other, call.where)
    for axis, own in zip(reversed(q[:-2]), reversed(k[:-2]), strict=False):
        if axis.size == own.size:
            join(axis, own, call.where)
    trace.work += [Work((*q, k[-2])), Work((*q[:-1], *v[-2:]))]
    return (*q[:-1], v[-1])


_ATTENTION = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias"
)


@operation("multi_head_attention_forward")
def _multi_head(trace: Trace, call: Call) -> Any:
    given = {name: call.get(i, name) for i, name in enumerate(_ATTENTION.split())}
    q, k, v = (trace.axes(given[name]) for name in ("query", "key", "value"))
    heads = given["num_heads"]
    count = heads.axis if isinstance(heads, Dim) else Axis(int(heads), f"{call.where} has {heads} heads")
    size = Axis(q[-1].size // count.size, "the size of a head")
    width = product([count, size])
    join(q[-1], width, f"{call.where} divides its width into {count.size} heads of {size.size}")
    trace.meet(q[-1], given["embed_dim_to_check"], call)
    join(k[0], v[0], call.where)
    ways = [call.kwargs[f"{name}_proj_weight"] for name in "qkv" if given["in_proj_weight"] is None]
    if given["in_proj_weight"] is not None:
        rows, columns = trace.axes(given["in_proj_weight"])
        join(rows, total([width] * 3), call.where)
        for axis in (q[-1], k[-1], v[-1]):
            join(columns, axis, call.where)
    else:
        for weight, source in zip(ways, (q, k, v), strict=True):
            rows, columns = trace.axes(weight)
            join(rows, width, call.where)
            join(columns, source[-1], call.where)
    for name in ("bias_k", "bias_v"):
        if given[name] is not None:
            join(trace.axes(given[name])[-1], width, call.where)
    if given["in_proj_bias"] is not None:
        join(trace.axes(given["in_proj_bias"])[0], total([width] * 3), call.where)
    out, into = trace.axes(given["out_proj_weight"])
    join(into, width, call.where)
    join(out, q[-1], call.where)
    if given["out_proj_bias"] is not None:
        join(trace.axes(given["out_proj_bias"])[0], out, call.where)
    steps = prod(axis.size for axis in q[:-1])
    trace.work += [Work((out, into), 4 * steps), Work((*q, k[0]), 2)]
    weights = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)][1:]
    return [(*q[:-1], out), *(_of_heads(each, count, len(q) - 1, call) for each in weights)]


def _of_heads(weights: Tensor, count: Axis, batch_axes: int, call: Call) -> tuple[Axis, ...]:
    """The axes of attention weights, which are averaged over the heads or not."""
    averaged = bool(call.kwargs.get("average_attn_weights", True))
    made = [Axis(size, "an axis of tokens") for size in weights.shape]
    if not averaged:
        made[batch_axes - 1] = count
    return tuple(made)


@operation("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(trace: Trace, call: Call) -> Any:
    is_packed = isinstance(call.args[3], (tuple, list))
    # a packed sequence has a tensor of batch sizes more in front, and says nothing of batch_first behind
    x, hidden, flat, has_biases, layers, _, _, bidirectional = (call.args[0], *call.args[2 if is_packed else 1 :])[:8]
    hidden = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden]
    state = [trace.axes(each) for each in hidden]
    directions = 2 if bidirectional else 1
    gates = {"lstm": 4, "gru": 3}.get(call.name, 1)
    width, cell = state[0][-1], state[-1][-1]
    axes = trace.axes(x)
    projects = len(hidden) == 2 and hidden[0].shape[-1] != hidden[1].shape[-1]
    per_layer = len(flat) // (layers * directions)
    source = axes[-1]
    steps = prod(axis.size for axis in axes[:-1])
    for layer in range(layers):
        for direction in range(directions):
            begin = (layer * directions + direction) * per_layer
            own = [trace.axes(tensor) for tensor in flat[begin : begin + per_layer]]
            rows = total([cell] * gates)
            join(own[0][1], source, call.where)
            join(own[1][1], width, call.where)
            for each in own[: 4 if has_biases else 2]:
                join(each[0], rows, call.where)
            if projects:
                join(own[-1][0], width, call.where)
                join(own[-1][1], cell, call.where)
            trace.work += [Work((*own[0],), steps), Work((*own[1],), steps)]
        source = total([width] * directions)
    return [(*axes[:-1], source), *state]


@operation("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(trace: Trace, call: Call) -> Any:
    x, hidden, *weights = call.args
    hidden = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden]
    width = trace.axes(hidden[0])[-1]
    for each in hidden[1:]:
        join(trace.axes(each)[-1], width, call.where)
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(call.name, 1)
    rows = total([width] * gates)
    own = [trace.axes(tensor) for tensor in weights if isinstance(tensor, Tensor)]
    join(own[0][1], trace.axes(x)[-1], call.where)
    join(own[1][1], width, call.where)
    for each in own:
        join(each[0], rows, call.where)
    steps = prod(axis.size for axis in trace.axes(x)[:-1])
    trace.work += [Work((*own[0],), steps), Work((*own[1],), steps)]
    outputs = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)]
    return [(*trace.axes(x)[:-1], width)] * len(outputs)


@operation("cosine_similarity", "pairwise_distance", "cdist")
def _distance(trace: Trace, call: Call) -> tuple[Axis, ...]:
    for tensor in call.tensors:
        for axis in trace.axes(tensor):
            if is_free(axis):
                keep(axis, f"{call.where}: a distance depends on the number of elements")
    return tuple(Axis(size, call.where) for size in call.made.shape)
