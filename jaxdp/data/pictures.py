"""Image files as pixels with a stated range, and columns of `Examples` that read them.

| what the file holds (mode of Pillow) | pixels | 0 and 1 in a batch are |
|---|---|---|
| grey of 1 or 8 bits (1, L, LA) | uint8 [H, W, 1] | 0 and 255 |
| grey of 16 bits (I;16, I;16B; PGM, which Pillow scales) | uint16 [H, W, 1] | 0 and 65535 |
| grey of 32 bits or floats (I, F) | float32 [H, W, 1] | the ends of `pixel_range`, required |
| all others | uint8 [H, W, 3], RGB | 0 and 255 |

`pixel_range=(low, high)` gives every file a range of its own, such as (0, 4095) for 12 bits in
files of 16. An image is turned as its EXIF orientation says. Alpha is dropped. Pillow keeps the
upper 8 bits of 16-bit colour.
"""

import dataclasses
import functools
import io
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp.files import Limits, check_image, optional, shown, understood

PixelRange = tuple[float, float]
# Images of any sizes to floats in [0, 1], [n, H, W, C].
PrepareImages = Callable[[Sequence[np.ndarray]], np.ndarray]
_GREY = ("1", "L", "LA", "La")
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N")
_ROUNDING = 1e-6  # by which a prepared pixel may be outside of [0, 1]
_AGAIN = "Get the file again, or leave its row out of the table."


def check_range(pixel_range: PixelRange | None) -> None:
    """Raises ValueError unless pixel_range is None or has two finite numbers, the smaller first."""
    if pixel_range is None:
        return
    is_pair = len(pixel_range) == 2 and all(map(math.isfinite, pixel_range))
    if not is_pair or not pixel_range[0] < pixel_range[1]:
        raise ValueError(
            "pixel_range must be (low, high) with low below high, such as (0, 4095), got "
            f"{pixel_range}."
        )


