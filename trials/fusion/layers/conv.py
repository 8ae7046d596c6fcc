"""Convolutions, plain and transposed.

Shapes: K trials, B examples, I input channels, O output channels.
"""

import abc
import copy
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.fusion.autotune import Turns, choose
from trials.fusion.compared.reads import code_of, names_in
from trials.fusion.errors import RefusedError
from trials.fusion.layers.memory_order import Order, as_ordered, kept_order, order_of, reordered
from trials.fusion.layers.per_example import fold
from trials.fusion.own_code.drawing import DRAWING
from trials.fusion.registry import FuseError, JointLayer, Layer, label, rule
from trials.fusion.rows import Rows
from trials.fusion.shared_base import only

Call = Callable[..., Tensor]
"""One trial's convolution, of x, weight, bias, and the number of groups by name."""

_PLAIN: dict[type[nn.Module], tuple[int, Call]] = {
    nn.Conv1d: (1, functional.conv1d),
    nn.Conv2d: (2, functional.conv2d),
    nn.Conv3d: (3, functional.conv3d),
}
_TRANSPOSED: dict[type[nn.Module], tuple[int, Call]] = {
    nn.ConvTranspose1d: (1, functional.conv_transpose1d),
    nn.ConvTranspose2d: (2, functional.conv_transpose2d),
    nn.ConvTranspose3d: (3, functional.conv_transpose3d),
}


