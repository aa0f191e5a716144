"""Image classifiers of torchvision and timm, made small. The height is the marked dimension."""

from __future__ import annotations

import functools

import torch

from corpus.step import Case, Entry

_VIT = {"img_size": 20, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SWIN = {
    "img_size": 24, "patch_size": 2, "window_size": 3, "embed_dim": 16, "depths": (2, 2),
    "num_heads": (2, 4),
}  # fmt: skip

_TIMM = {
    "vit_tiny_patch16_224": _VIT,
    "deit_tiny_distilled_patch16_224": _VIT,
    "deit3_small_patch16_224": _VIT,
    "beit_base_patch16_224": _VIT,
    "beitv2_base_patch16_224": _VIT,
    "eva_giant_patch14_224": _VIT,
    "eva02_tiny_patch14_224": _VIT,
    "flexivit_small": _VIT,
    "cait_xxs24_224": _VIT,
    "xcit_nano_12_p16_224": {**_VIT, "img_size": 40, "patch_size": 8},
    "vit_small_patch14_reg4_dinov2": _VIT,
    "vit_small_plus_patch16_dinov3": _VIT,
    "vit_so400m_patch14_siglip_224": _VIT,
    "samvit_base_patch16_224": {**_VIT, "global_attn_indexes": (0, 1)},
    "vit_relpos_small_patch16_224": _VIT,
    "vit_srelpos_small_patch16_224": _VIT,
    "naflexvit_base_patch16_gap": _VIT,
    "convit_tiny": {**_VIT, "embed_dim": 8, "local_up_to_layer": 1},
    "tnt_s_patch16_224": {
        **{k: v for k, v in _VIT.items() if k != "num_heads"}, "inner_dim": 8,
        "num_heads_inner": 2, "num_heads_outer": 4,
    },
    "swin_tiny_patch4_window7_224": _SWIN,
    "swinv2_tiny_window8_256": _SWIN,
    "pvt_v2_b0": {
        "embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4),
    },
    "twins_svt_small": {
        "img_size": 32, "embed_dims": (16, 16, 16, 32), "num_heads": (2, 2, 2, 4),
        "depths": (1, 1, 1, 1), "wss": (2, 2, 2, 1), "sr_ratios": (2, 2, 1, 1),
    },
    "hiera_tiny_224": {
        "img_size": (32, 32), "embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1, 1),
    },
}  # fmt: skip

_TV_VIT = {
    "image_size": 20, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32,
    "mlp_dim": 48,
}  # fmt: skip
_TV_SWIN = {
    "patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": [3, 3], "stochastic_depth_prob": 0.0,
}  # fmt: skip
_TORCHVISION = {
    "VisionTransformer": ("vision_transformer", _TV_VIT),
    "SwinTransformer": ("swin_transformer", _TV_SWIN),
    "SwinTransformer, v2": ("swin_transformer", _TV_SWIN),
    "MaxVit": (
        "maxvit",
        {
            "input_size": (24, 24), "stem_channels": 8, "partition_size": 3, "head_dim": 4,
            "block_channels": [8, 8], "block_layers": [1, 1], "stochastic_depth_prob": 0.0,
        },
    ),
}  # fmt: skip


def _images(model, size: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return Case(model.double().train(), {"x": pixels}, {"x": 2})


def _timm(name: str, length: int) -> Case:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, drop_path_rate=0.0, **_TIMM[name])
    size = _TIMM[name].get("img_size", 64)
    return _images(model, size[0] if isinstance(size, tuple) else size)


def _torchvision(name: str, length: int) -> Case:
    from importlib import import_module

    torch.manual_seed(0)
    module = import_module(f"torchvision.models.{_TORCHVISION[name][0]}")
    settings = dict(_TORCHVISION[name][1])
    if name.endswith("v2"):
        settings |= {
            "block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2,
        }  # fmt: skip
    model = getattr(module, name.split(",")[0])(num_classes=5, **settings)
    return _images(model, settings.get("image_size", 24))


TORCHVISION = {
    f"torchvision {n}": Entry("torchvision", functools.partial(_torchvision, n))
    for n in _TORCHVISION
}
TIMM = {f"timm {n}": Entry("timm", functools.partial(_timm, n)) for n in _TIMM}