def scaled(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels as float32 in [0, 1]: uint8 by 255, uint16 by 65535, floats as they are."""
    if pixels.dtype.kind != "u":
        return pixels
    largest = np.iinfo(pixels.dtype).max
    return pixels.astype(np.float32) / np.float32(largest)


def like(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns floats in [0, 1] as pixels of a dtype, the inverse of `scaled`."""
    if dtype.kind != "u":
        return np.asarray(values, dtype)
    largest = np.iinfo(dtype).max
    return np.rint(largest * np.asarray(values)).astype(dtype)


def in_unit_range(prepared: np.ndarray) -> np.ndarray:
    """Returns the floats that `prepare` has made, in [0, 1] without rounding.

    Raises:
      ValueError: Some are outside. As pixels of 8 or 16 bits they would wrap around.
    """
    if np.any((prepared < -_ROUNDING) | (prepared > 1 + _ROUNDING)):
        raise ValueError(
            "prepare must return floats in [0, 1], but some are outside. Divide by the largest "
            "pixel value, and clip what a resize overshoots."
        )
    return np.clip(prepared, 0, 1)


def decode(data: bytes, what: str, *, pixel_range: PixelRange | None = None) -> np.ndarray:
    """Decodes an image file as the text of this module says.

    Args:
      data: The file.
      what: Its name in errors.
      pixel_range: The public numbers that become 0 and 1. Pixels outside of it are clipped. None
        takes the range of the pixel type.

    Raises:
      ValueError: The file is damaged, has several images, or pixels of 32 bits without a
          pixel_range.
    """
    pillow = optional("PIL.Image", "images")
    pillow_ops = optional("PIL.ImageOps", "images")
    with understood(what, _AGAIN), pillow.open(io.BytesIO(data)) as file:
        file_format = file.format
        frames = getattr(file, "n_frames", 1)
        if file_format == "MPO":  # a photograph and its preview
            frames = 1
        file.load()
        image = pillow_ops.exif_transpose(file)
        # Pillow scales PGM to 16 bits. Its older versions have the mode I for PNG of 16 bits too.
        is_16_bits = image.mode in _WIDE or (image.mode == "I" and file_format in ("PPM", "PNG"))
        is_unbounded = not is_16_bits and image.mode in ("I", "F")
        if not is_16_bits and not is_unbounded:
            image = image.convert("L" if image.mode in _GREY else "RGB")
        pixels = np.asarray(image)
        mode = image.mode
    if frames > 1:
        raise ValueError(f"{what} has {frames} images. Store each in a file of its own.")
    if is_unbounded and pixel_range is None:
        raise ValueError(
            f"{what} has grey pixels of 32 bits, or with a sign (mode {mode}), which have no "
            "largest value. Give their public range: pixel_range=(low, high)."
        )
    if is_16_bits:
        pixels = pixels.astype(np.uint16)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixel_range is None:
        return pixels
    low, high = pixel_range
    in_range = (pixels.astype(np.float64) - low) / (high - low)
    return np.clip(in_range, 0, 1).astype(np.float32)


def path_inside(root: pathlib.Path, path: str) -> bool:
    """Returns whether a path of a table, read as text, names something inside the folder.

    Example: "a/b.png" does. "", "../b.png", "/b.png" and "C:b.png" do not, on any system.
    """
    folders_and_name = pathlib.PurePosixPath(path.replace("\\", "/")).parts
    if not folders_and_name or ".." in folders_and_name:
        return False
    if path.startswith("/") or pathlib.PurePath(path).is_absolute():
        return False
    return not pathlib.PureWindowsPath(path).drive  # a drive on Windows only


@dataclasses.dataclass(frozen=True, eq=False)
class ImageFiles:
    """A column of `Examples`: pixels [n, H, W, C] in files, which are decoded when they are read.

    Attributes:
      root: The folder.
      paths: The path of each image, relative to the folder.
      prepare: Gives images one shape, see `jaxdp.data.from_folder`.
      limits: The limits on an image before it is decoded.
      pixel_range: As in `decode`.
    """

    root: pathlib.Path
    paths: Sequence[str]
    prepare: PrepareImages | None
    limits: Limits
    pixel_range: PixelRange | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the first image: uint8, uint16 or float32."""
        return self._first[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [n, H, W, C], read off the first image."""
        return (len(self.paths), *self._first[0])

    def __getitem__(self, rows: Any) -> np.ndarray:
        numbers = np.arange(len(self))[rows].tolist()
        paths = [self.paths[row] for row in numbers]
        shape, dtype = self._first
        images = []
        for path in paths:
            image = self._decoded(path)
            if image.dtype != dtype:
                raise ValueError(
                    f"{self._name(path)} has pixels of {8 * image.itemsize} bits, and the first "
                    f"image {8 * dtype.itemsize}. Store all images with one pixel type."
                )
            images.append(image)
        if not images:
            return np.zeros((0, *shape), dtype)
        if self.prepare is not None:
            return like(self._prepared(images), dtype)
        for path, image in zip(paths, images, strict=True):
            if image.shape != shape:
                raise ValueError(
                    f"{self._name(path)} has the shape {image.shape}, and the first one {shape}. "
                    "Give all images one shape with prepare=."
                )
        return np.stack(images)

    @functools.cached_property
    def _first(self) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and the dtype of the first image."""
        first = self._decoded(self.paths[0])
        if self.prepare is None:
            return first.shape, first.dtype
        return np.shape(self.prepare([self._given(first)]))[1:], first.dtype

    def _prepared(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the result of `prepare`, floats in [0, 1] up to rounding."""
        assert self.prepare is not None
        shape, _ = self._first
        prepared = np.asarray(self.prepare([self._given(image) for image in images]))
        if prepared.shape != (len(images), *shape):
            raise ValueError(
                f"prepare must return one image of the shape {shape} for each of {len(images)}, "
                f"got the shape {prepared.shape}."
            )
        return in_unit_range(prepared)

    def _given(self, image: np.ndarray) -> np.ndarray:
        """Returns an image as `prepare` takes it: uint8, or floats in [0, 1]."""
        return image if image.dtype == np.uint8 else scaled(image)

    def _name(self, path: str) -> str:
        return f"image {shown(os.fspath(self.root / path))}"

    def _decoded(self, path: str) -> np.ndarray:
        what = self._name(path)
        file = self.root / path
        if not file.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(
                f"{what} is a link to a file outside of the folder. Copy the file into the folder."
            )
        if not file.is_file():
            raise FileNotFoundError(
                f"{what} does not exist. Correct its path in the table, which is relative to the "
                "folder, or leave its row out."
            )
        data = file.read_bytes()
        # The header is checked first: a small file can decode to an image that fills the memory.
        check_image(data, shape=(), what=what, limits=self.limits, remedy=_AGAIN)
        return decode(data, what, pixel_range=self.pixel_range)
