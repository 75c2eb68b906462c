"""How many of the first examples of a source hold NaN or an infinity."""

import warnings
from typing import Any

import jax
import numpy as np

from jaxdp.transforms.not_finite import NotFinite

FIRST_EXAMPLES = 1000
_MOST_BYTES = 2**24  # examples that are read on demand, such as volumes, may be large


def count_not_finite(source: Any, *, examples: int = FIRST_EXAMPLES) -> NotFinite:
    """Counts the first examples of a source that hold NaN or an infinity, by column.

    At most 16 MiB are read, but at least one example. `Examples` read only their columns of
    floating point, so images of integers are not decoded.

    Args:
      source: A `Source`. An example of `Groups` is an owner of records.
      examples: The largest number of examples to read.

    Returns:
      The counts. They are private, and for the owner of the data.
    """
    first = np.arange(min(len(source), examples))
    row_bytes = sum(column.nbytes for column in jax.tree.leaves(floats(source, first[:1])))
    first = first[: max(1, _MOST_BYTES // max(1, row_bytes))]
    return NotFinite.among(floats(source, first), len(first))


def floats(source: Any, indices: np.ndarray) -> Any:
    """Returns at least the columns of floating point of the examples at `indices`, [B, ...] each.

    A source that can read them alone has a method of this name.
    """
    return getattr(source, "floats", source.gather)(indices)


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
