"""What functions that treat all elements alike, and reductions, mean for axes."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from trials.shrinking.axes.axis import Axis, cut, is_free, join, keep, one
from trials.shrinking.axes.trace import ELEMENTWISE, Call, Trace, operation, sizes_as_axes

_OF_ONE = (
    "abs acos alpha_dropout angle asin atan bernoulli bfloat16 bitwise_not bool ceil celu clamp clamp_max clamp_min "
    "clone conj contiguous cos cosh cpu cuda data detach digamma double dropout dropout1d dropout2d dropout3d elu "
    "empty_like erf erfc erfinv exp exp2 expm1 feature_alpha_dropout feature_dropout fill float floor frac "
    "full_like gelu grad half hardshrink hardsigmoid hardswish hardtanh int isfinite isinf isnan leaky_relu lgamma "
    "log log10 log1p log2 logical_not logit logsigmoid long mish nan_to_num neg negative normal ones_like positive "
    "rand_like randn_like real reciprocal relu relu6 requires_grad round rrelu rsqrt rsub selu sgn sigmoid sign "
    "silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold to tril triu trunc "
    "type type_as uniform zero zeros_like"
)
_OF_SEVERAL = (
    "add addcdiv addcmul and atan2 bitwise_and bitwise_or bitwise_xor copy copysign div divide eq floor_divide "
    "floordiv fmax fmin fmod ge greater greater_equal gt heaviside hypot iadd imul isclose isub itruediv ldexp le "
    "lerp less less_equal logaddexp logical_and logical_or logical_xor lt masked_fill maximum min_ minimum mod mul "
    "multiply ne not_equal or polar pow radd rdiv remainder rfloordiv rmul rpow rsub rtruediv sub subtract "
    "true_divide truediv xlogy xor"
)


def together(trace: Trace, tensors: Sequence[Tensor], shape: Sequence[int], call: Call) -> tuple[Axis, ...]:
    """The axes of tensors that are broadcast to `shape`."""
    made = []
    for back in range(1, len(shape) + 1):
        size = shape[-back]
        found = [a[-back] for a in map(trace.axes, tensors) if len(a) >= back and a[-back].size == size]
        axis = found[0] if found else one() if size == 1 else Axis(size, call.where)
        for other in found[1:]:
            join(axis, other, f"{call.where} joins axes that are made otherwise")
        made.append(axis)
    return tuple(reversed(made))


@operation(*_OF_ONE.split(), *_OF_SEVERAL.split())
def _elementwise(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes = together(trace, call.tensors, call.made.shape, call)
    use_as_vectors(trace, call.tensors)
    return axes


def use_as_vectors(trace: Trace, tensors: Sequence[Tensor]) -> None:
    """Note parameters that meet activations unit by unit. If all are weights, a later use shows what they are."""
    known = [trace.known(tensor) for tensor in tensors]
    if not all(each.is_weight for each in known):
        for tensor, each in zip(tensors, known, strict=True):
            trace.use(tensor, [i for i, axis in enumerate(each.axes) if axis.size > 1], ())


@operation("where")
def _where(trace: Trace, call: Call) -> Any:
    if len(call.args) + len(call.kwargs) > 1:
        return _elementwise(trace, call)
    return [tuple(Axis(size, f"{call.where} picks elements") for size in each.shape) for each in call.made]


ELEMENTWISE.update(_OF_SEVERAL.split(), ["where", "_weight_norm"])


@operation("_weight_norm")
def _weight_norm(trace: Trace, call: Call) -> tuple[Axis, ...]:
    """Rows of length g in the direction of v. Those of a narrow v, as it begins, are as long as the target's."""
    (v, g), dim = call.args[:2], call.get(2, "dim", 0)
    axes = trace.axes(v)
    if dim == -1:
        for axis in axes:
            if is_free(axis):
                keep(axis, f"{call.where}: the norm of a whole weight depends on the number of elements")
    else:
        join(axes[dim], trace.axes(g)[dim], call.where)
    return axes


@operation("prelu")
def _prelu(trace: Trace, call: Call) -> tuple[Axis, ...]:
    x, weight = trace.axes(call.args[0]), call.get(1, "weight")
    if weight.numel() > 1:
        join(x[1], trace.axes(weight)[0], call.where)
    return x


