"""Model families in Flax Linen and their parameters on disk.

No family mixes the examples of a batch.

Every family has `num_classes`, the number of logits, and `dtype`, the dtype of the computation
(None is float32). Parameters and logits are always float32.
"""

from jaxdp.models.checkpoints import Pretrained, load_checkpoint
from jaxdp.models.cnn import CNN
from jaxdp.models.convnext import ConvNeXt
from jaxdp.models.efficientnet import EfficientNetLite
from jaxdp.models.imagenet_resnet import ImageNetResNet
from jaxdp.models.language import LanguageModel, generate
from jaxdp.models.layers import FrozenBatchNorm, GroupNorm, WSConv, max_pool
from jaxdp.models.mlp import MLP
from jaxdp.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from jaxdp.models.pretrained import load_params, merge_pretrained, save_params
from jaxdp.models.registry import MODELS, create
from jaxdp.models.released import (
    ModelCard,
    Released,
    check_released,
    load_released,
    write_release,
)
from jaxdp.models.resnet import ResNet
from jaxdp.models.scattering import Scattering, morlet, scattering
from jaxdp.models.squeezenet import SqueezeNet
from jaxdp.models.swin import Swin
from jaxdp.models.training import fit_in_memory, fit_public
from jaxdp.models.tuning import (
    Features,
    head_inputs,
    merge_lora,
    text_embeddings,
    trainable,
    with_lora,
)
from jaxdp.models.vit import ViT
from jaxdp.models.wide_resnet import WideResNet

__all__ = [
    "CNN",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MLP",
    "MODELS",
    "ConvNeXt",
    "EfficientNetLite",
    "Features",
    "FrozenBatchNorm",
    "GroupNorm",
    "ImageNetResNet",
    "LanguageModel",
    "ModelCard",
    "Preprocessing",
    "Pretrained",
    "Released",
    "ResNet",
    "Scattering",
    "SqueezeNet",
    "Swin",
    "ViT",
    "WSConv",
    "WideResNet",
    "check_released",
    "create",
    "fit_in_memory",
    "fit_public",
    "generate",
    "head_inputs",
    "load_checkpoint",
    "load_params",
    "load_released",
    "max_pool",
    "merge_lora",
    "merge_pretrained",
    "morlet",
    "save_params",
    "scattering",
    "text_embeddings",
    "trainable",
    "with_lora",
    "write_release",
]
