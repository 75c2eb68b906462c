"""The preprocessing of images for a public model: resize, centre crop, normalisation."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.images import resize
from jaxdp.files import check_choice

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Pillow's numbers of its filters, which Hugging Face's files hold, and their names.
FILTERS = {0: "nearest", 4: "box", 2: "bilinear", 5: "hamming", 3: "bicubic", 1: "lanczos"}


class Vectors(NamedTuple):
    """The inputs of a model of tables: vectors of `width` numbers.

    A `scaler`, such as one of `jaxdp.finetune.charged_scaler`, normalises them. None takes them as
    they are.
    """

    width: int
    scaler: Any = None

    def normalise(self, features: jax.Array) -> jax.Array:
        """Returns the features [B, width], scaled if there is a scaler."""
        return features if self.scaler is None else self.scaler.normalise(features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Public constants that belong to a checkpoint.

    Other constants cost tens of points of accuracy.

    Attributes:
      size: The side S of the square images for the model.
      mean: The number subtracted per channel from values in [0, 1].
      std: The divisor per channel.
      resize: The size before a crop of the centre to S x S. An int resizes the shorter side to it.
        A pair (height, width) ignores the aspect ratio. None is `size`, which keeps images that are
        already S x S, such as ImageNet-C.
      interpolation: The name of a Pillow filter.
    """

    size: int
    mean: Sequence[float]
    std: Sequence[float]
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            object.__setattr__(self, field, tuple(float(value) for value in getattr(self, field)))
        if isinstance(self.resize, Sequence):  # a list of JSON has no hash
            object.__setattr__(self, "resize", tuple(self.resize))
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise ValueError(
                f"std must be positive and as long as mean, got mean={self.mean}, std={self.std}."
            )
        if not 0 < self.size <= min(self._target(1, 1)):  # of a square image
            raise ValueError(
                f"size must be in [1, resize], got size={self.size}, resize={self.resize}."
            )
        if self.interpolation not in FILTERS.values():
            raise ValueError(
                f"interpolation must be one of {', '.join(FILTERS.values())}, got "
                f"{self.interpolation!r}."
            )

    def prepare(self, images: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Resizes and crops n images [H, W, C], uint8 or floating point in [0, 1].

        Their sizes may differ.

        Returns:
          float32 [n, S, S, C] in [0, 1], NOT normalised. `normalise` and `Pretrained.apply_fn` do
          that.

        Raises:
          ValueError: An image has another number of axes or channels, or floating-point values
              outside [0, 1].
          TypeError: The dtype of an image is neither uint8 nor floating point.
        """
        shape = (len(images), self.size, self.size, len(self.mean))
        prepared = np.empty(shape, np.float32)
        for k, image in enumerate(images):
            prepared[k] = self._prepare(np.asarray(image))
        return prepared

    def normalise(self, images: jax.Array) -> jax.Array:
        """Returns (images - mean) / std of floating-point images [B, S, S, C] in [0, 1].

        Raises:
          ValueError: The shape is another one.
          TypeError: The images are not floating point.
        """
        shape = (self.size, self.size, len(self.mean))
        if images.ndim != 4 or images.shape[1:] != shape:
            expected = f"[B, {', '.join(map(str, shape))}]"
            raise ValueError(
                f"images must be {expected}, got shape {images.shape}. See Preprocessing.prepare."
            )
        if not jnp.issubdtype(images.dtype, jnp.floating):
            raise TypeError(
                f"images must be floats in [0, 1], got dtype {images.dtype}. See "
                "Preprocessing.prepare."
            )
        mean = jnp.asarray(self.mean, images.dtype).reshape(1, 1, 1, -1)
        std = jnp.asarray(self.std, images.dtype).reshape(1, 1, 1, -1)
        return (images - mean) / std

    def _prepare(self, image: np.ndarray) -> np.ndarray:
        """Returns one image resized and cropped, float32 [S, S, C] in [0, 1]."""
        if image.ndim != 3 or image.shape[2] != len(self.mean):
            raise ValueError(
                f"every image must be [H, W, {len(self.mean)}], got shape {image.shape}. "
                "Make a grey image RGB by np.repeat(image, 3, axis=-1)."
            )
        is_integer = image.dtype == np.uint8
        if not is_integer and not np.issubdtype(image.dtype, np.floating):
            raise TypeError(
                f"images must be uint8 or floating point in [0, 1], got dtype {image.dtype}."
            )
        if not is_integer and not (image.min() >= 0 and image.max() <= 1):
            raise ValueError("floating-point images must be in [0, 1]. Give 0..255 as uint8.")
        if not is_integer:
            image = image.astype(np.float32)
        resized = resize(image, self._target(*image.shape[:2]), self.interpolation)
        top = round((resized.shape[0] - self.size) / 2)
        left = round((resized.shape[1] - self.size) / 2)
        crop = resized[top : top + self.size, left : left + self.size]
        if is_integer:
            return crop / np.float32(255)
        return np.clip(crop, 0, 1)  # A bicubic filter overshoots.

    def _target(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width before the crop."""
        if isinstance(self.resize, tuple):
            return self.resize
        short = self.resize
        if short is None:
            short = self.size
        return short * height // min(height, width), short * width // min(height, width)


def from_timm(config: Mapping[str, Any]) -> Preprocessing:
    """Reads the entry "pretrained_cfg" of timm's config.json.

    Raises:
      ValueError: crop_mode is not "center" or "squash".
      KeyError: An entry is missing.
    """
    size = config["input_size"][-1]
    side = math.floor(size / config["crop_pct"])
    mode = config.get("crop_mode", "center")
    check_choice("crop_mode", mode, ("center", "squash"))
    return Preprocessing(
        size=size,
        mean=config["mean"],
        std=config["std"],
        resize=side if mode == "center" else (side, side),
        interpolation=config["interpolation"],
    )


def from_hugging_face(config: Mapping[str, Any]) -> Preprocessing:
    """Reads Hugging Face's preprocessor_config.json of a ViT, DeiT, DINOv2, Swin or ConvNeXt.

    As with their processors, a ViT or Swin takes the whole image at any aspect ratio, and a DeiT
    the centre of such an image. A DINOv2 takes the centre of an image with shorter side
    "shortest_edge". A ConvNeXt below 384 pixels takes the centre of an image with
    shorter side size / crop_pct (default 0.875).

    Raises:
      ValueError: The images are not resized, divided by 255 and normalised.
      KeyError: An entry is missing.
    """
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if not config.get(step, True):
            raise ValueError(
                f"{step} must be true, got False. Preprocessing always resizes, rescales and "
                "normalises."
            )

    processor = config.get("image_processor_type", config.get("feature_extractor_type", ""))
    size = _side(config["size"])
    target: int | tuple[int, int] = (size, size)
    if "crop_pct" in config or processor.startswith("ConvNext"):
        # From 384 pixels on the processor of ConvNeXt squashes the whole image.
        if size < 384:
            target = int(size / config.get("crop_pct", 224 / 256))
    elif config.get("do_center_crop", False):
        if isinstance(config["size"], Mapping) and "shortest_edge" in config["size"]:
            target = size  # DINOv2's processor keeps the aspect ratio
        size = _side(config["crop_size"])
    # Where the file is silent, a ViT's processor takes the bilinear filter, the others bicubic.
    resample = config.get("resample", 2 if processor.startswith("ViT") else 3)
    return Preprocessing(
        size=size,
        mean=config["image_mean"],
        std=config["image_std"],
        resize=target,
        interpolation=FILTERS[resample],
    )


def _side(entry: Any) -> int:
    """Returns the side of square images.

    Examples of entries: 224, {"height": 224, "width": 224}, {"shortest_edge": 224}.
    """
    if isinstance(entry, int):
        return entry
    return next(value for value in entry.values() if value)
