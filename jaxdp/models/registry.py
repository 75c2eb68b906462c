"""Models by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jaxdp.files import check_count
from jaxdp.models.cnn import CNN
from jaxdp.models.convnext import ConvNeXt
from jaxdp.models.efficientnet import EfficientNetLite
from jaxdp.models.imagenet_resnet import ImageNetResNet
from jaxdp.models.language import LanguageModel
from jaxdp.models.mlp import MLP
from jaxdp.models.resnet import ResNet
from jaxdp.models.scattering import Scattering
from jaxdp.models.squeezenet import SqueezeNet
from jaxdp.models.swin import Swin
from jaxdp.models.vit import ViT
from jaxdp.models.wide_resnet import WideResNet

_Entry = tuple[Callable[..., nn.Module], Mapping[str, Any]]


def _vit(
    patch_size: int,
    width: int,
    depth: int,
    num_heads: int,
    **attributes: Any,
) -> _Entry:
    sizes = {
        "patch_size": patch_size,
        "width": width,
        "depth": depth,
        "num_heads": num_heads,
        "mlp_width": 4 * width,
    }
    return ViT, {**sizes, **attributes}


def _dinov2(width: int, depth: int, num_heads: int) -> _Entry:
    return _vit(14, width, depth, num_heads, layer_scale=1e-5)


def _convnext(width: int, depth: int) -> _Entry:
    return ConvNeXt, {
        "widths": (width, 2 * width, 4 * width, 8 * width),
        "depths": (3, 3, depth, 3),
    }


def _swin(width: int, depth: int) -> _Entry:
    heads = width // 32
    return Swin, {
        "width": width,
        "depths": (2, 2, depth, 2),
        "num_heads": (heads, 2 * heads, 4 * heads, 8 * heads),
    }


def _gpt2(width: int, depth: int) -> _Entry:
    sizes = {"width": width, "depth": depth, "num_heads": width // 64, "mlp_width": 4 * width}
    return LanguageModel, {"positions": 1024, **sizes}


def _llama(
    width: int,
    depth: int,
    num_heads: int,
    mlp_width: int,
    **attributes: Any,
) -> _Entry:
    sizes = {"width": width, "depth": depth, "num_heads": num_heads, "mlp_width": mlp_width}
    return LanguageModel, {"form": "llama", "positions": 2048, **sizes, **attributes}


MODELS: Mapping[str, _Entry] = {
    "mlp": (MLP, {}),
    "cnn": (CNN, {}),
    "scattering": (Scattering, {}),
    "squeezenet1_0": (SqueezeNet, {"version": "1.0"}),
    "squeezenet1_1": (SqueezeNet, {"version": "1.1"}),
    "efficientnet_lite0": (EfficientNetLite, {"width": 1.0, "depth": 1.0}),
    "efficientnet_lite1": (EfficientNetLite, {"width": 1.0, "depth": 1.1}),
    "efficientnet_lite2": (EfficientNetLite, {"width": 1.1, "depth": 1.2}),
    "efficientnet_lite3": (EfficientNetLite, {"width": 1.2, "depth": 1.4}),
    "efficientnet_lite4": (EfficientNetLite, {"width": 1.4, "depth": 1.8}),
    "resnet18": (ImageNetResNet, {}),
    "resnet34": (ImageNetResNet, {"depths": (3, 4, 6, 3)}),
    "resnet50": (ImageNetResNet, {"depths": (3, 4, 6, 3), "bottleneck": True}),
    "resnet101": (ImageNetResNet, {"depths": (3, 4, 23, 3), "bottleneck": True}),
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
    "dinov2_s14": _dinov2(384, 12, 6),
    "dinov2_b14": _dinov2(768, 12, 12),
    "dinov2_l14": _dinov2(1024, 24, 16),
    "convnext_tiny": _convnext(96, 9),
    "convnext_small": _convnext(96, 27),
    "convnext_base": _convnext(128, 27),
    "convnext_large": _convnext(192, 27),
    "lm_tiny": (LanguageModel, {}),
    "gpt2": _gpt2(768, 12),
    "gpt2_medium": _gpt2(1024, 24),
    "gpt2_large": _gpt2(1280, 36),
    "gpt2_xl": _gpt2(1600, 48),
    "smollm_135m": _llama(576, 30, 9, 1536, kv_heads=3),
    "smollm2_135m": _llama(576, 30, 9, 1536, kv_heads=3, positions=8192, rotary_base=100_000.0),
    "tinyllama_1b": _llama(2048, 22, 32, 5632, kv_heads=4, tied=False),
    "llama2_7b": _llama(4096, 32, 32, 11_008, positions=4096, tied=False),
    "swin_tiny": _swin(96, 6),
    "swin_small": _swin(96, 18),
    "swin_base": _swin(128, 18),
    "swin_large": _swin(192, 18),
}


def create(name: str, *, num_classes: int, **kwargs: Any) -> nn.Module:
    """Returns the model `name` with `num_classes` logits.

    Args:
      name: A key of `MODELS`:
        "mlp", "cnn", "resnet20", "wrn_16_4", "wrn_28_10", "wrn_40_4". "resnet20" with depth=56 and
          norm="frozen_batch" is a public CIFAR ResNet with BatchNorm (`load_checkpoint`).
        "scattering" (Bruna and Mallat 2013), a linear head on features without parameters.
        "squeezenet1_0", "squeezenet1_1" (Iandola et al. 2016), "efficientnet_lite0" to
          "efficientnet_lite4" (Tan and Le 2019), "resnet18", "resnet34", "resnet50", "resnet101"
          (He et al. 2016), all for ImageNet. Their BatchNorm is frozen.
        "vit_tiny" (ours, for small images), "vit_ti16", "vit_s16", "vit_b16", "vit_l16"
          (Dosovitskiy et al. 2021).
        "deit_ti16", "deit_s16", "deit_b16" (Touvron et al. 2021) are ViTs. Each also exists with
          "_distilled", which adds the distillation token and its head.
        "dinov2_s14", "dinov2_b14", "dinov2_l14" (Oquab et al. 2024) are ViTs with a factor for each
          channel of a branch. pool="token_and_mean" is for their published linear heads.
        "convnext_tiny", "convnext_small", "convnext_base", "convnext_large" (Liu et al. 2022).
        "swin_tiny", "swin_small", "swin_base", "swin_large" (Liu et al. 2021) for 224x224.
          window=12 is for 384x384.
        "lm_tiny" (ours, for bytes), "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl" (Radford et al.
          2019), "smollm_135m", "smollm2_135m" (Hugging Face 2024), "tinyllama_1b" (Zhang et al.
          2024), "llama2_7b" (Touvron et al. 2023).
      num_classes: The number of logits, at least 2. For a language model it is the size of the
          vocabulary.
      **kwargs: Attributes of the model's class, for example `patch_size=2`. They override the
        attributes of the name. An activation may be the name of a function in `flax.linen`.

    Returns:
      A Linen module that maps images [B, H, W, C] to float32 logits [B, num_classes]. Its last
      layer is "head". A distilled model also has "head_distilled". A language model maps tokens [B,
      T] to [B, T, num_classes], see `jaxdp.models.LanguageModel`.

    Raises:
      ValueError: The name is unknown, or there are fewer than 2 classes.
      TypeError: The model does not have an attribute.
    """
    if name not in MODELS:
        raise ValueError(f"name must be one of {', '.join(MODELS)}, got {name!r}.")
    check_count("num_classes", num_classes, 1)
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    family, defaults = MODELS[name]
    attributes = set(inspect.signature(family).parameters) - {"num_classes", "parent", "name"}
    if unknown := sorted(set(kwargs) - attributes):
        raise TypeError(
            f"model {name!r} has no {', '.join(unknown)}. Its attributes are "
            f"{', '.join(sorted(attributes))}."
        )
    if isinstance(kwargs.get("activation"), str):
        kwargs["activation"] = getattr(nn, kwargs["activation"])
    return family(num_classes=num_classes, **{**defaults, **kwargs})
