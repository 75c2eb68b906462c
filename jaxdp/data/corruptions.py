"""Common corruptions of images (ImageNet-C, CIFAR-10-C), and ImageNet-R's classes.

Images are corrupted on the fly or read from TFDS. There are nineteen corruptions (Hendrycks and
Dietterich, ICLR 2019, arXiv:1903.12261), fifteen to evaluate on and four held out to choose
hyper-parameters on. They need the extra "corruptions", which is imported on use.

The privacy of a stream counts photographs. The same photograph under fifteen corruptions is fifteen
visits. Position i of `corrupt(source, ...)` is the photograph at position i of `source`.
"""

import dataclasses
import importlib.resources
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxdp.data.pictures import scaled
from jaxdp.data.sources import Examples
from jaxdp.data.tfds import from_tfds
from jaxdp.files import optional

CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
HELD_OUT_CORRUPTIONS = ("speckle_noise", "spatter", "gaussian_blur", "saturate")

# A place here is a part of the key of a random stream (`_corrupt`), so names keep their places.
_ALL = CORRUPTIONS + HELD_OUT_CORRUPTIONS
_SMALLEST_SIDE = {"cifar": 8, "imagenet": 32}


def corrupt(
    source: Examples,
    name: str,
    *,
    severity: int = 5,
    seed: int = 0,
    scale: Literal["auto", "cifar", "imagenet"] = "auto",
) -> Examples:
    """Returns the source with every image corrupted, one by one, whenever it is gathered.

    Labels and positions stay. A corrupted image is a function of the image, the arguments, and its
    position in the whole data set from which `source` was taken. `corrupt` and `take` therefore
    commute. NumPy's global generator keeps its state. Other versions of the libraries may change
    pixels. Nothing is cached. To read it often, gather it once.

    Args:
      source: Images [H, W, 3] or [H, W, 1]. Grey images are corrupted as RGB and keep the green
        channel, so that noise has its full strength. Images of 16 bits and floating point are
        rounded to uint8.
      name: One of `CORRUPTIONS` or `HELD_OUT_CORRUPTIONS`.
      severity: 1 to 5.
      seed: A public non-negative int.
      scale: "imagenet" has the constants of ImageNet-C, by the library imagecorruptions-imaug
        (sides of at least 32). "cifar" has the constants of CIFAR-10-C (at least 8). "auto" is
        "cifar" if the longer side is at most 64.

    Returns:
      A source of uint8 images, named "source/name_severity".

    Raises:
      ValueError: A name, severity, seed, scale or image shape is not as above.
      ImportError: The extra "corruptions" is not installed.
    """
    _check("name", name, _ALL)
    _check("severity", severity, range(1, 6))
    if seed < 0:
        raise ValueError(f"seed must be a non-negative int, got {seed}.")
    _check("scale", scale, ("auto", *_SMALLEST_SIDE))
    images = source.column("image")
    height, width, channels = images.shape[1:]
    if scale == "auto":
        scale = "cifar" if max(height, width) <= 64 else "imagenet"
    if min(height, width) < _SMALLEST_SIDE[scale] or channels not in (1, 3):
        raise ValueError(
            f"images must have 1 or 3 channels and, with scale {scale!r}, sides of at least "
            f"{_SMALLEST_SIDE[scale]} pixels, got shape {images.shape[1:]}. Resize them first, or "
            "choose another scale."
        )
    try:
        optional("imagecorruptions", "corruptions")
    except ImportError as error:
        error.add_note(
            "Where a display library such as libGL is missing, use opencv-python-headless."
        )
        raise
    arrays = {**source.arrays, "image": _CorruptedImages(images, name, severity, seed, scale)}
    change = f"{name} {severity}, seed {seed}, {scale}"
    return source.changed(change, arrays=arrays, name=f"{source.name}/{name}_{severity}")


