"""Families of timm, one a line: a module of `timm.models`, a small model of it or its class, the
size of its images, and what makes it smaller where its constructor takes that.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers import GatedMlp
from timm.models import metaformer, mlp_mixer

ONES = (1, 1, 1, 1)
WIDE = (16, 32, 48, 64)
HEADS = (1, 2, 3, 4)
FLAT = {"depth": 2, "embed_dim": 32, "num_heads": 2}
PYRAMID = {"depths": ONES, "embed_dims": WIDE}
WINDOWS = {"embed_dim": 16, "depths": ONES, "num_heads": (1, 2, 4, 4)}
STAGES = {"depths": ONES, "dims": WIDE}
MIXERS = (*[metaformer.SepConv] * 2, *[metaformer.Attention] * 2)
NORMS = (*[metaformer.LayerNorm2dNoBias] * 2, *[metaformer.LayerNormNoBias] * 2)
LAYERS = {"layers": ONES, "channels": WIDE}

TABLE: dict[str, tuple[str, int, dict[str, Any]]] = {
    # attention of one width
    "beit": ("beit_base_patch16_224", 32, FLAT),
    "cait": ("cait_xxs24_224", 32, FLAT),
    "convit": ("convit_tiny", 32, {**FLAT, "local_up_to_layer": 1}),
    "deit": ("deit_tiny_distilled_patch16_224", 32, FLAT),
    "eva": ("eva02_tiny_patch14_224", 28, FLAT),
    "naflexvit": ("naflexvit_base_patch16_gap", 32, FLAT),
    "tnt": ("tnt_s_patch16_224", 32, {"depth": 2, "embed_dim": 32, "num_heads_outer": 2}),
    "vision_transformer": ("test_vit", 32, {}),
    "vision_transformer_relpos": ("test_vit_relpos", 32, {}),
    "vision_transformer_sam": (
        "samvit_base_patch16_224",
        64,
        {**FLAT, "global_attn_indexes": (1,)},
    ),
    "xcit": ("xcit_nano_12_p16_224", 32, FLAT),
    # attention of rising width, in windows and beside convolutions
    "coat": ("coat_lite_tiny", 32, {"serial_depths": ONES}),
    "crossvit": (
        "crossvit_tiny_240",
        48,
        {
            "depth": ((1, 1, 0),),
            "embed_dim": (16, 32),
            "num_heads": (2, 2),
            "img_scale": (1.0, 1.0),
            "patch_size": (12, 16),
            "mlp_ratio": (2, 2, 1),
        },
    ),
    "davit": ("davit_tiny", 64, {**PYRAMID, "num_heads": HEADS}),
    "edgenext": ("edgenext_xx_small", 64, {"depths": (1, 2, 2, 2)}),
    "efficientformer_v2": ("efficientformerv2_s0", 64, PYRAMID),
    "efficientvit_mit": ("efficientvit_b0", 64, {}),
    "efficientvit_msra": ("efficientvit_m0", 64, {}),
    "fastvit": ("fastvit_t8", 64, {"layers": ONES}),
    "focalnet": ("FocalNet", 64, {"embed_dim": 16, "depths": ONES}),
    "gcvit": ("GlobalContextVit", 64, {"img_size": 64, **WINDOWS}),
    "hiera": ("hiera_tiny_224", 64, {"embed_dim": 16, "stages": ONES}),
    "levit": ("levit_128s", 64, {}),
    "maxxvit": ("test_maxvit", 64, {}),
    "metaformer": (
        "MetaFormer",
        64,
        {"depths": ONES, "dims": (16, 16, 32, 64), "token_mixers": MIXERS, "norm_layers": NORMS},
    ),
    "mobilevit": ("mobilevitv2_050", 64, {}),
    "mvitv2": ("mvitv2_tiny", 64, {}),
    "nest": (
        "Nest",
        32,
        {"img_size": 32, "embed_dims": (16, 32, 48), "num_heads": (1, 2, 3), "depths": (1, 1, 1)},
    ),
    "pit": ("pit_ti_distilled_224", 64, {"depth": (1, 1, 1)}),
    "pvt_v2": ("pvt_v2_b0", 64, {**PYRAMID, "num_heads": HEADS}),
    "swiftformer": ("swiftformer_xs", 64, {"layers": ONES, "embed_dims": WIDE}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 56, WINDOWS),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 64, {**WINDOWS, "window_size": 4}),
    "tiny_vit": ("tiny_vit_5m_224", 64, {**PYRAMID, "num_heads": HEADS}),
    "twins": ("twins_svt_small", 64, {**PYRAMID, "num_heads": HEADS}),
    "visformer": ("visformer_tiny", 64, {}),
    "volo": (
        "VOLO",
        64,
        {"img_size": 64, "layers": ONES, "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2)},
    ),
    # no attention, no convolutions: mixing by products and recurrences
    "mlp_mixer": (
        "MlpMixer",
        32,
        {
            "img_size": 32,
            "num_blocks": 2,
            "mlp_ratio": 6,
            "embed_dim": 32,
            "block_layer": mlp_mixer.SpatialGatingBlock,
            "mlp_layer": GatedMlp,
        },
    ),
    "sequencer": (
        "sequencer2d_s",
        56,
        {"layers": ONES, "embed_dims": (16, 32, 32, 32), "hidden_sizes": (8, 8, 8, 8)},
    ),
    # convolutions
    "byobnet": ("test_byobnet", 64, {}),
    "byoanet": ("eca_botnext26ts_256", 64, {}),
    "convmixer": ("ConvMixer", 56, {"dim": 32, "depth": 2}),
    "convnext": ("convnextv2_atto", 64, STAGES),
    "cspnet": ("cs3darknet_focus_s", 64, {}),
    "densenet": ("densenet121", 64, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    "dla": ("dla46x_c", 64, {}),
    "dpn": ("dpn48b", 64, {"k_sec": ONES}),
    "efficientnet": ("test_efficientnet", 64, {}),
    "ghostnet": ("ghostnet_050", 64, {}),
    "hgnet": ("hgnetv2_b0", 64, {}),
    "inception_next": ("inception_next_atto", 64, STAGES),
    "inception_v3": ("inception_v3", 80, {}),
    "mambaout": ("test_mambaout", 64, {}),
    "mobilenetv3": ("mobilenetv3_small_050", 64, {}),
    "nfnet": ("test_nfnet", 64, {}),
    "regnet": ("regnetx_002", 64, {}),
    "res2net": ("res2net50_14w_8s", 64, LAYERS),
    "resnest": ("resnest14d", 64, {}),
    "resnet": ("resnetaa50d", 64, LAYERS),
    "vgg": ("VGG", 56, {"cfg": (8, "M", 16, "M", 32, 32, "M"), "mlp_ratio": 1 / 64}),
}
WAYS: tuple[str, ...] = ()


def build(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """A small model of a family, and two images for it."""
    maker, size, given = TABLE[name]
    images = torch.randn((2, 3, size, size), generator=torch.Generator().manual_seed(0))
    given = {"num_classes": 10, **given}
    if not timm.is_model(maker):  # a class: functions that fix its sizes would not have others
        return getattr(getattr(timm.models, name), maker)(**given), (images,)
    sized = {"img_size": size} if timm.get_pretrained_cfg(maker).fixed_input_size else {}
    return timm.create_model(maker, **sized, **given), (images,)
