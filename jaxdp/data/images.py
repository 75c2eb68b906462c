"""Images of one data set in the shape that a model for another one takes."""

import dataclasses

import numpy as np

from jaxdp.data.sources import Source

_CHUNK_ROWS = 1024


def fit_images(source: Source, size: int = 0, channels: int = 0) -> Source:
    """Resizes the images of a source, and makes grey ones RGB.

    A function of each image by itself and of public numbers: no release about the records.

    Args:
      source: with images [H, W, C], all of which are read and kept in memory if there is anything to do.
      size: side of the square images; 0 leaves them as they are. Shrinking averages over the area that a new pixel
        covers, enlarging interpolates linearly; the aspect ratio is not kept.
      channels: C; 0 leaves it as it is. One channel is repeated; nothing else can be changed.

    Returns:
      A source of the same name with images [size, size, channels], stored like those of the given one; or the given
      one.

    Raises:
      ValueError: the source has no images, size or channels are negative, or several channels should become another
        number.
    """
    if "image" not in source.arrays:
        raise ValueError(f"source {source.name!r} has no images to fit; it has {', '.join(sorted(source.arrays))}")
    if size < 0 or channels < 0:
        raise ValueError(f"size and channels must be at least 0, got {size} and {channels}")
    height, width, given = source.arrays["image"].shape[1:]
    shape = (size, size) if size else (height, width)
    channels = channels or given
    if channels != given and given != 1:
        raise ValueError(f"channels must be {given} or 0 for source {source.name!r}, whose images have {given}")
    if (*shape, channels) == (height, width, given):
        return source
    whole = source.arrays["image"].dtype == np.uint8
    image = np.empty((len(source), *shape, channels), np.uint8 if whole else np.float32)
    label = np.empty(len(source), np.int32)
    for start in range(0, len(source), _CHUNK_ROWS):
        rows = np.arange(start, min(len(source), start + _CHUNK_ROWS))
        examples = source.gather(rows)
        resized = np.clip([resize(one, shape) for one in examples["image"]], 0, 1)  # [rows, height, width, given]
        image[rows] = np.broadcast_to(np.rint(255 * resized) if whole else resized, (len(rows), *shape, channels))
        label[rows] = examples["label"]
    for column in (image, label):
        column.flags.writeable = False
    return dataclasses.replace(source, arrays={"image": image, "label": label}, rows=None)


def resize(image: np.ndarray, shape: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    """Resizes one uint8 or float32 image [H, W, C] with a filter of Pillow, whose support grows when it shrinks."""
    from PIL import Image

    if image.shape[:2] == shape:
        return image
    resample = Image.Resampling[interpolation.upper()]
    channels = [Image.fromarray(np.ascontiguousarray(channel)) for channel in np.moveaxis(image, -1, 0)]
    return np.stack([np.asarray(channel.resize(shape[::-1], resample)) for channel in channels], axis=-1)
