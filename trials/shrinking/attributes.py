"""Integers in modules that are sizes: they are replaced by `Dim` for the trace, and set in the surrogate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import log
from typing import Any

from torch import nn

from trials.shrinking.axes.axis import Axis, new_size
from trials.shrinking.axes.trace import Trace
from trials.shrinking.errors import ShrinkError

_USED: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...]], ...] = (
    ((nn.LayerNorm, nn.RMSNorm), ("normalized_shape",)),
    ((nn.MultiheadAttention,), ("embed_dim", "num_heads")),
    ((nn.RNNBase,), ("hidden_size", "proj_size")),
    ((nn.RNNCellBase,), ("hidden_size",)),
    ((nn.Unflatten,), ("unflattened_size",)),
)
"""The attributes that a forward reads."""

_USED_BY_NAME: dict[tuple[str, str], tuple[str, ...]] = {
    ("transformers.pytorch_utils", "Conv1D"): ("nf", "nx"),
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Attention"): ("split_size",),
}
"""The same, of classes that need not be installed."""

_TOLD: tuple[tuple[tuple[type[nn.Module], ...], Callable[[Any], dict[str, int]]], ...] = (
    ((nn.Linear,), lambda m: {"out_features": m.weight.shape[0], "in_features": m.weight.shape[1]}),
    (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        lambda m: {"out_channels": m.weight.shape[0], "in_channels": m.weight.shape[1] * m.groups},
    ),
    (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        lambda m: {"in_channels": m.weight.shape[0], "out_channels": m.weight.shape[1] * m.groups},
    ),
    ((nn.Embedding, nn.EmbeddingBag), lambda m: {"embedding_dim": m.weight.shape[1]}),
    ((nn.RNNBase,), lambda m: {"input_size": m.weight_ih_l0.shape[1]}),
    ((nn.RNNCellBase,), lambda m: {"input_size": m.weight_ih.shape[1]}),
    ((nn.MultiheadAttention,), lambda m: {"kdim": _columns(m, "k"), "vdim": _columns(m, "v")}),
    (
        (nn.Bilinear,),
        lambda m: dict(zip(("out_features", "in1_features", "in2_features"), m.weight.shape, strict=True)),
    ),
)
"""Those that give the shapes of tensors."""

_TELLING: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...]], ...] = (
    ((nn.Linear,), ("out_features", "in_features")),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), ("out_channels", "in_channels")),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ("in_channels", "out_channels")),
    ((nn.Embedding, nn.EmbeddingBag), ("", "embedding_dim")),
)
"""The same, by the axes of their weights; empty: not told."""

_OF_CHANNELS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True)
class SizeAttribute:
    """An attribute of a module that holds a size, or a tuple of sizes.

    Attributes:
        path: the module's.
        name: the attribute's; behind a dot, that of an object that the module holds.
        axes: the sizes; None: a number such as -1, which is none.
        is_tuple: whether there are several.
    """

    path: str
    name: str
    axes: tuple[Axis | int, ...]
    is_tuple: bool

    def new(self, by: int) -> Any:
        """Its value in the surrogate."""
        made = tuple(axis if isinstance(axis, int) else new_size(axis, by) for axis in self.axes)
        return made if self.is_tuple else made[0]


def substitute(model: nn.Module, trace: Trace, divide: Sequence[str], by: int) -> list[SizeAttribute]:
    """Replace the sizes in modules of `model` by `Dim`, and return where they are.

    Args:
        model: a copy, which only the trace uses.
        trace: that will run it.
        divide: names of integer attributes of the user's modules that shrink.
        by: the factor.

    Raises:
        ShrinkError: a name in `divide` is no integer attribute of any module.
    """
    attributes = [
        _replaced(trace, module, path, name)
        for path, module in model.named_modules()
        for name in _used(module)
        if getattr(module, name, None)
    ]
    attributes += list(_groups(model, trace, by))
    for name in divide:
        found = [(path, m) for path, m in model.named_modules() if _is_whole(_reached(m, name))]
        if not found:
            raise ShrinkError(
                f"divide={name!r}: no module has such a whole number; allowed: names of attributes of the model's "
                "modules, such as ('n_head',), or of objects that they hold, such as ('config.n_head',)"
            )
        seen: dict[int, SizeAttribute] = {}
        for path, module in found:
            holder = _holder(module, name)
            if id(holder) not in seen:  # several modules may hold one configuration
                seen[id(holder)] = _replaced(trace, module, path, name)
        attributes += seen.values()
    return attributes


def tell_sizes(model: nn.Module, trace: Trace) -> None:
    """Let the sizes of weights that layers keep know their axes, for forwards that read them.

    Args:
        model: a copy, which only the trace uses.
        trace: to which its parameters have been introduced.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        for classes, names in _TELLING:
            if weight is not None and isinstance(module, classes) and getattr(module, "groups", 1) == 1:
                vars(module).update(
                    {n: trace.dim(axis) for n, axis in zip(names, trace.axes(weight), strict=False) if n}
                )


