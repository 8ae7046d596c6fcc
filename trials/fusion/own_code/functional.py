"""Tables for functional code between layers: it runs unchanged, with its axes moved by one, or under `vmap`."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trials.fusion.layers.shape import inner
from trials.fusion.own_code.drawing import RANDOM_NAMES

_UNARY = (
    *("relu", "relu6", "tanh", "sigmoid", "silu", "gelu", "elu", "selu", "mish", "softplus", "leaky_relu"),
    *("logsigmoid", "hardtanh", "hardsigmoid", "hardswish", "softsign", "exp", "log", "log1p", "expm1", "abs"),
    *("neg", "sqrt", "rsqrt", "square", "sin", "cos", "erf", "reciprocal", "sign", "clamp", "contiguous"),
    *("float", "double", "half", "bfloat16", "detach", "clone"),
)
_BINARY = ("add", "sub", "mul", "div", "truediv", "pow", "maximum", "minimum", "lt", "le", "gt", "ge", "eq", "ne")
_HOMES = (functional, torch, operator)

ELEMENTWISE: frozenset[Any] = frozenset(
    [getattr(home, name) for home in _HOMES for name in (*_UNARY, *_BINARY) if hasattr(home, name)]
    + [name for name in (*_UNARY, *_BINARY) if hasattr(Tensor, name)]
)
"""Functions, and names of methods, that map elements one by one, with broadcasting."""

RANDOM: frozenset[Any] = frozenset(
    [getattr(home, name) for home in _HOMES for name in RANDOM_NAMES if hasattr(home, name)]
    + [name for name in RANDOM_NAMES if hasattr(Tensor, name)]
)
"""Functions that draw random numbers."""

VIEWS = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "unsqueeze", "squeeze", "getitem"),
        *("chunk", "split", "narrow", "select", "t", "expand", "expand_as", "view_as", "unbind", "movedim"),
        *("swapaxes", "contiguous", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
        "feature_alpha_dropout",
    )
)
"""Names of functions and methods whose result shares memory with their input, or may do so."""

_NOOPS = ("contiguous", "float", "double", "half", "bfloat16", "detach")
NEW: frozenset[str] = frozenset(
    (
        *(name for name in (*_UNARY, *_BINARY, "and_", "or_", "xor", "mod", "floordiv") if name not in _NOOPS),
        *("matmul", "bmm", "mm", "addmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d", "embedding", "cat"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "stack", "softmax", "log_softmax", "where"),
        *("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "normalize", "sum", "mean", "var"),
        *("std", "norm", "cumsum", "masked_fill", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d"),
        *("avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "rand_like", "randn_like"),
        *("rand", "randn", "randint", "randint_like", "randperm", "bernoulli", "normal", "multinomial", "poisson"),
        *("scaled_dot_product_attention", "prelu", "repeat", "rsub", "zeros_like", "ones_like", "as_type"),
    )
)
"""Names of functions and methods whose result has memory of its own. Of others it is not known."""


def _reshape(x_K: Tensor, *shape: Any) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return x_K.reshape(x_K.shape[0], *sizes)


def _permute(x_K: Tensor, *dims: Any) -> Tensor:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return x_K.permute(0, *[d + 1 if d >= 0 else d + x_K.ndim for d in order])


def _size(x_K: Tensor, dim: int | None = None) -> Any:
    return x_K.shape[1:] if dim is None else x_K.shape[1:][dim]


def _flatten(x_K: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return x_K.flatten(inner(start_dim), inner(end_dim))


def _softmax(x_K: Tensor, dim: int) -> Tensor:
    return x_K.softmax(inner(dim))


def _log_softmax(x_K: Tensor, dim: int) -> Tensor:
    return x_K.log_softmax(inner(dim))


def _mean(x_K: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return x_K.mean(inner(dim), keepdim)


def _sum(x_K: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return x_K.sum(inner(dim), keepdim)


def _chunk(x_K: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return x_K.chunk(chunks, inner(dim))


def _split(x_K: Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    return x_K.split(split_size_or_sections, inner(dim))


def _getitem(x_K: Any, index: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    plain = all(type(each) in (int, slice, type(...), type(None)) for each in indices)
    return x_K[(slice(None), *indices)] if plain else NotImplemented


def _getattr(x_K: Tensor, name: str) -> Any:
    if name == "shape":
        return x_K.shape[1:]
    if name == "ndim":
        return x_K.ndim - 1
    return getattr(x_K, name) if name in ("dtype", "device") else NotImplemented


def as_type(x: Any, like: Any) -> Any:
    """Return `x`, the result of an augmented assignment to `like`, in the type that `like` keeps."""
    are_tensors = isinstance(x, Tensor) and isinstance(like, Tensor)
    return x.to(like.dtype) if are_tensors and x.dtype != like.dtype else x


MOVED: dict[Any, Callable[..., Any]] = {
    torch.flatten: _flatten,
    "flatten": _flatten,
    torch.reshape: _reshape,
    "reshape": _reshape,
    "view": _reshape,
    torch.permute: _permute,
    "permute": _permute,
    torch.transpose: lambda x_K, a, b: x_K.transpose(inner(a), inner(b)),
    "transpose": lambda x_K, a, b: x_K.transpose(inner(a), inner(b)),
    torch.unsqueeze: lambda x_K, dim: x_K.unsqueeze(inner(dim)),
    "unsqueeze": lambda x_K, dim: x_K.unsqueeze(inner(dim)),
    functional.softmax: _softmax,
    torch.softmax: _softmax,
    "softmax": _softmax,
    functional.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax,
    "log_softmax": _log_softmax,
    torch.mean: _mean,
    "mean": _mean,
    torch.sum: _sum,
    "sum": _sum,
    torch.chunk: _chunk,
    "chunk": _chunk,
    torch.split: _split,
    "split": _split,
    operator.getitem: _getitem,
    "size": _size,
    "dim": lambda x_K: x_K.ndim - 1,
    getattr: _getattr,
    as_type: as_type,
}
"""What a trial does on ``x...``, done on ``x_K...`` without the overhead of `vmap`. If an equivalent raises
`TypeError` or returns `NotImplemented`, `vmap` runs the call."""

JOINT: set[Any] = {as_type}
"""Those in `MOVED` whose second input may be each trial's own. It has a leading axis of K, or of 1."""


