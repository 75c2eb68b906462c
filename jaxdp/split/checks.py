"""Checks of arguments. An error names the argument and never shows a client's data."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def at_least(low: int, **values: float) -> None:
    """Raises ValueError unless every value is at least `low`."""
    for name, value in values.items():
        if not value >= low:
            raise ValueError(f"{name} must be at least {low}, got {value!r}.")


def not_negative(**values: float) -> None:
    """Raises ValueError unless every value is finite and at least 0."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}.")


def one_of(choices: Sequence[Any], **values: Any) -> None:
    """Raises ValueError unless every value is one of the choices."""
    for name, value in values.items():
        if value not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}.")


def check_labels(labels: Any, count: int, num_classes: int) -> None:
    """Raises ValueError unless labels are `count` integers in [0, num_classes) and `count` is at least 1."""
    labels = np.asarray(labels)
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be {count} integers, one per image, got {labels.dtype} {list(labels.shape)}.")
    if not count:
        raise ValueError("images must not be empty. Give at least one image.")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels must be in [0, {num_classes}), the classes of the head. Some labels are outside.")