def set_sizes(surrogate: nn.Module, attributes: Sequence[SizeAttribute], by: int) -> None:
    """Set the sizes in the modules of a surrogate whose tensors are sliced already."""
    for attribute in attributes:
        module = surrogate.get_submodule(attribute.path)
        setattr(_holder(module, attribute.name), attribute.name.rpartition(".")[2], attribute.new(by))
    for module in surrogate.modules():
        for classes, told in _TOLD:
            if isinstance(module, classes):
                vars(module).update(told(module))
        if isinstance(module, nn.GroupNorm):
            channels = module.num_channels if module.weight is None else len(module.weight)
            module.num_groups = _groups_of(channels, module.num_channels / module.num_groups)
        if isinstance(module, _OF_CHANNELS):
            known = next((t for t in (*module._parameters.values(), *module._buffers.values()) if _is_vector(t)), None)
            if known is not None:
                vars(module)["num_channels" if isinstance(module, nn.GroupNorm) else "num_features"] = len(known)
        _set_heads(module)


def kept_modules(model: nn.Module, keep: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names of the parameters that patterns of modules or parameters in `keep` name, and the pattern.

    Raises:
        ShrinkError: a pattern names nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in keep:
        found = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")]
        if not found:
            raise ShrinkError(f"keep={pattern!r}: no parameter or module has such a name; allowed: as in {names[:3]}")
        for name in found:
            yield name, pattern


def _groups_of(channels: int, size: float) -> int:
    """How many groups of channels are normalized: as those of a head, the channels of a group stay, or nearly."""
    divisors = [each for each in range(1, channels + 1) if channels % each == 0]
    return min(divisors, key=lambda groups: abs(log(channels / groups / size)))


def _set_heads(module: nn.Module) -> None:
    """What attention derives from its sizes when it is built."""
    if isinstance(module, nn.MultiheadAttention):
        module.head_dim = module.embed_dim // module.num_heads
    elif _kind(module)[1] == "GPT2Attention" and _kind(module) in _USED_BY_NAME:
        size: Any = module.split_size
        vars(module).update(embed_dim=size, num_heads=size // module.head_dim)


def _used(module: nn.Module) -> tuple[str, ...]:
    """The names of the attributes that a module's forward reads."""
    for classes, names in _USED:
        if isinstance(module, classes):
            return names
    return _USED_BY_NAME.get(_kind(module), ())


def _kind(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _groups(model: nn.Module, trace: Trace, by: int) -> Iterator[SizeAttribute]:
    """Groups of convolutions: those of one channel shrink, others get narrower if they can, or else fewer."""
    for path, module in model.named_modules():
        if isinstance(module, _CONVOLUTIONS) and module.groups > 1:
            widths = (module.in_channels // module.groups, module.out_channels // module.groups)
            if widths[0] == 1 or any(width % by for width in widths):
                yield _replaced(trace, module, path, "groups")


def _replaced(trace: Trace, module: nn.Module, path: str, name: str) -> SizeAttribute:
    value, holder = _reached(module, name), _holder(module, name)
    several = isinstance(value, (tuple, list))
    axes = tuple(Axis(v) if _is_whole(v) and v > 0 else v for v in (value if several else (value,)))
    made = tuple(trace.dim(axis) if isinstance(axis, Axis) else axis for axis in axes)
    setattr(holder, name.rpartition(".")[2], made if several else made[0])
    return SizeAttribute(path, name, axes, several)


def _holder(module: nn.Module, name: str) -> Any:
    holder: Any = module
    for part in name.split(".")[:-1]:
        holder = getattr(holder, part, None)
    return holder


def _reached(module: nn.Module, name: str) -> Any:
    return getattr(_holder(module, name), name.rpartition(".")[2], None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_vector(tensor: Any) -> bool:
    return tensor is not None and tensor.ndim == 1


def _columns(module: nn.MultiheadAttention, which: str) -> int:
    weight = module.in_proj_weight if module._qkv_same_embed_dim else getattr(module, f"{which}_proj_weight")
    return int(weight.shape[1])