class _Convolution(Layer):
    """Convolution of K trials, by whichever way proves fastest.

    Trials that share the input are one convolution with K·O output channels; others are one with K groups. A loop over
    the trials may be faster than either. For kernels of one pixel, a batched product may be faster than K groups.
    """

    weight_K: Tensor
    bias_KO: Tensor | None

    def __init__(self, module: nn.Conv2d | nn.ConvTranspose2d, path: str, axes: int) -> None:
        """`axes`: how many a channel has."""
        super().__init__(module, path)
        self.axes, self.groups, self.out = axes, module.groups, module.out_channels
        self.shared: dict[str, Callable[..., Tensor]] = {"wide": self._wide, "looped": self._looped_shared}
        self.own: dict[str, Callable[..., Tensor]] = {"grouped": self._grouped, "looped": self._looped}
        self.weight_order = kept_order(module.weight)
        self._orders: dict[Hashable, Order] = {}

    def bind(self, rows: Rows) -> None:
        """See `Layer.bind`."""
        self.turns = Turns(rows.again, rows.settle)
        self.weight_K = rows.require(self.path, "weight")
        self.bias_KO = rows.get(self.path, "bias")

    def compute(self, x: Tensor, per_trial: bool, call: Call, situation: Hashable) -> tuple[Tensor, bool]:
        """``x_KBI...`` or ``x_BI...`` (or a single example) to ``y_KBO...``; `situation` distinguishes calls.

        If neither input nor weights have the axis K, the output has none.
        """
        ndim = x.ndim - per_trial
        if ndim == self.axes + 1:
            y, own = self.compute(x.unsqueeze(int(per_trial)), per_trial, call, situation)
            return y.squeeze(int(own)), own
        if ndim != self.axes + 2:
            shape = list(x.shape[1:] if per_trial else x.shape)
            raise FuseError(f"module '{self.label}': input of shape {shape}; allowed: {self.axes} axes and channels")
        if len(self.weight_K) == 1:
            return self._alone(x.squeeze(0) if per_trial else x, call).unsqueeze(0), True
        order = self._order(x, per_trial, call, situation)
        if (weight := only(self.weight_K)) is not None:
            y, own = self._by_one_kernel(x, per_trial, weight, call)
            return (as_ordered(y, order) if own else as_ordered(y[None], order)[0]), own
        ways, inputs = self.own if per_trial else self.shared, (x, self.weight_K, self.bias_KO, call)
        return as_ordered(ways[choose(situation, ways, *inputs, turns=self.turns)](*inputs), order), True

    def _alone(self, x: Tensor, call: Call) -> Tensor:
        """What the first trial alone gives for its input ``x_BI...``."""
        weight, bias = self.weight_K[0], None if self.bias_KO is None else self.bias_KO[0]
        return call(x, reordered(weight, self.weight_order), bias, groups=self.groups)

    def _order(self, x: Tensor, per_trial: bool, call: Call, situation: Hashable) -> Order:
        """The order in memory of what a trial alone gives: that of the input or the weight, as the device decides."""
        one = x[0] if per_trial else x
        if self.weight_order is None and order_of(one) is None:
            return None
        key = situation, one.shape, one.stride(), one.dtype, one.device
        if key not in self._orders:
            with torch.no_grad():
                self._orders[key] = order_of(self._alone(one, call))
        return self._orders[key]

    def _by_one_kernel(self, x: Tensor, per_trial: bool, weight: Tensor, call: Call) -> tuple[Tensor, bool]:
        """All trials' images by the frozen kernels that they have in common. The bias may be each trial's own."""
        bias = only(self.bias_KO)
        one = partial(call, weight=weight, bias=bias, groups=self.groups)
        y = fold(x, self.axes + 2, one) if per_trial else one(x)
        if self.bias_KO is None or bias is not None:
            return y, per_trial
        return y + self.bias_KO.view(len(self.bias_KO), 1, self.out, *[1] * self.axes).to(y.dtype), True

    @abc.abstractmethod
    def widened(self, weight_K: Tensor) -> Tensor:
        """The weight of one convolution with K·O output channels; those of a group stand side by side."""

    def _wide(self, x: Tensor, weight_K: Tensor, bias_KO: Tensor | None, call: Call) -> Tensor:
        size, groups = len(weight_K), self.groups
        bias = None if bias_KO is None else bias_KO.view(size, groups, -1).transpose(0, 1).flatten()
        y = call(x, self.widened(weight_K), bias, groups=groups)
        if groups == 1:
            return y.unflatten(1, (size, self.out)).transpose(0, 1)
        return y.unflatten(1, (groups, size, self.out // groups)).transpose(1, 2).flatten(2, 3).transpose(0, 1)

    def _looped_shared(self, x: Tensor, weight_K: Tensor, bias_KO: Tensor | None, call: Call) -> Tensor:
        return self._looped(x.expand(len(weight_K), *x.shape), weight_K, bias_KO, call)

    def _grouped(self, x: Tensor, weight_K: Tensor, bias_KO: Tensor | None, call: Call) -> Tensor:
        size = len(weight_K)
        bias = None if bias_KO is None else bias_KO.flatten()
        y = call(x.transpose(0, 1).flatten(1, 2), weight_K.flatten(0, 1), bias, groups=size * self.groups)
        return y.unflatten(1, (size, self.out)).transpose(0, 1)

    def _looped(self, x: Tensor, weight_K: Tensor, bias_KO: Tensor | None, call: Call) -> Tensor:
        weights = weight_K.unbind(0)
        biases = [None] * len(weights) if bias_KO is None else bias_KO.unbind(0)
        trials = zip(x.unbind(0), weights, biases, strict=True)
        return torch.stack([call(x_B, weight, bias, groups=self.groups) for x_B, weight, bias in trials])


@rule(*_PLAIN)
class FusedConv(_Convolution):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` of K trials."""

    def __init__(self, module: nn.Conv2d, path: str) -> None:
        """See `Layer`."""
        axes, function = _PLAIN[type(module)]
        super().__init__(module, path, axes)
        padding: Any = module.padding
        self.pad: Callable[[Tensor], Tensor] | None = None
        if module.padding_mode != "zeros":
            sides = list(module._reversed_padding_repeated_twice)
            self.pad = partial(functional.pad, pad=sides, mode=module.padding_mode)
            padding = 0
        self.call = partial(function, stride=module.stride, padding=padding, dilation=module.dilation)
        self.situation = (function.__name__, module.stride, padding, module.dilation, module.groups)
        # "valid" is no padding, and so is "same" where each pixel is alone
        unpadded = isinstance(padding, str) or not any(padding if isinstance(padding, tuple) else (padding,))
        if unpadded and module.groups == 1 and set(module.kernel_size) == set(module.stride) == {1}:
            self.own["product"] = self._product

    def run(self, x: Tensor, per_trial: bool, training: bool) -> tuple[Tensor, bool]:
        """``x_KBI...`` or ``x_BI...`` (or a single example) to ``y_KBO...``."""
        if self.pad is not None:
            x = fold(x, self.axes + 2, self.pad) if per_trial else self.pad(x)
        return self.compute(x, per_trial, self.call, self.situation)

    def widened(self, weight_K: Tensor) -> Tensor:
        """See `_Convolution`."""
        return weight_K.unflatten(1, (self.groups, -1)).transpose(0, 1).flatten(0, 2)

    def _product(self, x: Tensor, weight_K: Tensor, bias_KO: Tensor | None, call: Call) -> Tensor:
        x_KIN = x.transpose(1, 2).flatten(2)
        weight_KOI = weight_K.flatten(2)
        y_KON = (
            torch.bmm(weight_KOI, x_KIN) if bias_KO is None else torch.baddbmm(bias_KO.unsqueeze(2), weight_KOI, x_KIN)
        )
        # in the memory order of the trial alone, in which a dropout that follows draws
        return y_KON.unflatten(2, (x.shape[1], *x.shape[3:])).transpose(1, 2).contiguous()


@rule(*_TRANSPOSED)
class FusedConvTranspose(_Convolution, JointLayer):
    """`nn.ConvTranspose1d`, `nn.ConvTranspose2d`, `nn.ConvTranspose3d` of K trials."""

    def __init__(self, module: nn.ConvTranspose2d, path: str) -> None:
        """See `Layer`."""
        axes, function = _TRANSPOSED[type(module)]
        super().__init__(module, path, axes)
        self.module = copy.copy(module)
        self.module._parameters = {}  # only its sizes are needed
        self.call = partial(function, stride=module.stride, padding=module.padding, dilation=module.dilation)
        self.situation = (function.__name__, module.stride, module.padding, module.dilation, module.groups)

    def run_joint(self, values: Sequence[Any], per_trial: Sequence[bool], training: bool) -> tuple[Tensor, bool]:
        """The input and, if given, the output's size."""
        (x, output_size), own, module = values, per_trial[0], self.module
        sizes: Any = (module.stride, module.padding, module.kernel_size, self.axes, module.dilation)
        added = tuple(module._output_padding(x[0] if own else x, output_size, *sizes))
        return self.compute(x, own, partial(self.call, output_padding=added), (*self.situation, added))

    def widened(self, weight_K: Tensor) -> Tensor:
        """See `_Convolution`."""
        return weight_K.transpose(0, 1).flatten(1, 2)


def as_alone(module: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a module: of a convolution, on its weight in the order in memory that it has now."""
    order = kept_order(module.weight) if type(module) in (*_PLAIN, *_TRANSPOSED) else None  # type: ignore[arg-type]
    if order is None:
        return module.forward
    return partial(_on_reordered, module, order)


def _on_reordered(module: nn.Module, order: Order, *args: Any, **kwargs: Any) -> Tensor:
    """Call `module`, whose weight is a row of all trials', which lie as they are numbered."""
    table: dict[str, Any] = module._parameters
    given = table["weight"]
    table["weight"] = reordered(given, order)
    try:
        found: Tensor = type(module).forward(module, *args, **kwargs)
        return found
    finally:
        table["weight"] = given


def refuse_own_orders(model: nn.Module) -> None:
    """Refuse weights in ``channels_last`` that the model's own code reads, where the order in memory matters.

    Raises:
        RefusedError: there are such, and layers or calls that draw a number for each element.
    """
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            is_own = type(module) not in (*_PLAIN, *_TRANSPOSED)
            if is_own and kept_order(tensor) is not None and draws(model):
                raise RefusedError(
                    f"parameter '{name}' of module '{label(module, path)}' is in channels_last order, which changes "
                    "what the model's dropout draws, if its own code convolves by it; allowed: the layers of torch.nn "
                    "for convolutions, or contiguous parameters"
                )


def draws(model: nn.Module) -> bool:
    """Whether the model has layers, or its own code names functions, that draw a number for each element."""
    layers = any(
        (isinstance(m, (nn.Dropout, nn.AlphaDropout)) and m.p) or isinstance(m, nn.RReLU) for m in model.modules()
    )
    return layers or any(
        name in DRAWING or getattr(variables.get(name), "__name__", "") in DRAWING
        for code, variables in code_of(model).items()
        for name in names_in(code)
    )
