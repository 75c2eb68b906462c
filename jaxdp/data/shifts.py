"""Domain shifts of images: one description and one function for all of them.

    test = jaxdp.data.bundled("digits")
    foggy = shifted(test, Shift("fog", severity=5))        # a corruption of CIFAR-10-C
    turned = shifted(test, Shift("rotation", strength=30))   # a strong shift of small grey images

A shift is one of four kinds:

    CLEAN                         no shift
    Shift(name, severity=)        `jaxdp.data.corrupt`, computed whenever an image is read
    Shift(name, published=)       a set of TFDS whose images are corrupted already
    Shift(name, strength=)        one of `STRENGTHS`, computed at once for all images

The kinds with a severity and with a strength have different random streams. `corrupt` draws for
each position, so that `take` changes no image. `STRENGTHS` draws once for the whole array, because
results on record have these draws.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import numpy as np
from scipy import ndimage

from jaxdp.data.arrays import from_arrays
from jaxdp.data.corruptions import corrupt, corrupted_tfds
from jaxdp.data.selection import everything
from jaxdp.data.sources import Examples

CLEAN = "clean"  # no shift

Pixels = np.ndarray  # float [n, H, W, C] in [0, 1]


def _noise(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Adds noise whose standard deviation is the strength."""
    return images + strength * rng.normal(size=images.shape)


def _impulse(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Makes a share of the pixels black or white."""
    replaced = rng.random(images.shape) < strength
    white = rng.random(images.shape) < 0.5
    return np.where(replaced, white, images)


def _brightness(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Adds the strength to every pixel."""
    return images + strength


def _blur(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Blurs by a Gaussian whose standard deviation is the strength, in pixels."""
    return ndimage.gaussian_filter(images, (0, strength, strength, 0))


def _speckle(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Adds noise in proportion to each pixel."""
    return images + strength * images * rng.normal(size=images.shape)


def _contrast(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Keeps a share of the contrast."""
    return 0.5 + strength * (images - 0.5)


def _rotation(images: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Rotates by the strength, in degrees."""
    return ndimage.rotate(images, strength, axes=(1, 2), reshape=False, order=1)


# Strong shifts of small grey images: a network that reads digits withstands most corruptions of
# CIFAR-10-C.
STRENGTHS: Mapping[str, Callable[[Pixels, float, np.random.Generator], Pixels]] = {
    "noise": _noise,
    "impulse": _impulse,
    "brightness": _brightness,
    "blur": _blur,
    "speckle": _speckle,
    "contrast": _contrast,
    "rotation": _rotation,
}


@dataclasses.dataclass(frozen=True)
class Shift:
    """A shift of images, see above.

    Attributes:
      name: `CLEAN`, a name of `STRENGTHS` if there is a strength, else a corruption.
      severity: 1 to 5, of a corruption.
      strength: Of one of `STRENGTHS`, in the unit of its docstring.
      published: The set of TFDS with the corrupted images, see `corrupted_tfds`. "" computes them.
      data_dir: The folder of that set, as in `from_tfds`.
      in_memory: Whether all images of that set are kept in memory, or read on demand.
    """

    name: str = CLEAN
    severity: int = 5
    strength: float | None = None
    published: str = ""
    data_dir: str = ""
    in_memory: bool = True

    @property
    def reads_images(self) -> bool:
        """Whether the images under the shift are made from images without it."""
        return self.name == CLEAN or not self.published


def shifted(source: Examples | None, shift: Shift) -> Examples:
    """Returns images under a shift, in the order of the images without it.

    Args:
      source: The images without a shift. None if the shift reads none, see `Shift.reads_images`.
      shift: The shift.

    Raises:
      ValueError: The shift needs images and gets none, or its name is unknown.
      FileNotFoundError: The published images are not prepared.
    """
    if not shift.reads_images:
        return corrupted_tfds(
            shift.published,
            shift.name,
            shift.severity,
            data_dir=shift.data_dir or None,
            in_memory=shift.in_memory,
        )
    if source is None:
        raise ValueError(f"source must have the images for the shift {shift.name!r}, got none.")
    if shift.strength is not None:
        return _strongly_shifted(source, shift.name, shift.strength)
    if shift.name == CLEAN:
        return source
    return corrupt(source, shift.name, severity=shift.severity)


def _strongly_shifted(source: Examples, name: str, strength: float) -> Examples:
    """Returns the source with every image shifted, in memory as uint8."""
    if name not in STRENGTHS:
        raise ValueError(f"name must be one of {', '.join(STRENGTHS)}, got {name!r}.")
    columns = everything(source)
    # `hash` of a text differs from process to process.
    rng = np.random.default_rng(zlib.crc32(name.encode()))  # public, and its own for each shift
    images = np.clip(STRENGTHS[name](columns["image"], strength, rng), 0, 1)
    return from_arrays(
        image=np.rint(255 * images).astype(np.uint8),
        label=columns["label"],
        num_classes=source.num_classes,
        name=f"{source.name}/{name}",
    )