def aligned(values: list[Any], flags: list[bool]) -> list[Any] | None:
    """Align stacked `values`, so that broadcasting them equals broadcasting each trial's own values.

    Args:
        values: the arguments, tensors and others.
        flags: which of them have the leading axis K.

    Returns:
        The aligned values; None if that is impossible.
    """
    own = [v for v, flag in zip(values, flags, strict=True) if flag]
    if not all(isinstance(v, Tensor) for v in own):
        return None
    shared = [v for v, flag in zip(values, flags, strict=True) if not flag and isinstance(v, Tensor)]
    ndim, dtype = max(*(v.ndim for v in own), *(v.ndim + 1 for v in shared), 1), own[0].dtype
    # equal types, for a trial's scalar is a vector here, and vectors and scalars promote types differently
    if any(v.dtype != dtype for v in (*own, *shared)):
        return None
    return [
        v.reshape(len(v), *[1] * (ndim - v.ndim), *v.shape[1:]) if flag and v.ndim < ndim else v
        for v, flag in zip(values, flags, strict=True)
    ]


def cat(tensors: Any, flags: list[bool], dim: int) -> Tensor | None:
    """Concatenate along each trial's axis `dim`. None: some tensor is shared, or has other axes."""
    if not all(flags) or any(t.ndim != tensors[0].ndim for t in tensors):
        return None
    return torch.cat(list(tensors), inner(dim))
