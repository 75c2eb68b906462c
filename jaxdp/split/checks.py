"""Checks of arguments. An error names the argument and never shows a client's data."""

import math
from typing import Any

import numpy as np

from jaxdp.data import labels as shapes
from jaxdp.files import check_numbers


def at_least(low: int, **values: float) -> None:
    """Raises ValueError unless every value is at least `low`."""
    check_numbers(**values)
    for name, value in values.items():
        if not value >= low:
            raise ValueError(f"{name} must be at least {low}, got {value!r}.")


def not_negative(**values: float) -> None:
    """Raises ValueError unless every value is finite and at least 0."""
    check_numbers(**values)
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}.")


def check_labels(labels: Any, count: int, num_classes: int) -> None:
    """Raises unless labels are integers [count] in [0, num_classes) and `count` is at least 1.

    A TypeError is about the dtype, and a ValueError about the rest.
    """
    labels = np.asarray(labels)
    shapes.check_labels(labels, count)
    if not count:
        raise ValueError("images must not be empty. Give at least one image.")
    shapes.check_range(labels, num_classes)
