"""The fans of a parameter: how many outputs and inputs it joins, by the class of the module that owns it.

Sizes of finite axes do not matter, since only ratios of fans are used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trials.shrinking.errors import ShrinkError

Which = int | tuple[int, ...] | None

Axes = tuple[Which, Which]
"""The axis or axes of a parameter that count its outputs, and those that count its inputs; None: it has none."""

OUT_IN: Axes = (0, 1)
IN_OUT: Axes = (1, 0)

_BY_CLASS: tuple[tuple[tuple[type[nn.Module], ...], Axes], ...] = (
    ((nn.Linear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d), OUT_IN),
    ((nn.Embedding, nn.EmbeddingBag), IN_OUT),
)
_GAINS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True)
class Fans:
    """Sizes that are proportional to a parameter's fans: its outputs, and the inputs of each output."""

    out: float
    into: float


def fans_of(
    owner: nn.Module, name: str, own: str, tensor: Tensor, given: Mapping[str, Axes], uses: Mapping[str, Axes]
) -> Fans | None:
    """Return the fans of a parameter; None: they are not known.

    Args:
        owner: the module that holds it.
        name: the parameter's name in the model.
        own: its name in `owner`.
        tensor: the parameter.
        given: patterns of names -> axes, which come first.
        uses: name -> axes, as the parameter's use shows them, for parameters in classes that are not known.

    Raises:
        ShrinkError: `given` names axes that it does not have.
    """
    axes = _given(name, tensor, given) or _known_axes(owner, own, tensor)
    if axes is not None:
        return _of_axes(tensor, axes)
    if isinstance(owner, _TRANSPOSED):
        return Fans(float(tensor.shape[1] * owner.groups), tensor.shape[0] / owner.groups)
    if name in uses:
        return _of_axes(tensor, uses[name])
    return Fans(float(tensor.numel()), 1.0) if tensor.ndim <= 1 else None


def _known_axes(owner: nn.Module, own: str, tensor: Tensor) -> Axes | None:
    """The axes of a parameter of a class of PyTorch's."""
    if isinstance(owner, _GAINS) or (tensor.ndim <= 1 and _is_pytorchs(owner)):
        return tuple(range(tensor.ndim)), None
    if isinstance(owner, nn.MultiheadAttention) and own in ("bias_k", "bias_v"):
        return 2, None
    if isinstance(owner, nn.Bilinear):
        return 0, (1, 2)
    for classes, known in _BY_CLASS:
        if isinstance(owner, classes):
            return known
    if is_conv1d(owner):
        return IN_OUT if tensor.ndim == 2 else (0, None)
    return None


def _is_pytorchs(owner: nn.Module) -> bool:
    """Whether its class is a layer of PyTorch's, or inherits from one."""
    classes = type(owner).__mro__
    return any(each.__module__.startswith("torch.nn.modules.") and each is not nn.Module for each in classes)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a Conv1D of Hugging Face's Transformers: a Linear with a transposed weight."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def refuse_owner(owner: nn.Module, path: str, shrinks: bool, target: nn.Module) -> None:
    """Refuse layers that no rule of width describes, if their tensors shrink.

    Raises:
        ShrinkError: it is such a layer.
    """
    if not shrinks:
        return
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None:
        raise ShrinkError(
            f"module '{path}': {type(owner).__name__} with max_norm={owner.max_norm} has a norm that no width scales; "
            f"allowed: max_norm=None, or keep=('{path}',) with trials.shrink"
        )
    if isinstance(owner, nn.Bilinear) and isinstance(target, nn.Bilinear):
        changed = [a != b for a, b in zip(owner.weight.shape[1:], target.weight.shape[1:], strict=True)]
        if all(changed):
            raise ShrinkError(
                f"module '{path}': both inputs of a Bilinear shrink, for which there is no rule; allowed: one, or "
                f"keep=('{path}',) with trials.shrink"
            )


def _given(name: str, tensor: Tensor, given: Mapping[str, Axes]) -> Axes | None:
    axes: Any = next((axes for pattern, axes in given.items() if fnmatchcase(name, pattern)), None)
    if axes is None:
        return None
    pair = isinstance(axes, (tuple, list)) and len(axes) == 2
    if not pair or not all(type(a) is int and 0 <= a < tensor.ndim for each in axes for a in _several(each)):
        raise ShrinkError(
            f"fans={{'{name}': {axes!r}}} for a parameter of shape {list(tensor.shape)}; allowed: the axis of its "
            "outputs and that of its inputs, such as (0, 1), where None is no axis"
        )
    return axes[0], axes[1]


def _of_axes(tensor: Tensor, axes: Axes) -> Fans:
    out, into = (float(prod(tensor.shape[axis] for axis in _several(which))) for which in axes)
    return Fans(out, into)


def _several(which: Which) -> tuple[int, ...]:
    if which is None:
        return ()
    return tuple(which) if isinstance(which, (tuple, list)) else (which,)