@operation("glu")
def _glu(trace: Trace, call: Call) -> tuple[Axis, ...]:
    axes, dim = list(trace.axes(call.args[0])), call.get(1, "dim", -1)
    half = axes[dim].size // 2
    first, second = cut(axes[dim], [half, half], call.where)
    join(first, second, call.where)
    axes[dim] = first
    return tuple(axes)


_OVER = "softmax log_softmax softmin cumsum cumprod normalize logcumsumexp gumbel_softmax"


@operation(*_OVER.split())
def _over_an_axis(trace: Trace, call: Call) -> tuple[Axis, ...]:
    """Its values depend on how long the axis is."""
    axes = trace.axes(call.args[0])
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 and isinstance(call.args[1], int) else None)
    if call.name == "normalize":
        dim = call.get(2, "dim", 1)
    over = _dims(dim, len(axes))
    if call.name != "normalize" or not _is_length_of_weights(trace, call, over):
        for i in over:
            _keep_reduced(axes[i], call)
    return axes


@operation("mean", "var", "std", "var_mean", "std_mean", "nanmean")
def _mean(trace: Trace, call: Call) -> Any:
    return _reduced(trace, call, keeps=False)


_SUMS = (
    "sum amax amin max min argmax argmin norm vector_norm logsumexp prod any all median mode nansum count_nonzero "
    "cummax cummin sort topk argsort aminmax quantile"
)


@operation(*_SUMS.split())
def _sum(trace: Trace, call: Call) -> Any:
    """What it gives depends on how long the axes are over which it works."""
    if call.name in ("max", "min") and len(call.tensors) == 2:
        return _elementwise(trace, call)
    return _reduced(trace, call, keeps=True)


def _reduced(trace: Trace, call: Call, keeps: bool) -> Any:
    axes = trace.axes(call.args[0])
    dim = call.kwargs.get("dim", call.kwargs.get("axis"))
    if dim is None:
        position = 2 if call.name in ("norm", "vector_norm", "topk", "quantile") else 1
        dim = call.args[position] if len(call.args) > position and not isinstance(call.args[position], bool) else None
    over = set(_dims(dim, len(axes)))
    if keeps and not _is_length_of_weights(trace, call, over):
        for i in over:
            _keep_reduced(axes[i], call)
    outputs = [each for each in tree_leaves(call.made) if isinstance(each, Tensor)]
    found = []
    for output in outputs:
        if output.ndim == len(axes):
            own = [
                axis if i not in over or axis.size == output.shape[i] else Axis(output.shape[i], call.where)
                for i, axis in enumerate(axes)
            ]
        else:
            own = [axis for i, axis in enumerate(axes) if i not in over]
        found.append(tuple(own))
    return found


def _is_length_of_weights(trace: Trace, call: Call, over: Collection[int]) -> bool:
    """Whether it gives the lengths of a weight's rows, which the initial values of a surrogate keep."""
    if call.name not in ("norm", "vector_norm", "normalize") or not trace.known(call.args[0]).is_weight:
        return False
    power = call.kwargs.get("p", call.get(1, "ord", 2.0))
    return power in (2, "fro", None) and len(over) < call.args[0].ndim


def _keep_reduced(axis: Axis, call: Call) -> None:
    if is_free(axis):
        keep(axis, f"{call.where}: what {call.name} gives depends on the number of elements")


def _dims(dim: Any, ndim: int) -> list[int]:
    if dim is None:
        return list(range(ndim))
    return [each % ndim for each in ((dim,) if isinstance(dim, int) else dim)] if ndim else []


@operation("zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty")
def _new(trace: Trace, call: Call) -> tuple[Axis, ...]:
    given = call.args[1:] if call.name.startswith("new_") else call.args
    sizes = call.kwargs.get("size", given)
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    return sizes_as_axes(trace, sizes, call)


@operation("full", "new_full")
def _full(trace: Trace, call: Call) -> tuple[Axis, ...]:
    return sizes_as_axes(trace, call.get(1 if call.name == "new_full" else 0, "size"), call)


@operation("arange")
def _arange(trace: Trace, call: Call) -> tuple[Axis, ...]:
    sizes = [each for each in (*call.args, call.kwargs.get("end")) if isinstance(each, int)]
    is_length = len(sizes) == 1 and sizes[0] == len(call.made)
    return sizes_as_axes(trace, [sizes[0] if is_length else len(call.made)], call)
