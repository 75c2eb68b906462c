"""Strong domain shifts of small grey images. A network that reads digits withstands most
corruptions of CIFAR-10-C.
"""

import zlib
from collections.abc import Callable, Mapping

import numpy as np
from scipy import ndimage

from jaxdp import data
from jaxdp.data import Examples


def _impulse(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    replaced, white = rng.random(images.shape) < strength, rng.random(images.shape) < 0.5
    return np.where(replaced, white, images)


# Each maps float images [n, H, W, C] in [0, 1]. The result is cut to [0, 1].
SHIFTS: Mapping[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "noise": lambda x, strength, rng: x + strength * rng.normal(size=x.shape),  # standard deviation
    "impulse": _impulse,  # the share of pixels that become black or white
    "brightness": lambda x, strength, rng: x + strength,
    "blur": lambda x, strength, rng: ndimage.gaussian_filter(
        x, (0, strength, strength, 0)
    ),  # pixels
    "speckle": lambda x, strength, rng: x + strength * x * rng.normal(size=x.shape),
    "contrast": lambda x, strength, rng: (
        0.5 + strength * (x - 0.5)
    ),  # the share of the contrast that stays
    "rotation": lambda x, strength, rng: ndimage.rotate(
        x, strength, axes=(1, 2), reshape=False, order=1
    ),  # degrees
}


def shifted(source: Examples, name: str, strength: float) -> Examples:
    """Returns the source with every image shifted, in memory. Randomness is public and fixed.

    Args:
      source: Images [H, W, C].
      name: One of `SHIFTS`.
      strength: As in the comments of `SHIFTS`.

    Raises:
      ValueError: The name is unknown.
    """
    if name not in SHIFTS:
        raise ValueError(f"config.data.strengths must name {', '.join(SHIFTS)}, got {name!r}.")
    columns = source.gather(np.arange(len(source)))
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    image = np.clip(SHIFTS[name](columns["image"], strength, rng), 0, 1)
    pixels = np.rint(255 * image).astype(np.uint8)
    return data.from_arrays(
        image=pixels,
        label=columns["label"],
        num_classes=source.num_classes,
        name=f"{source.name}/{name}",
    )
