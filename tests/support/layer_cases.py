"""A grid of layers with their inputs: name -> the shape of a batch, and what makes the layer of trial n."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.slow_cases import others_slow

VECTORS = (7, 6)
SIGNALS = (5, 4, 8)
IMAGES = (3, 4, 6, 6)
VOLUMES = (2, 4, 4, 4, 4)
SHAPES = (VECTORS, SIGNALS, IMAGES, VOLUMES)
"""By the number of axes that a channel has."""

Case = tuple[tuple[int, ...], Callable[[int], nn.Module]]

ELEMENTWISE = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.SELU(), nn.CELU(0.5), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.Tanh(), nn.Sigmoid(), nn.LogSigmoid(), nn.Softplus(2.0, 10),
    nn.Softsign(), nn.Hardtanh(-0.5, 0.7), nn.Hardsigmoid(), nn.Hardswish(), nn.Hardshrink(0.3), nn.Softshrink(0.2),
    nn.Tanhshrink(), nn.Threshold(0.1, 0.5), nn.Softmax(dim=-1), nn.Softmax(dim=1), nn.Softmax(dim=0),
    nn.LogSoftmax(dim=-1), nn.LogSoftmax(dim=1), nn.Softmin(dim=1), nn.GLU(), nn.GLU(dim=1), nn.Identity(),
    nn.Softmax2d(), nn.RReLU(),
]  # fmt: skip

CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"kernel_size": 1},
    {"kernel_size": 1, "bias": False, "padding": "same"},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 2, "stride": 2},
    {"stride": 2, "padding": 1, "bias": False},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"out_channels": 6, "groups": 2, "padding": 1},
    {"out_channels": 8, "groups": 4, "bias": False},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate", "stride": 2},
    {"kernel_size": 2, "padding": "same", "padding_mode": "circular"},
]

TRANSPOSED: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1, "bias": False},
    {"stride": 3, "dilation": 2, "output_padding": 1},
    {"out_channels": 6, "groups": 2, "padding": 1},
    {"out_channels": 8, "groups": 4, "kernel_size": 2},
]

POOLS: dict[str, Callable[[int], nn.Module]] = {
    "MaxPool": lambda axes: getattr(nn, f"MaxPool{axes}d")(3, stride=1, padding=1, dilation=1, ceil_mode=True),
    "MaxPool plain": lambda axes: getattr(nn, f"MaxPool{axes}d")(2),
    "AvgPool": lambda axes: getattr(nn, f"AvgPool{axes}d")(2, stride=2, padding=1, count_include_pad=False),
    "LPPool": lambda axes: getattr(nn, f"LPPool{axes}d")(2, 2, ceil_mode=True),
    "AdaptiveAvgPool": lambda axes: getattr(nn, f"AdaptiveAvgPool{axes}d")(3),
    "AdaptiveMaxPool": lambda axes: getattr(nn, f"AdaptiveMaxPool{axes}d")(2),
    "ConstantPad": lambda axes: getattr(nn, f"ConstantPad{axes}d")(1, 0.5),
    "ZeroPad": lambda axes: getattr(nn, f"ZeroPad{axes}d")((1, 2) * axes),
    "ReflectionPad": lambda axes: getattr(nn, f"ReflectionPad{axes}d")(1),
    "ReplicationPad": lambda axes: getattr(nn, f"ReplicationPad{axes}d")((0, 2) * axes),
    "CircularPad": lambda axes: getattr(nn, f"CircularPad{axes}d")(1),
    "LocalResponseNorm": lambda axes: nn.LocalResponseNorm(3, alpha=0.5),
    "Upsample": lambda axes: nn.Upsample(scale_factor=2),
    "Upsample smooth": lambda axes: nn.Upsample(
        size=(5,) * axes, mode=("linear", "bilinear", "trilinear")[axes - 1], align_corners=True
    ),
    "Dropout of channels": lambda axes: (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)[axes - 1](0.3),
}
"""Layers for any number of axes; all but the first few lines work on single examples too."""

BATCH_ONLY = ("Upsample", "Upsample smooth", "LocalResponseNorm")


def _norms(axes: int) -> Iterator[tuple[str, Case]]:
    """Batch and instance norms; trials have their own eps and momentum where a name says so."""
    shape = SHAPES[axes]
    for kind in ("BatchNorm", "InstanceNorm") if axes else ("BatchNorm",):
        norm = getattr(nn, f"{kind}{max(axes, 1)}d")
        options: dict[str, Callable[[int], dict[str, Any]]] = {
            "": lambda n: {},
            "affine, statistics": lambda n: {"affine": True, "track_running_stats": True, "momentum": 0.3},
            "affine": lambda n: {"affine": True, "track_running_stats": False},
            "statistics": lambda n: {"affine": False, "track_running_stats": True},
            "own eps": lambda n: {"eps": 0.1 * (n + 1), "affine": True, "track_running_stats": False},
            "own eps, statistics": lambda n: {"eps": 0.1 * (n + 1), "track_running_stats": True},
            "own momentum": lambda n: {"momentum": 0.1 * n, "track_running_stats": True},
        }
        if kind == "BatchNorm":
            options["cumulative"] = lambda n: {"momentum": None}
        for name, make in options.items():
            yield f"{kind} {axes}d norm, {name}", (shape, lambda n, norm=norm, make=make: norm(shape[1], **make(n)))


def _grid() -> Iterator[tuple[str, Case]]:
    for axes in (1, 2, 3):
        shape = SHAPES[axes]
        for kind, table in (("Conv", CONVOLUTIONS), ("ConvTranspose", TRANSPOSED)):
            layer = getattr(nn, f"{kind}{axes}d")
            for given in table if axes < 3 else table[::3]:
                options = {"in_channels": 4, "out_channels": 3, "kernel_size": 3, **given}
                yield f"{kind}{axes}d {given}", (shape, lambda n, layer=layer, o=options: layer(**o))
            yield f"{kind}{axes}d on one example", (shape[1:], lambda n, layer=layer: layer(4, 3, 2))
        for name, pool in POOLS.items():
            yield f"{name} {axes}d", (shape, lambda n, axes=axes, pool=pool: pool(axes))
            if axes < 3 and name not in BATCH_ONLY:
                yield f"{name} {axes}d on one example", (shape[1:], lambda n, axes=axes, pool=pool: pool(axes))
        yield f"InstanceNorm{axes}d on one example", (
            shape[1:], lambda n, axes=axes: getattr(nn, f"InstanceNorm{axes}d")(4, affine=True)
        )  # fmt: skip
    for axes in range(4):
        yield from _norms(axes)
    for layer in ELEMENTWISE:
        yield repr(layer), (SIGNALS, lambda n, layer=layer: deepcopy(layer))


LAYERS: dict[str, Case] = {
    **dict(_grid()),
    "linear": (VECTORS, lambda n: nn.Linear(6, 5)),
    "linear without bias": (VECTORS, lambda n: nn.Linear(6, 5, bias=False)),
    "linear on signals": (SIGNALS, lambda n: nn.Linear(8, 3)),
    "linear on images": (IMAGES, lambda n: nn.Linear(6, 3, bias=False)),
    "linear on one example": ((6,), lambda n: nn.Linear(6, 5)),
    "prelu": (VECTORS, lambda n: nn.PReLU()),
    "prelu per channel": (IMAGES, lambda n: nn.PReLU(4)),
    "prelu per feature": (VECTORS, lambda n: nn.PReLU(6)),
    "rrelu with own bounds": (IMAGES, lambda n: nn.RReLU(0.1 * n, 0.3 + 0.2 * n)),
    "leaky relu with own slope": (VECTORS, lambda n: nn.LeakyReLU(0.1 * n)),
    "elu with own alpha": (VECTORS, lambda n: nn.ELU(0.5 + n)),
    "celu with own alpha": (VECTORS, lambda n: nn.CELU(0.5 + n)),
    "softplus with own numbers": (VECTORS, lambda n: nn.Softplus(1.0 + n, 0.5 * n)),
    "hardtanh with own bounds": (VECTORS, lambda n: nn.Hardtanh(-0.2 * n, 0.1 + 0.3 * n)),
    "hardshrink with own bound": (VECTORS, lambda n: nn.Hardshrink(0.2 * n)),
    "softshrink with own bound": (VECTORS, lambda n: nn.Softshrink(0.2 * n)),
    "threshold with own numbers": (IMAGES, lambda n: nn.Threshold(0.2 * n, 0.1 - n)),
    "softmax along a guessed axis": (SIGNALS, lambda n: nn.Softmax()),
    "log-softmax along a guessed axis": (VECTORS, lambda n: nn.LogSoftmax()),
    "layer norm": (VECTORS, lambda n: nn.LayerNorm(6)),
    "layer norm over two axes": (SIGNALS, lambda n: nn.LayerNorm((4, 8))),
    "layer norm without affine": (VECTORS, lambda n: nn.LayerNorm(6, elementwise_affine=False)),
    "layer norm without bias": (VECTORS, lambda n: nn.LayerNorm(6, bias=False)),
    "layer norm with own eps": (SIGNALS, lambda n: nn.LayerNorm(8, eps=0.1 * (n + 1))),
    "rms norm": (VECTORS, lambda n: nn.RMSNorm(6)),
    "rms norm over two axes": (SIGNALS, lambda n: nn.RMSNorm((4, 8), eps=0.1)),
    "rms norm without affine": (SIGNALS, lambda n: nn.RMSNorm(8, elementwise_affine=False)),
    "rms norm with own eps": (SIGNALS, lambda n: nn.RMSNorm(8, eps=0.1 * (n + 1))),
    "group norm": (IMAGES, lambda n: nn.GroupNorm(2, 4)),
    "group norm on vectors": (VECTORS, lambda n: nn.GroupNorm(3, 6)),
    "group norm without affine": (SIGNALS, lambda n: nn.GroupNorm(1, 4, affine=False)),
    "group norm with own eps": (IMAGES, lambda n: nn.GroupNorm(2, 4, eps=0.1 * (n + 1))),
    "dropout": (VECTORS, lambda n: nn.Dropout(0.2 * n)),
    "dropout of everything": (VECTORS, lambda n: nn.Dropout(0.5 * n)),
    "dropout 1d": (SIGNALS, lambda n: nn.Dropout1d(0.2 + 0.1 * n)),
    "dropout 2d": (IMAGES, lambda n: nn.Dropout2d(0.2 + 0.1 * n)),
    "dropout 3d": (VOLUMES, lambda n: nn.Dropout3d(0.2 + 0.1 * n)),
    "alpha dropout": (VECTORS, lambda n: nn.AlphaDropout(0.2 * n)),
    "alpha dropout of everything": (VECTORS, lambda n: nn.AlphaDropout(0.5 * n)),
    "alpha dropout of channels": (IMAGES, lambda n: nn.FeatureAlphaDropout(0.2 + 0.1 * n)),
    "conv with other sides": (IMAGES, lambda n: nn.Conv2d(4, 3, (3, 1), padding=(1, 0), dilation=(1, 2))),
    "conv to pixels": (IMAGES, lambda n: nn.ConvTranspose2d(4, 3, (3, 2), stride=(2, 1), padding=(1, 0))),
    "adaptive mean pool with other sides": (IMAGES, lambda n: nn.AdaptiveAvgPool2d((None, 2))),
    "nearest pixels": (IMAGES, lambda n: nn.UpsamplingNearest2d(scale_factor=2)),
    "bilinear pixels": (IMAGES, lambda n: nn.UpsamplingBilinear2d(size=(7, 5))),
    "bicubic pixels": (IMAGES, lambda n: nn.Upsample(scale_factor=1.5, mode="bicubic", align_corners=False)),
    "pixel shuffle": (IMAGES, lambda n: nn.PixelShuffle(2)),
    "pixel shuffle of one example": (IMAGES[1:], lambda n: nn.PixelShuffle(2)),
    "pixel unshuffle": (IMAGES, lambda n: nn.PixelUnshuffle(3)),
    "channel shuffle": (IMAGES, lambda n: nn.ChannelShuffle(2)),
    "unfold": (IMAGES, lambda n: nn.Unfold(2, dilation=2, padding=1, stride=2)),
    "unfold one example": (IMAGES[1:], lambda n: nn.Unfold(2)),
    "fold": (SIGNALS, lambda n: nn.Fold((3, 5), (2, 2))),
    "fold one example": (SIGNALS[1:], lambda n: nn.Fold((3, 5), (2, 2))),
    "flatten": (IMAGES, lambda n: nn.Flatten()),
    "flatten two axes": (IMAGES, lambda n: nn.Flatten(-2, -1)),
    "unflatten": (VECTORS, lambda n: nn.Unflatten(1, (2, 3))),
    "unflatten the last axis": (SIGNALS, lambda n: nn.Unflatten(-1, (2, 4))),
}  # fmt: skip


KINDS = {type(make(0)): name for name, (_, make) in reversed(LAYERS.items())}
"""Each kind of layer, and the first of its cases."""
OF_EACH_KIND = others_slow(LAYERS, KINDS.values())
"""All cases, of which one of each kind is quick: for what `test_layer_behind_another` shows of most cases, too."""
USUAL = [name for name in LAYERS if name in KINDS.values() or not ("1d" in name or "3d" in name)]
"""One of each kind, and all others but those along one or three axes: a rule has the same code for any number."""
WITH_WEIGHTS = [name for name, (_, make) in LAYERS.items() if list(make(0).parameters())]


def batches(*shape: int) -> list[Tensor]:
    stream = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=stream) for _ in range(2)]


def before(name: str) -> nn.Module:
    """A layer with weights that keeps the shape of case `name`."""
    shape = LAYERS[name][0]
    # a norm takes the bias out again: its gradient is rounding noise, which Adam would blow up
    bias = "norm" not in name
    if shape in (IMAGES, VOLUMES):
        return (nn.Conv2d if shape == IMAGES else nn.Conv3d)(4, 4, 1, bias=bias)
    return nn.Linear(shape[-1], shape[-1], bias=bias)


def fresh(layer: nn.Module) -> nn.Module:
    """PReLU and affine norms start with equal weights in all trials, which would hide a mix-up."""
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, *((0.1, 0.4) if name.endswith("weight") else (-0.2, 0.2)))
    return layer
