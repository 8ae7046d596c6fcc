"""Models of timm, built small."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.support.torchvision_import import make_importable
from tests.zoo.cases import Case, built, pictures

make_importable()

import timm  # noqa: E402
from timm.layers import GatedMlp  # noqa: E402
from timm.models import convmixer, focalnet, gcvit, metaformer, mlp_mixer, nest  # noqa: E402


def case(name: str, size: int = 32, refused: str = "", **options: Any) -> Case:
    def make(n: int) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=3, **options)
        return model

    return Case(make, lambda: pictures(size), refused)


def of(kind: Callable[..., nn.Module], size: int = 32, **options: Any) -> Case:
    """A model by its class, where the name that timm gives it fixes its sizes."""
    return Case(built(kind, num_classes=3, **options), lambda: pictures(size))


TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}

CASES: dict[str, Case] = {
    "test_vit": case("test_vit", 32, img_size=32),
    "test_vit3": case("test_vit3", 32, img_size=32),
    "test_resnet": case("test_resnet"),
    "test_efficientnet": case("test_efficientnet", drop_rate=0.2),
    "test_efficientnet_gn": case("test_efficientnet_gn"),
    "test_byobnet": case("test_byobnet"),
    "test_convnext": case("test_convnext"),
    "test_convnext3": case("test_convnext3"),
    "test_mambaout": case("test_mambaout"),
    "test_nfnet": case("test_nfnet"),
    "ViT": case("vit_tiny_patch16_224", **TINY, drop_path_rate=0.1),
    "DeiT, distilled": case("deit_tiny_distilled_patch16_224", **TINY),
    "DeiT-3": case("deit3_small_patch16_224", **TINY),
    "BEiT": case("beit_base_patch16_224", **TINY),
    "EVA-02": case("eva02_tiny_patch14_224", **TINY),
    "FlexiViT": case("flexivit_small", **TINY),
    "CaiT": case("cait_xxs24_224", **TINY),
    "XCiT": case("xcit_nano_12_p16_224", **TINY),
    "Mixer": of(mlp_mixer.MlpMixer, img_size=32, patch_size=8, num_blocks=2, embed_dim=16),
    "gMLP": of(
        mlp_mixer.MlpMixer,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=16,
        block_layer=mlp_mixer.SpatialGatingBlock,
        mlp_layer=GatedMlp,
        mlp_ratio=4,
    ),
    "ResMLP": of(
        mlp_mixer.MlpMixer,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=16,
        block_layer=mlp_mixer.ResBlock,
        norm_layer=mlp_mixer.Affine,
        mlp_ratio=4,
    ),
    "ConViT": case("convit_tiny", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, local_up_to_layer=2),
    "CoaT": case("coat_tiny", img_size=32, embed_dims=[16] * 4, serial_depths=[1] * 4, num_heads=8),
    "Swin": case(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(1, 2),
        window_size=4,
        drop_path_rate=0.0,
    ),
    "SwinV2": case(
        "swinv2_tiny_window8_256",
        img_size=32,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(1, 2),
        window_size=4,
        drop_path_rate=0.0,
    ),
    "Twins": case(
        "twins_svt_small",
        img_size=32,
        embed_dims=(8, 16),
        depths=(1, 1),
        num_heads=(1, 2),
        mlp_ratios=(2, 2),
        wss=(4, 4),
        sr_ratios=(2, 1),
    ),
    "PVTv2": case("pvt_v2_b0", embed_dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)),
    "PiT": case("pit_ti_224", img_size=32, patch_size=8, stride=4, base_dims=[8, 8], depth=[1, 1], heads=[1, 2]),
    "LeViT": case(
        "levit_128s", 64, img_size=64, embed_dim=(16, 24, 32), num_heads=(2, 2, 2), depth=(1, 1, 1), key_dim=8
    ),
    "EdgeNeXt": case("edgenext_xx_small", dims=(8, 16, 16, 16), depths=(1, 1, 1, 1)),
    "EfficientFormer": case("efficientformer_l1", 224, embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 2)),
    "EfficientViT": case(
        "efficientvit_b0", widths=(8, 16, 16, 16), depths=(1, 1, 1, 1), head_widths=(16, 16), head_dim=8
    ),
    "PoolFormer": of(metaformer.MetaFormer, depths=(1,) * 4, dims=(8, 16, 16, 16)),
    "FastViT": case("fastvit_t8", embed_dims=(8, 16, 16, 16), layers=(1, 1, 1, 1)),
    "RepViT": case("repvit_m0_9", embed_dim=(8, 16), depth=(1, 1)),
    "ResNeSt": case("resnest14d", channels=(8, 16, 16, 16), stem_width=8),
    "SKResNet": case("skresnet18", channels=(8, 16, 16, 16), stem_width=8),
    "SEResNet": case("seresnet18", channels=(8, 16, 16, 16)),
    "ResNetV2": case("resnetv2_50", layers=(1, 1, 1, 1), channels=(8, 16, 16, 16), stem_chs=8),
    "MobileNetV4": case("mobilenetv4_conv_small_050"),
    "LCNet": case("lcnet_050"),
    "TinyNet": case("tinynet_e"),
    "DLA": case("dla46x_c"),
    "Visformer": case("visformer_tiny", 32, img_size=32, embed_dim=16, depth=(1, 1, 1), num_heads=2, init_channels=8),
    "TNT": case(
        "tnt_s_legacy_patch16_224",
        img_size=32,
        embed_dim=16,
        inner_dim=8,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=2,
    ),
    "FocalNet": of(focalnet.FocalNet, embed_dim=8, depths=(1,) * 4),
    "DaViT": case("davit_tiny", embed_dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)),
    "GCViT": of(gcvit.GlobalContextVit, 64, img_size=64, embed_dim=8, depths=(1,) * 4, num_heads=(1, 2, 2, 2)),
    "Sequencer": case(
        "sequencer2d_s", img_size=32, layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), hidden_sizes=(4, 4, 4, 4)
    ),
    "Nest": of(nest.Nest, img_size=32, embed_dims=(8, 16, 16), num_heads=(1, 2, 2), depths=(1, 1, 1)),
    "StarNet": case("starnet_s050"),
    "Hiera": case("hiera_tiny_224", 32, img_size=(32, 32), embed_dim=16, stages=(1, 1, 1, 1)),
    "ConvMixer": of(convmixer.ConvMixer, dim=16, depth=2, kernel_size=3, patch_size=4),
}
