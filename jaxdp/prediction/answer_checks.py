"""Checks of the labels, distances and declared ranges that mechanisms get.

Messages contain no values of labels and distances, which are private.
"""

import math
from typing import Any

import numpy as np

LARGEST_CLASSES = 2**20


def check_classes(num_classes: int) -> int:
    """Returns the number of classes. Raises ValueError unless it is an integer in range."""
    if num_classes != int(num_classes) or not 2 <= num_classes <= LARGEST_CLASSES:
        raise ValueError(
            f"num_classes must be an integer in [2, {LARGEST_CLASSES}], got {num_classes!r}."
        )
    return int(num_classes)


def check_binary(mechanism: str, num_classes: int) -> None:
    """Raises ValueError, with the name of the mechanism, unless there are two classes."""
    if num_classes != 2:
        raise ValueError(
            f"{mechanism} answers two classes, not {num_classes}. Use randomised_response, or "
            "global_response without certificates."
        )


def check_distances(distances: Any) -> np.ndarray:
    """Returns distances as int64. Raises ValueError unless they are integers >= 0."""
    array = np.asarray(distances)
    if not np.issubdtype(array.dtype, np.integer) or (array < 0).any():
        raise ValueError(
            f"distances must be integers >= 0, got dtype {array.dtype}. Clip them at 0."
        )
    return array.astype(np.int64)


def check_labels(
    labels: Any,
    num_classes: int,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Returns labels [Q] as int64. Raises ValueError for another shape or a label out of range."""
    array = np.asarray(labels)
    if not np.issubdtype(array.dtype, np.integer) or array.shape != shape or len(shape) != 1:
        raise ValueError(
            f"labels must be integers [Q] like distances, got {array.dtype} {array.shape} and "
            f"{shape}."
        )
    if ((array < 0) | (array >= num_classes)).any():
        raise ValueError(f"labels must lie in [0, num_classes={num_classes}).")
    return array.astype(np.int64)


def check_range(output_range: tuple[float, float]) -> tuple[float, float]:
    """Returns a declared (low, high) as floats. Raises ValueError unless finite and low < high."""
    low, high = (float(end) for end in output_range)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"output_range must be finite (low, high) with low < high, got {output_range!r}."
        )
    return low, high
