"""Torchvision's models, built small."""

from collections.abc import Callable
from functools import partial

from torch import nn

from tests.support.torchvision_import import make_importable
from tests.zoo.cases import Case, built, pictures

make_importable()

from torchvision.models.alexnet import AlexNet  # noqa: E402
from torchvision.models.convnext import CNBlockConfig, ConvNeXt  # noqa: E402
from torchvision.models.densenet import DenseNet  # noqa: E402
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig  # noqa: E402
from torchvision.models.googlenet import GoogLeNet  # noqa: E402
from torchvision.models.maxvit import MaxVit  # noqa: E402
from torchvision.models.mnasnet import MNASNet  # noqa: E402
from torchvision.models.mobilenetv2 import MobileNetV2  # noqa: E402
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3  # noqa: E402
from torchvision.models.regnet import BlockParams, RegNet  # noqa: E402
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # noqa: E402
from torchvision.models.shufflenetv2 import ShuffleNetV2  # noqa: E402
from torchvision.models.squeezenet import SqueezeNet  # noqa: E402
from torchvision.models.swin_transformer import (  # noqa: E402
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.vgg import VGG, make_layers  # noqa: E402
from torchvision.models.vision_transformer import VisionTransformer  # noqa: E402

Make = Callable[[int], nn.Module]


def with_small_head(build: Callable[..., nn.Module], features: int, **options: object) -> Make:
    """A model with dropout between wide linear layers, which are made narrow; its rate is a trial's own."""

    def make(n: int) -> nn.Module:
        model = build(**options)
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Sequential(
            *(nn.Linear(features, 16), nn.ReLU(True), nn.Dropout(0.2 * n)),
            *(nn.Linear(16, 16), nn.ReLU(True), nn.Dropout(0.2 * n), nn.Linear(16, 3)),
        )
        return model

    return make


class SmallVGG(VGG):
    """Without the wide layers of its head, which take seconds to draw."""

    def __init__(self, normed: bool) -> None:
        nn.Module.__init__(self)
        self.features = make_layers([8, 8, "M", 16, 16, "M", 16, "M"], batch_norm=normed)


class SmallAlexNet(AlexNet):
    """With its first layers alone narrow enough."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(True), nn.MaxPool2d(3, 2), nn.Conv2d(8, 16, 3, padding=1)),
            *(nn.ReLU(True), nn.MaxPool2d(3, 2)),
        )


def mobile3() -> nn.Module:
    config = partial(InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [config(8, 3, 16, 8, True, "RE", 2), config(8, 5, 24, 16, True, "HS", 2)]
    return MobileNetV3(blocks, last_channel=32, num_classes=3)


def efficient1() -> nn.Module:
    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 16, 2)]
    return EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.0, num_classes=3, last_channel=32)


def efficient2() -> nn.Module:
    blocks = [FusedMBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2)]
    return EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.2, num_classes=3, last_channel=32)


def regnet(squeeze: float | None) -> Make:
    params = partial(BlockParams.from_init_params, 4, 8, 8.0, 2.0, 8)
    return lambda n: RegNet(params(se_ratio=squeeze), num_classes=3, stem_width=8)


CASES: dict[str, Case] = {
    "AlexNet": Case(with_small_head(SmallAlexNet, 16), pictures),
    "VGG": Case(with_small_head(SmallVGG, 16, normed=False), pictures),
    "VGG with batch norm": Case(with_small_head(SmallVGG, 16, normed=True), pictures),
    "ResNet, basic": Case(built(ResNet, BasicBlock, [1, 1, 1, 1], num_classes=3), pictures),
    "ResNet, bottleneck": Case(built(ResNet, Bottleneck, [1, 1, 1, 1], 3, width_per_group=4), pictures),
    "ResNeXt": Case(built(ResNet, Bottleneck, [1, 1, 1, 1], 3, groups=4, width_per_group=4), pictures),
    "Wide ResNet": Case(
        built(ResNet, Bottleneck, [1, 1, 1, 1], 3, width_per_group=16, zero_init_residual=True), pictures
    ),
    "DenseNet": Case(built(DenseNet, 4, (2, 2, 2, 2), 8, drop_rate=0.1, num_classes=3), pictures),
    "DenseNet, checkpointed": Case(
        built(DenseNet, 4, (2, 2), 8, num_classes=3, memory_efficient=True),
        pictures,
        "computes a part of the forward twice",
    ),
    "GoogLeNet": Case(built(GoogLeNet, 3, aux_logits=False, init_weights=False), pictures),
    "MobileNetV2": Case(lambda n: MobileNetV2(3, 0.1, [[1, 8, 1, 1], [6, 16, 2, 2]], dropout=0.1 * n), pictures),
    "MobileNetV3": Case(built(mobile3), pictures),
    "EfficientNet": Case(built(efficient1), pictures),
    "EfficientNetV2, stochastic depth": Case(built(efficient2), pictures),
    "ShuffleNetV2": Case(built(ShuffleNetV2, [2, 2, 2], [8, 16, 16, 32, 32], 3), pictures),
    "SqueezeNet 1.0": Case(lambda n: SqueezeNet("1_0", 3, 0.1 * n), pictures),
    "SqueezeNet 1.1": Case(lambda n: SqueezeNet("1_1", 3, 0.1 * n), pictures),
    "RegNetX": Case(regnet(None), pictures),
    "RegNetY": Case(regnet(0.25), pictures),
    "MNASNet": Case(lambda n: MNASNet(0.1, 3, 0.1 * n), pictures),
    "ConvNeXt": Case(
        built(ConvNeXt, [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], num_classes=3, layer_scale=0.1), pictures
    ),
    "ViT": Case(lambda n: VisionTransformer(32, 8, 2, 2, 16, 32, 0.1 * n, 0.1, 3), pictures),
    "Swin": Case(
        built(
            SwinTransformer, [4, 4], 8, [1, 2], [2, 2], [4, 4], dropout=0.1, stochastic_depth_prob=0.0, num_classes=3
        ),
        pictures,
    ),
    "SwinV2": Case(
        built(
            *(SwinTransformer, [4, 4], 8, [1, 2], [2, 2], [4, 4]),
            stochastic_depth_prob=0.0,
            num_classes=3,
            block=SwinTransformerBlockV2,
            downsample_layer=PatchMergingV2,
        ),
        pictures,
    ),
    "MaxViT": Case(built(MaxVit, (32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=3), pictures),
}
