"""The protocol of data, and its check."""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

import jax
import numpy as np

from jaxdp.data.numbers import check_batch, check_digits
from jaxdp.data.storage import immutable
from jaxdp.files import shown
from jaxdp.transforms.not_finite import count_not_finite

_REMEDY = "Make one with jaxdp.data.from_arrays or another from_ function."


@runtime_checkable
class Source(Protocol):
    """Examples by position, as every trainer, stream and evaluation of this library reads them.

    `jaxdp.data.Examples` is the implementation of this library. A class of your own needs these
    three members, and no base class. It may have a `name` (str) for messages and `num_classes`
    (int) for functions that need classes.
    """

    def __len__(self) -> int:
        """Returns the number n of examples, which is public."""

    def gather(self, indices: np.ndarray, /) -> Any:
        """Returns the examples at `indices`, stacked along a new first axis.

        The result depends on the indices and the stored records only. An index may repeat. Equal
        calls give equal bits.

        Args:
          indices: int64 [B] in [0, n), B >= 0.

        Returns:
          Any pytree of numeric or boolean arrays [B, ...]: NumPy or JAX, each with a fixed dtype
          and example shape. Nobody changes them later: some readers give them to a device without a
          copy.
        """

    @property
    def fingerprint(self) -> str:
        """A text that differs if any record differs, such as a hash of the content.

        It is read for every release, and must be of what `gather` returns from then on. A class
        that keeps it refuses records that have changed since. A release that repeats after a crash
        compares it. Equal texts for different records would give both the same noise, and their
        difference would reveal records.
        """


def check_members(source: Any, argument: str = "source") -> None:
    """Raises TypeError if an object lacks a member of `Source`. It reads nothing."""
    members = {
        name: inspect.getattr_static(source, name, None)
        for name in ("__len__", "gather", "fingerprint")
    }
    what = f"{argument} must be a jaxdp.data.Source"
    if missing := [name for name, member in members.items() if member is None]:
        raise TypeError(
            f"{what}, but {type(source).__name__} has no {', '.join(missing)}. {_REMEDY}"
        )
    if inspect.isfunction(members["fingerprint"]):
        raise TypeError(
            f"{what}, whose fingerprint is a text or a property. {type(source).__name__} has a "
            "method."
        )


def check_source(
    source: Any,
    *columns: str,
    argument: str = "source",
    values: bool = True,
) -> Any:
    """Checks that an object is a `Source`, and reads its first and last examples.

    The fingerprint is not read. Errors show columns, dtypes and shapes, and no value of a record.
    float64 whose digits float32 loses gives a warning (`jaxdp.data.numbers`). NaN and infinities
    give one too: how many of the first thousand examples hold them, by column
    (`count_not_finite`). That warning is for the owner of the data.

    Args:
      source: The object.
      columns: Columns that its examples must have. Examples are then dicts.
      argument: The name of the object in errors.
      values: Whether numbers that a device would change are an error. False is for a caller that
          converts them. It also looks for no NaN and no infinity.

    Returns:
      The structure of one example: a pytree of `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: A member is missing or of another kind, or `gather` does not return arrays of
          numbers.
      ValueError: An array of `gather` has another first axis than the indices, or whole numbers
        outside of 32 bits. Or a column is missing.
    """
    check_members(source, argument)
    # Two examples tell the structure, and whether it is the same at both ends.
    ends = [0, len(source) - 1] if len(source) else []
    rows = np.array(ends, np.int64)
    batch = source.gather(rows)
    _check_columns(source, batch, columns, argument)
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    call = f"gather({rows.tolist()}) of {type(source).__name__}"
    what = f"{argument} must be a jaxdp.data.Source, but {call} returned"
    if not leaves:
        raise TypeError(f"{what} no array. {_REMEDY}")
    for path, leaf in leaves:
        _check_leaf(leaf, len(rows), f"{what} at {_name(path) or 'its root'!r}")
    if values:
        for path, leaf in jax.tree_util.tree_flatten_with_path(check_batch(batch, argument))[0]:
            if isinstance(leaf, np.ndarray):
                check_digits(leaf, f"{_name(path)!r} of {argument}")
        warn_of_not_finite(source, argument)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def warn_of_not_finite(source: Any, argument: str) -> None:
    """Warns the owner of the data if some of the first examples hold NaN or an infinity."""
    counts = count_not_finite(source)
    if counts.examples:
        warnings.warn(counts.advice(argument), stacklevel=3)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_columns(
    source: Source,
    batch: Any,
    columns: tuple[str, ...],
    argument: str,
) -> None:
    """Raises ValueError unless a batch has the columns. The message says which are text."""
    missing = [name for name in columns if not (isinstance(batch, dict) and name in batch)]
    if not missing:
        return
    has = type(batch).__name__
    if isinstance(batch, dict):
        has = ", ".join(sorted(map(str, batch)))
    hint = ""
    if texts := [name for name in missing if name in getattr(source, "text_names", ())]:
        hint = f" {', '.join(texts)} is text, which no example has: declare classes=, or encode it."
    names = ", ".join(map(repr, missing))
    raise ValueError(shown(f"{argument} has no column {names}. It has {has}.{hint}"))


def _check_leaf(leaf: Any, count: int, what: str) -> None:
    """Raises TypeError or ValueError unless a leaf is an array [count, ...] of numbers."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        raise TypeError(f"{what} a {type(leaf).__name__}. Return arrays.")
    if leaf.dtype.kind in "OSUMm":
        raise TypeError(
            f"{what} the dtype {leaf.dtype}. Encode text, dates and lists of several lengths as "
            "numbers of one shape."
        )
    if leaf.shape[:1] != (count,):
        raise ValueError(f"{what} the shape {leaf.shape}. The first axis must be {count}.")


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOf:
    """Rows of another source, whose name and classes it has.

    Attributes:
      source: The other source.
      rows: int64 [n, ...], positions in it.
    """

    source: Source = dataclasses.field(repr=False)
    rows: np.ndarray = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", immutable(np.asarray(self.rows, np.int64)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        """The name of the records."""
        return getattr(self.source, "name", "records")

    @property
    def num_classes(self) -> int:
        """The number of classes that the records declare, or 0."""
        return getattr(self.source, "num_classes", 0)


class Units(RowsOf):
    """A source of units of privacy, whose examples lack the column `without` of the owners."""

    without: str

    def take(self, indices: np.ndarray) -> Self:
        """Returns the units at `indices`, integers [m] in [0, n), as a source of the same class.

        So whoever charges for a part still sees how many records an owner has.

        Raises:
          ValueError: An index repeats. An owner would have more records than `max_records`.
        """
        positions = np.asarray(indices, np.int64)
        if len(np.unique(positions)) < len(positions):
            raise ValueError(
                "indices must differ for a source of jaxdp.data.by_group or by_owners: an owner "
                "would have more than max_records records."
            )
        return dataclasses.replace(self, rows=self.rows[positions])

    def shown(self, records: Any) -> Any:
        """Returns gathered records without the column of the owners."""
        if not isinstance(records, Mapping):
            return records
        return {key: column for key, column in records.items() if key != self.without}


def inputs_of(batch: Mapping[str, Any]) -> Any:
    """Returns the input of a model: "image", else "features", else all columns but "label"."""
    others = {name: column for name, column in batch.items() if name != "label"}
    return others.get("image", others.get("features", others))
