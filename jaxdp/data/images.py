"""Resizing of images for a model of another data set."""

import dataclasses

import numpy as np
import tree

from jaxdp.data.pictures import like, scaled
from jaxdp.data.protocol import check_source
from jaxdp.data.sources import Examples
from jaxdp.data.storage import ExampleReader
from jaxdp.files import optional

_CHUNK_ROWS = 1024


def resize_images(source: Examples, size: int = 0, channels: int = 0) -> Examples:
    """Resizes the images of a source, and makes grey ones RGB.

    Each image depends on one record and public numbers only, so this is no release about the
    records.

    Args:
      source: Examples with an "image" [H, W, C]. All of them are copied if anything changes.
      size: The side of the square images. 0 keeps the size. Shrinking averages over the area that a
        new pixel covers, enlarging interpolates linearly. The aspect ratio is not kept.
      channels: C. 0 keeps the channels. Only one channel can be changed, by repetition.

    Returns:
      A source of the same name and storage with images [size, size, channels], or the given source
      if nothing changes.

    Raises:
      ValueError: The source has no images, size or channels is negative, or several channels would
          change.
    """
    if size < 0 or channels < 0:
        raise ValueError(f"size and channels must be at least 0, got {size} and {channels}.")
    example = check_source(source, "image", argument=f"source {source.name!r}")
    height, width, stored_channels = example["image"].shape
    shape = (size, size) if size else (height, width)
    channels = channels or stored_channels
    if channels != stored_channels and stored_channels != 1:
        raise ValueError(
            f"channels must be {stored_channels} or 0 for source {source.name!r}, whose images "
            f"have {stored_channels}."
        )
    if (*shape, channels) == (height, width, stored_channels):
        return source
    if isinstance(source.arrays, ExampleReader):
        source = source.load()
    stored = source.column("image")
    rows = source.positions
    others = {key: column for key, column in source.arrays.items() if key != "image"}
    dtype = stored.dtype if stored.dtype.kind == "u" else np.dtype(np.float32)
    image = np.empty((len(rows), *shape, channels), dtype)
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = scaled(stored[rows[start : start + _CHUNK_ROWS]])
        resized = np.clip([resize(picture, shape) for picture in chunk], 0, 1)
        # The assignment repeats a single channel.
        image[start : start + len(chunk)] = like(resized, dtype)
    arrays = {**tree.map_structure(lambda array: array[rows], others), "image": image}
    texts = {key: source.text(key) for key in source.text_names}
    return dataclasses.replace(source, arrays=arrays, rows=None, declared="", texts=texts)


def resize(
    image: np.ndarray, shape: tuple[int, int], interpolation: str = "bilinear"
) -> np.ndarray:
    """Resizes one uint8 or float32 image [H, W, C] with a Pillow filter.

    The filter averages over the area of a new pixel when the image shrinks.
    """
    if image.shape[:2] == shape:
        return image
    pillow = optional("PIL.Image", "images")
    resample = pillow.Resampling[interpolation.upper()]

    def resized(channel: np.ndarray) -> np.ndarray:
        picture = pillow.fromarray(np.ascontiguousarray(channel))
        return np.asarray(picture.resize(shape[::-1], resample))

    # Pillow has float32 images of one channel only.
    channels = [resized(channel) for channel in np.moveaxis(image, -1, 0)]
    return np.stack(channels, axis=-1)
