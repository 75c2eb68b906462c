"""Sources of arrays in memory or on disk, with the columns that have a meaning.

Every scaling constant is public and written in this file.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tree

from jaxdp.data.numbers import check_digits, check_mask, native
from jaxdp.data.sources import Examples
from jaxdp.files import check_count, shown


def from_arrays(
    *,
    num_classes: int = 0,
    name: str = "arrays",
    **columns: Any,
) -> Examples:
    """Copies local arrays into a source, one keyword per column.

        source = jaxdp.data.from_arrays(tokens=tokens, mask=mask, name="reviews")

    A later change of a given array does not reach the source. The dtype of a column is kept, except
    for three names with a meaning:

    - "image": Pixels, [n, H, W, C] or [n, H, W]: uint8 in 0..255, uint16 in 0..65535, or floating
      point in [0, 1], stored as float32. `gather` returns float32 in [0, 1] for all.
    - "features": Real numbers [n, d]. Floating point is stored as float32. Nothing is rescaled.
      Scale with public constants only.
    - "label", if num_classes is given: Integers [n] in [0, num_classes), stored as int32.

    A column of text [n] (or of UTF-8 bytes) is kept as text, and is no part of an example.
    `by_group` takes it as identifiers, such as those of patients.

    A memory-mapped column (`numpy.load(path, mmap_mode="r")`, `numpy.memmap`) stays on disk: its
    values are neither checked nor converted here, and `gather` reads its rows on demand.

    Numbers that a device would change are refused by name: whole numbers outside of 32 bits, long
    double, float64 that is infinite in float32. float64 whose last digits matter gives a warning
    (`jaxdp.data.numbers`).

    Single records with NaN are accepted, because private training zeroes their gradients. Records
    without any finite number are refused, because training on them spends the budget and learns
    nothing. Errors about the records are for the owner who loads the data, and are not a release.

    Args:
      num_classes: The number of classes, at least 2, a public declaration. It is not read off the
        labels. 0 declares none. With it, labels that are booleans or whole floating-point numbers
        are cast with a warning.
      name: The name of the source.
      columns: Arrays [n, ...] of numbers or booleans, or any nesting of such arrays, or texts [n].

    Raises:
      ValueError: There is no column, shapes do not match, labels, pixels or whole numbers are out
        of range, or no number is finite. No value is shown.
      TypeError: A dtype is not as above.
    """
    if not columns:
        raise ValueError(
            "from_arrays needs at least one column, for example image=, features= or tokens=."
        )
    check_count("num_classes", num_classes, 0)
    if num_classes == 1:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    if num_classes and "label" in columns:
        columns["label"] = _as_labels(columns["label"], num_classes)
    texts: dict[str, list[Any]] = {}
    arrays: dict[str, Any] = {}
    for key, value in columns.items():
        cells = _as_text(value)
        if cells is not None:
            texts[key] = cells
        elif key == "image":
            arrays[key] = _as_images(value)
        elif key == "features":
            arrays[key] = _as_features(value)
        else:
            arrays[key] = value
    if not arrays:
        raise TypeError(
            f"{shown(', '.join(texts))} of source {name!r} must not be all: a source needs an "
            "array [n, ...] of numbers, and texts are no part of an example. Encode them, for "
            "example with jaxdp.data.from_texts."
        )
    arrays = tree.map_structure_with_path(functools.partial(_as_column, name), arrays)
    return Examples(arrays, num_classes, name, texts=texts)


def _as_text(values: Any) -> list[Any] | None:
    """Returns the texts of an array [n] or list of texts or bytes, or None."""
    if isinstance(values, Mapping | tuple | np.memmap):  # nested columns, or numbers on disk
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # a nesting of several lengths
        return None
    if array.ndim != 1 or not array.size or array.dtype.kind not in "USTO":
        return None
    cells: list[Any] = array.tolist()
    return cells if all(isinstance(cell, str | bytes) for cell in cells) else None


def _as_array(values: Any, where: str) -> np.ndarray:
    """Returns an array. A memory-mapped one stays mapped."""
    check_mask(values, where)
    return values if isinstance(values, np.memmap) else np.asarray(values)


def _as_column(name: str, path: tuple[Any, ...], values: Any) -> np.ndarray:
    """Returns a column of numbers as an array. A memory-mapped column is not read."""
    key = shown("/".join(map(str, path)))
    array = _as_array(values, f"{key} of source {name!r}")
    if array.dtype.kind in "OSUMmT" or not array.ndim:
        raise TypeError(
            f"{key} of source {name!r} must be an array [n, ...] of numbers, got dtype "
            f"{array.dtype} and shape {array.shape}. Encode text and dates as numbers, and pad "
            "lists to one length."
        )
    if isinstance(array, np.memmap):
        return array
    is_float = array.dtype.kind == "f"
    if is_float and array.size and not np.isfinite(array).any():
        raise ValueError(
            f"{key} of source {name!r} has no finite number. The file is damaged. Get or make it "
            "again."
        )
    return array


def _as_labels(label: Any, num_classes: int) -> np.ndarray:
    """Returns labels as int32 [n], in [0, num_classes)."""
    check_mask(label, "label")
    labels = np.asarray(label)
    if labels.ndim != 1:
        raise ValueError(
            f"label must have shape [n], got {labels.shape}. Leave out num_classes for other "
            "labels."
        )
    is_whole = False
    if labels.dtype.kind in "fb":  # floats and booleans
        with np.errstate(invalid="ignore"):  # NaN is not whole, and needs no warning.
            is_whole = bool((labels.astype(np.float64) % 1 == 0).all())
    if is_whole:
        warnings.warn(
            f"label has dtype {labels.dtype} and is cast to int32. Store classes as integers.",
            stacklevel=3,
        )
        labels = labels.astype(np.int32)
    if not np.issubdtype(labels.dtype, np.integer):
        remedy = "Leave out num_classes for other labels."
        if labels.dtype.kind in "USTO":
            remedy = "Number the classes by a public list: [classes.index(name) for name in label]."
        raise TypeError(f"label must be integers, got dtype {labels.dtype}. {remedy}")
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(
            f"label must be in [0, {num_classes}), but some are outside. Declare num_classes to "
            "fit."
        )
    return labels.astype(np.int32)


def _as_images(image: Any) -> np.ndarray:
    """Returns pixels [n, H, W, C]. Memory-mapped pixels are not read."""
    image = _as_array(image, "image")
    if image.ndim == 3:
        image = image[..., None]
    if image.ndim != 4:
        raise ValueError(
            f"image must have shape [n, H, W, C] or [n, H, W], got {image.shape}. Give volumes "
            "another name than image."
        )
    # Only these have a public largest value by which they are scaled.
    is_integer = image.dtype.kind == "u" and image.dtype.itemsize <= 2
    if not is_integer and not np.issubdtype(image.dtype, np.floating):
        raise TypeError(
            "image must be uint8 in 0..255, uint16 in 0..65535 or floating point in [0, 1], got "
            f"dtype {image.dtype}. Subtract and divide by public constants to reach [0, 1]."
        )
    if is_integer or isinstance(image, np.memmap):
        return image  # `gather` scales the rows that it reads.
    if np.any((image < 0) | (image > 1)):
        raise ValueError(
            "image must be in [0, 1] when floating point. Divide by the largest possible pixel "
            "value."
        )
    return image.astype(np.float32)


def _as_features(features: Any) -> np.ndarray:
    """Returns real numbers [n, d]. Memory-mapped features are not read."""
    features = _as_array(features, "features")
    if features.ndim != 2:
        raise ValueError(
            f"features must have shape [n, d], got {features.shape}. Give other arrays another "
            "name."
        )
    if not np.issubdtype(features.dtype, np.number) or np.iscomplexobj(features):
        raise TypeError(f"features must be real numbers, got dtype {features.dtype}.")
    if isinstance(features, np.memmap) or not np.issubdtype(features.dtype, np.floating):
        return features
    features = native(features, "features")
    check_digits(features, "features")  # before the cast hides it
    return features.astype(np.float32)
