"""Which records of a source count: a public choice of rows, a few of each class, those of an owner.

A choice by position depends on the number of records and a public seed only, so it costs nothing.
`few_shots` and `smallest_class` read labels: use them for public data, or as the owner of the data.

The units of privacy of a source are its records, or with the name of a column `group` the owners in
that column, each with all of its records.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxdp.data.arrays import from_arrays
from jaxdp.data.groups import Groups, by_group
from jaxdp.data.ids import owners_of
from jaxdp.data.order import shuffled
from jaxdp.data.owners import by_owners
from jaxdp.data.protocol import check_source
from jaxdp.data.sources import Examples, read_column, read_ids

_ROWS_AT_ONCE = 256  # of images that are computed when they are read


def choose(count: int, chosen: int, *, seed: int) -> np.ndarray:
    """Returns a public choice of `chosen` of `count` rows in a random order, int64 [chosen]."""
    return shuffled(count, seed=seed)[:chosen]


def at_most(source: Examples, count: int, *, seed: int) -> Examples:
    """Returns a public choice of `count` records in a random order. 0 takes all records."""
    return source.take(choose(len(source), count or len(source), seed=seed))


def smallest_class(source: Examples) -> int:
    """Returns the number of records of the rarest class."""
    labels = read_column(source, "label")
    return int(np.bincount(labels, minlength=source.num_classes).min())


def few_shots(source: Examples, shots: int, *, seed: int | None) -> dict[str, np.ndarray]:
    """Returns `shots` records of every class, class by class.

    Args:
      source: Records with labels.
      shots: The number of records of each class.
      seed: The seed of a choice without replacement. None takes the first records of each class.

    Raises:
      ValueError: A class has fewer records.
    """
    most = smallest_class(source)
    if most < shots:
        raise ValueError(
            f"shots must be at most {most}, the size of the smallest class, got {shots}."
        )
    labels = read_column(source, "label")
    of_class = [np.flatnonzero(labels == k) for k in range(source.num_classes)]
    if seed is None:
        rows = [members[:shots] for members in of_class]
    else:
        # This is not `shuffled`: one generator serves all classes, and results on record have its
        # draws.
        generator = np.random.Generator(np.random.Philox(key=seed))
        rows = [generator.choice(members, shots, replace=False) for members in of_class]
    return source.gather(np.concatenate(rows))


# --- Units of privacy ---------------------------------------------------------------------------


def units(
    records: Examples,
    group: str,
    *,
    max_records: int,
    separator: str = "",
    computed: Any = None,
) -> Any:
    """Returns private records by unit of privacy.

    Args:
      records: The private records.
      group: The column with the owner of each record. "" makes each record a unit.
      max_records: The largest number of records of one owner that count, see `by_group`.
      separator: The text between the owners of one record, see `by_owners`. "" has one owner each.
      computed: Another source in the order of `records`, such as their features, which lacks the
        column of the owners. The units then hold its examples. None takes `records`.

    Returns:
      `Groups`, `Owners` with a separator, or the records themselves without a group.
    """
    source: Any = records if computed is None else computed
    if not group:
        return source
    owners: Any = group if computed is None else read_ids(records, group)
    if separator:
        return by_owners(source, owners, max_records=max_records, separator=separator)
    return by_group(source, owners, max_records=max_records)


def one_each(records: Examples, group: str) -> Examples:
    """Returns the first record of each owner, for a guarantee that is for one record.

    Without a group these are all records.
    """
    if not group:
        return records
    first_rows = by_group(records, group, max_records=1).rows[:, 0]
    return records.take(first_rows)


def held(units: Any) -> tuple[Examples, np.ndarray]:
    """Returns the records that count of `units`, in their order, and the number of each's owner."""
    if not isinstance(units, Groups):
        return units, np.arange(len(units))
    records: Any = units.source
    owners, columns = np.nonzero(units.rows >= 0)  # -1 fills up the rows of an owner
    rows = units.rows[owners, columns]
    order = np.argsort(rows)
    return records.take(rows[order]), owners[order]


def cut(source: Examples, pieces: int, *, group: str = "") -> Sequence[Examples]:
    """Returns a source in pieces of nearly equal numbers of units, in its order.

    No two pieces share an owner. The division follows from positions, so each piece is a data set
    of its own, and a neighbour differs in one piece.
    """
    owners = np.arange(len(source))
    if group:
        owners = owners_of(read_ids(source, group), len(source))
    number_of_owners = owners.max(initial=-1) + 1
    owners_by_piece = np.array_split(np.arange(number_of_owners), pieces)
    return [source.take(np.flatnonzero(np.isin(owners, mine))) for mine in owners_by_piece]


# --- Whole sources ------------------------------------------------------------------------------


def everything(source: Examples) -> dict[str, np.ndarray]:
    """Returns all columns of a source."""
    return source.gather(np.arange(len(source)))


def load_pixels(
    source: Examples, *, name: str = "", progress: Callable[[Any], Iterable[Any]] = iter
) -> Examples:
    """Returns a source with all images in memory as uint8, so that each is computed once.

    Args:
      source: Images with labels.
      name: The name of the result, by default that of the source.
      progress: Shows the progress over a sequence of batches, as tqdm does.
    """
    batches = np.split(np.arange(len(source)), range(_ROWS_AT_ONCE, len(source), _ROWS_AT_ONCE))
    images, labels = [], []
    for rows in progress(batches):
        columns = source.gather(rows)
        images.append(np.rint(255 * columns["image"]).astype(np.uint8))
        labels.append(columns["label"])
    return from_arrays(
        image=np.concatenate(images),
        label=np.concatenate(labels),
        num_classes=source.num_classes,
        name=name or source.name,
    )


def turned(source: Examples, quarters: int) -> Examples:
    """Returns a source with its images rotated by quarter turns."""
    if quarters % 4 == 0:
        return source
    columns = everything(source)
    return from_arrays(
        image=np.rot90(columns["image"], quarters, axes=(1, 2)),
        label=columns["label"],
        num_classes=source.num_classes,
        name=source.name,
    )


def image_shape(source: Examples, *, argument: str = "source") -> tuple[int, ...]:
    """Returns (height, width, channels) of the images.

    Args:
      source: The source.
      argument: What an error calls it.

    Raises:
      ValueError: The source has no images.
    """
    example = check_source(source, "image", argument=f"{argument}: {source.name!r}")
    return example["image"].shape
