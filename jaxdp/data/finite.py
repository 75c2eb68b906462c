"""A warning about NaN and infinity among the first examples of a source."""

import warnings
from typing import Any

from jaxdp.transforms.not_finite import (
    FIRST_EXAMPLES,
    NotFinite,
    count_not_finite,
    floats,
)

__all__ = ["FIRST_EXAMPLES", "NotFinite", "count_not_finite", "floats", "warn_of_not_finite"]


def warn_of_not_finite(source: Any, argument: str) -> None:
    """Warns the owner of the data if some of the first examples hold NaN or an infinity."""
    counts = count_not_finite(source)
    if not counts.examples:
        return
    warnings.warn(
        f"{argument}: {counts}. In private training such an example contributes nothing and costs "
        "what others cost, unless the loss masks what is missing. Put a public constant in its "
        "place, or leave the examples out. The counts are private, and for the owner of the data.",
        stacklevel=3,
    )
