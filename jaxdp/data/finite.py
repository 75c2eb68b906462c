"""A warning about NaN and infinity among the first examples of a source."""

import warnings
from typing import Any

from jaxdp.transforms.not_finite import (
    NotFinite,
    count_not_finite,
    floats,
)

__all__ = ["NotFinite", "count_not_finite", "floats", "warn_of_not_finite"]


def warn_of_not_finite(source: Any, argument: str) -> None:
    """Warns the owner of the data if some of the first examples hold NaN or an infinity."""
    counts = count_not_finite(source)
    if counts.examples:
        warnings.warn(counts.advice(argument), stacklevel=3)
