"""Models by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jaxdp.models.cnn import CNN
from jaxdp.models.convnext import ConvNeXt
from jaxdp.models.mlp import MLP
from jaxdp.models.resnet import ResNet
from jaxdp.models.swin import Swin
from jaxdp.models.vit import ViT
from jaxdp.models.wide_resnet import WideResNet

_Entry = tuple[Callable[..., nn.Module], Mapping[str, Any]]


def _vit(patch_size: int, width: int, depth: int, num_heads: int, **attributes: Any) -> _Entry:
    sizes = {"width": width, "depth": depth, "num_heads": num_heads, "mlp_width": 4 * width}
    return ViT, {"patch_size": patch_size, **sizes, **attributes}


def _convnext(width: int, depth: int) -> _Entry:
    return ConvNeXt, {"widths": (width, 2 * width, 4 * width, 8 * width), "depths": (3, 3, depth, 3)}


def _swin(width: int, depth: int) -> _Entry:
    heads = width // 32
    return Swin, {"width": width, "depths": (2, 2, depth, 2), "num_heads": (heads, 2 * heads, 4 * heads, 8 * heads)}


MODELS: Mapping[str, _Entry] = {
    "mlp": (MLP, {}),
    "cnn": (CNN, {}),
    "resnet20": (ResNet, {"depth": 20}),
    "wrn_16_4": (WideResNet, {"depth": 16, "width": 4}),
    "wrn_28_10": (WideResNet, {"depth": 28, "width": 10}),
    "wrn_40_4": (WideResNet, {"depth": 40, "width": 4}),
    "vit_tiny": _vit(4, 64, 4, 4),
    "vit_ti16": _vit(16, 192, 12, 3),
    "vit_s16": _vit(16, 384, 12, 6),
    "vit_b16": _vit(16, 768, 12, 12),
    "vit_l16": _vit(16, 1024, 24, 16),
    "deit_ti16": _vit(16, 192, 12, 3),
    "deit_s16": _vit(16, 384, 12, 6),
    "deit_b16": _vit(16, 768, 12, 12),
    "deit_ti16_distilled": _vit(16, 192, 12, 3, distilled=True),
    "deit_s16_distilled": _vit(16, 384, 12, 6, distilled=True),
    "deit_b16_distilled": _vit(16, 768, 12, 12, distilled=True),
    "convnext_tiny": _convnext(96, 9),
    "convnext_small": _convnext(96, 27),
    "convnext_base": _convnext(128, 27),
    "convnext_large": _convnext(192, 27),
    "swin_tiny": _swin(96, 6),
    "swin_small": _swin(96, 18),
    "swin_base": _swin(128, 18),
    "swin_large": _swin(192, 18),
}


def create(name: str, *, num_classes: int, **kwargs: Any) -> nn.Module:
    """Returns the model `name` with `num_classes` logits.

    "vit_tiny" is ours, for small images (4x4 patches, width 64, 4 blocks, 4 heads); the other ViTs are the
    sizes Ti, S, B and L with 16x16 patches of Dosovitskiy et al. 2021 and Touvron et al. 2021. A DeiT is the ViT of
    its size; "_distilled" adds the distillation token and its head. The ConvNeXts are those of Liu et al. 2022. The
    Swins are those of Liu et al. 2021 for 224x224 images (4x4 patches, windows of 7x7 tokens); window=12 makes those
    for 384x384. "resnet20" with norm="frozen_batch", and depth=56 for example, is a public CIFAR ResNet with
    BatchNorm (`load_checkpoint`).

    Args:
      name: one of "mlp", "cnn", "resnet20", "wrn_16_4", "wrn_28_10", "wrn_40_4", "vit_tiny", "vit_ti16",
        "vit_s16", "vit_b16", "vit_l16", "deit_ti16", "deit_s16", "deit_b16", each of these three with
        "_distilled", "convnext_tiny", "convnext_small", "convnext_base", "convnext_large", "swin_tiny", "swin_small",
        "swin_base", "swin_large".
      num_classes: number of logits, at least 2.
      **kwargs: attributes of the model's class, overriding those the name implies, for example
        `patch_size=2`. An activation may be the name of a function in `flax.linen`, as in a config.

    Returns:
      A Linen module that maps images [B, H, W, C] to float32 logits [B, num_classes]; a single example is
      `x[None]`. Its last layer is named "head"; a distilled model has "head_distilled" beside it.

    Raises:
      ValueError: for an unknown name or fewer than 2 classes.
      TypeError: for an attribute that the model does not have.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    family, defaults = MODELS[name]
    known = set(inspect.signature(family).parameters) - {"num_classes", "parent", "name"}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise TypeError(f"model {name!r} has no {', '.join(unknown)}; its attributes are {', '.join(sorted(known))}")
    if isinstance(kwargs.get("activation"), str):
        kwargs["activation"] = getattr(nn, kwargs["activation"])
    return family(num_classes=num_classes, **{**defaults, **kwargs})
