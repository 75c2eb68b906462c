"""Examples that hold NaN or an infinity, counted for the person who holds them.

The counts are private. Nothing that is kept or published has them.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

FIRST_EXAMPLES = 1000
_MOST_BYTES = 2**24  # examples that are read on demand, such as volumes, may be large


class NotFinite(NamedTuple):
    """Examples that hold NaN or an infinity, among the first ones of a source. Private.

    Attributes:
      read: The number of examples that were read.
      examples: The number of these with such a number in any column.
      columns: {path of a column: the number of examples with such a number in it}, without zeros.
    """

    read: int
    examples: int
    columns: dict[str, int]

    @classmethod
    def among(cls, batch: Any, read: int) -> "NotFinite":
        """Counts the examples of a batch, a pytree of arrays [read, ...]."""
        columns = {}
        examples = np.zeros(read, bool)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if not jax.dtypes.issubdtype(leaf.dtype, np.inexact):
                continue
            axes = tuple(range(1, leaf.ndim))
            bad = ~np.isfinite(np.asarray(leaf)).all(axes)
            examples |= bad
            if bad.any():
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                columns[name] = int(bad.sum())
        return cls(read, int(examples.sum()), columns)

    def __str__(self) -> str:
        by_column = [f"{count} in {path!r}" for path, count in self.columns.items()]
        return (
            f"{self.examples} of the first {self.read} examples hold NaN or an infinity "
            f"({', '.join(by_column)})"
        )


def count_not_finite(source: Any, *, examples: int = FIRST_EXAMPLES) -> NotFinite:
    """Counts the first examples of a source that hold NaN or an infinity, by column.

    At most 16 MiB are read, but at least one example. `Examples` read only their columns of
    floating point, so images of integers are not decoded.

    Args:
      source: A `jaxdp.data.Source`. An example of `Groups` is an owner of records.
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
