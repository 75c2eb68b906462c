"""Models by name, which registry.toml lists."""

import importlib.resources
import inspect
import tomllib
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
_FAMILIES = (
    MLP,
    CNN,
    Scattering,
    SqueezeNet,
    EfficientNetLite,
    ImageNetResNet,
    ResNet,
    WideResNet,
    ViT,
    ConvNeXt,
    LanguageModel,
    Swin,
)


def _read() -> dict[str, _Entry]:
    """Returns the class and the attributes of each model of registry.toml."""
    table = importlib.resources.files("jaxdp.models") / "registry.toml"
    sections = tomllib.loads(table.read_text(encoding="utf-8"))
    families = {family.__name__: family for family in _FAMILIES}
    models: dict[str, _Entry] = {}
    for class_name, lines in sections.items():
        family = families[class_name]
        for name, attributes in lines.items():
            models[name] = (family, {key: _hashable(attributes[key]) for key in attributes})
    return models


def _hashable(value: Any) -> Any:
    """Returns the value, with a list as a tuple: programs are cached by the model's attributes."""
    if isinstance(value, list):
        return tuple(value)
    return value


MODELS: Mapping[str, _Entry] = _read()


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
    parameters = inspect.signature(family).parameters
    attributes = set(parameters) - {"num_classes", "parent", "name"}
    unknown = sorted(set(kwargs) - attributes)
    if unknown:
        raise TypeError(
            f"model {name!r} has no {', '.join(unknown)}. Its attributes are "
            f"{', '.join(sorted(attributes))}."
        )
    activation = kwargs.get("activation")
    if isinstance(activation, str):
        kwargs["activation"] = getattr(nn, activation)
    return family(num_classes=num_classes, **{**defaults, **kwargs})