@dataclasses.dataclass(frozen=True, eq=False)
class _CorruptedImages:
    """A column of `Examples`, uint8 [n, H, W, C], whose rows are corrupted when they are read."""

    images: np.ndarray
    name: str
    severity: int
    seed: int
    scale: str

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Any) -> np.ndarray:
        images = self.images[rows]
        if images.dtype != np.uint8:
            images = np.rint(255 * scaled(images))
        corrupted = np.empty(images.shape, np.uint8)
        is_grey = images.shape[3] == 1
        for k, position in enumerate(np.arange(len(self))[rows]):
            rgb = np.repeat(images[k], 3, axis=2) if is_grey else images[k]
            result = self._corrupt(rgb.astype(np.uint8), position)
            # The mean of three channels would have less noise than each of them.
            corrupted[k] = result[..., 1:2] if is_grey else result
        return corrupted

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.uint8)

    def _corrupt(self, image: np.ndarray, position: int) -> np.ndarray:
        import imagecorruptions

        from jaxdp.data import cifar_c

        # A stream for each position in the whole data set, so that `corrupt` and `take` commute.
        key = (_ALL.index(self.name), self.severity, position)
        rng = np.random.Generator(
            np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key))
        )
        if self.scale == "cifar":
            return cifar_c.apply(image, self.name, self.severity, rng)
        options = {}
        if self.name in ("impulse_noise", "glass_blur"):
            # These two have separate generators, which only this argument seeds.
            options["seed"] = int(rng.integers(2**32))
        with cifar_c.numpy_seeded(rng):
            return imagecorruptions.corrupt(image, self.severity, self.name, **options)


def _check(field: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        raise ValueError(f"{field} must be one of {', '.join(map(str, known))}, got {value!r}.")


_TFDS_SPLITS = {"cifar10_corrupted": "test", "imagenet2012_corrupted": "validation"}
_CIFAR10_CORRUPTED_NAMES = {"glass_blur": "frosted_glass_blur", "elastic_transform": "elastic"}


def corrupted_tfds(
    name: str,
    corruption: str,
    severity: int,
    *,
    data_dir: str | None = None,
    in_memory: bool = True,
) -> Examples:
    """Reads one configuration of a corrupted TFDS test set, by the names of `CORRUPTIONS`.

    Every configuration holds the same photographs.

    Args:
      name: "cifar10_corrupted" (the published CIFAR-10-C) or "imagenet2012_corrupted", of which a
        configuration takes 7.5 GB in memory.
      corruption: One of `CORRUPTIONS` or `HELD_OUT_CORRUPTIONS`.
      severity: 1 to 5.
      data_dir, in_memory: As in `from_tfds`.

    Raises:
      ValueError: A name, corruption or severity is not as above.
      FileNotFoundError: The configuration is not prepared there. The message says how to prepare
          it.
    """
    _check("name", name, list(_TFDS_SPLITS))
    _check("corruption", corruption, _ALL)
    _check("severity", severity, range(1, 6))
    if name == "cifar10_corrupted":
        corruption = _CIFAR10_CORRUPTED_NAMES.get(corruption, corruption)
    return from_tfds(
        f"{name}/{corruption}_{severity}",
        _TFDS_SPLITS[name],
        data_dir=data_dir,
        in_memory=in_memory,
    )


def imagenet_r_classes() -> np.ndarray:
    """Returns the positions of ImageNet-R's classes among ImageNet's 1000, int64 [200], ascending.

    ImageNet's order is the order of TFDS's imagenet2012 and of the WordNet ids, which all public
    checkpoints use.
    """
    tfds = optional("tensorflow_datasets", "tfds")

    imagenet = tfds.core.tfds_path("datasets/imagenet2012/labels.txt").read_text().split()
    lines = (importlib.resources.files("jaxdp.data") / "imagenet_r.txt").read_text().splitlines()
    imagenet_r = [line for line in lines if not line.startswith("#")]
    return np.flatnonzero(np.isin(imagenet, imagenet_r))


def restrict_classes(
    apply_fn: Callable[[Any, Any], Any], classes: Sequence[int] | np.ndarray
) -> Callable[[Any, Any], Any]:
    """Returns `apply_fn` with the logits of some classes only, in the order of `classes`.

    Args:
      apply_fn: (params, images) -> logits [B, K].
      classes: Distinct class positions in [0, K), int [C]. Label j of the restricted model is
          classes[j].

    Raises:
      ValueError: classes are not distinct non-negative integers. The restricted model raises it for
          a class >= K.
    """
    columns = np.asarray(classes)
    is_integers = columns.ndim == 1 and np.issubdtype(columns.dtype, np.integer)
    if not is_integers or len(np.unique(columns)) != len(columns):
        raise ValueError(
            f"classes must be distinct integers [C], got dtype {columns.dtype} and shape "
            f"{columns.shape}."
        )

    def restricted(params: Any, images: Any) -> Any:
        logits = apply_fn(params, images)
        if not (columns.min() >= 0 and columns.max() < logits.shape[-1]):
            raise ValueError(
                f"classes must be in [0, {logits.shape[-1]}), the classes of the model."
            )
        return logits[..., columns]

    return restricted
