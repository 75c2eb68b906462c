"""Examples that hold NaN or an infinity, counted for the person who holds them.

The counts are private. Nothing that is kept or published has them.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.transforms.clip_arguments import paths_of

FIRST_EXAMPLES = 1000
LEAST_EXAMPLES = 100  # whose gradients are looked at; below, a tenth would be a handful
LARGEST_SHARE = 0.1  # of examples without a finite gradient, with which a run starts unasked
PRIVATE = "The counts are private, and for the owner of the data."
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
        for path, leaf in paths_of(batch):
            if not is_floating(leaf.dtype):
                continue
            axes = tuple(range(1, leaf.ndim))
            bad = ~np.isfinite(np.asarray(leaf)).all(axes)
            examples |= bad
            if bad.any():
                columns[path] = int(bad.sum())
        return cls(read, int(examples.sum()), columns)

    def advice(self, argument: str) -> str:
        """Returns what the owner of the data must know about an argument with these counts."""
        return (
            f"{argument}: {self}. In private training such an example contributes nothing and "
            "costs what others cost, unless the loss masks what is missing. Put a public constant "
            f"in its place, or leave the examples out. {PRIVATE}"
        )

    def __str__(self) -> str:
        by_column = [f"{count} in {path!r}" for path, count in self.columns.items()]
        return (
            f"{self.examples} of the first {self.read} examples hold NaN or an infinity "
            f"({', '.join(by_column)})"
        )


def is_floating(dtype: Any) -> bool:
    """Returns whether numbers of a dtype can be NaN or infinite."""
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


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
    # One row tells the bytes of every row.
    row_bytes = sum(column.nbytes for column in jax.tree.leaves(floats(source, first[:1])))
    first = first[: max(1, _MOST_BYTES // max(1, row_bytes))]
    return NotFinite.among(floats(source, first), len(first))


def floats(source: Any, indices: np.ndarray) -> Any:
    """Returns at least the columns of floating point of the examples at `indices`, [B, ...] each.

    A source that can read them alone has a method of this name.
    """
    return getattr(source, "floats", source.gather)(indices)
