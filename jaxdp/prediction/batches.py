"""Which records are in which batch of `train_with_bounds`, and how a batch is cut into blocks.

The batch of a record must not depend on other records. Otherwise a record that leaves would move
others to other batches, and one change of the data would be many.
"""

import math
from typing import Any

import numpy as np

from jaxdp.prediction.ensembles import partition_by_hash
from jaxdp.prediction.sums import BLOCK

# Gradients of more than _LARGE parameters are summed 8 records at a time, because XLA unrolls and
# vectorises that on a processor. It is six times faster than 12 at a time. Smaller gradients gain
# from fewer, longer fragments.
_LARGE = 2**14
_UNROLLED = 8
_FRAGMENT = 128
# The salt of the hash that assigns batches. It must be the same for every data set.
_SALT = b"jaxdp batches"


def rows_of_batches(
    data: Any,
    records: int,
    training: Any,
) -> np.ndarray:
    """Returns the rows of records of each step, [steps, batch], -1 for none.

    Args:
      data: The records.
      records: Their number.
      training: The `Training`.

    Raises:
      ValueError, TypeError: `order` or `batches` do not fit the records.
    """
    if training.order is not None:
        return _check_order(training.order, records)
    rows = _rows_of_epoch(data, records, training)
    return np.tile(rows, (training.epochs, 1))


def _rows_of_epoch(
    data: Any,
    records: int,
    training: Any,
) -> np.ndarray:
    """Returns rows [batches, batch]."""
    batches = training.batches
    threat = training.threat
    if threat == "replace_per_batch" and batches is None:
        # Consecutive full batches, as published. The rest of the records is left out.
        size = min(training.batch_size, records)
        full = records - records % size
        return np.arange(full).reshape(-1, size)
    by_contents = threat in ("add_remove", "remove")
    if batches is None:
        # The number of records is private under "add_remove", so one batch is the only number that
        # does not depend on it. With round(n / batch_size) batches a neighbour of n = 150 in
        # batches of 100 lay outside of its box.
        batches = 1
        if not by_contents:
            batches = max(1, round(records / training.batch_size))
    if threat != "add_remove" and batches > records:
        raise ValueError(
            f"batches={batches} must be at most {records}, the number of records. No batch may be "
            "empty."
        )
    if by_contents and batches > 1:
        # Positions shift when a record leaves, its content does not.
        # By contents, so that two equal records share a batch.
        batch_of_record = partition_by_hash(data, batches, salt=_SALT)
    else:
        batch_of_record = np.arange(records) % batches  # a replacement keeps its position
    members = [np.flatnonzero(batch_of_record == batch) for batch in range(batches)]
    places = max(1, *map(len, members))
    rows = np.full((batches, places), -1)
    for row, member in zip(rows, members, strict=True):
        row[: len(member)] = member
    return rows


def _check_order(order: np.ndarray, records: int) -> np.ndarray:
    """Checks rows [steps, batch]. The number of records is public, because they are replaced."""
    rows = np.asarray(order)
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"order must have shape [steps, batch], got {list(rows.shape)}.")
    if not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(f"order must be integers, got {rows.dtype}.")
    rows = rows.astype(np.int64)
    if rows.min() < -1 or rows.max() >= records:
        raise ValueError(
            f"order must hold rows in [0, {records}) of the data, or -1 for none. Some entries are "
            "outside."
        )
    if (rows < 0).all(axis=1).any():
        raise ValueError("order has a batch without records.")
    for batch in rows:
        members = batch[batch >= 0]
        if len(np.unique(members)) != len(members):
            raise ValueError(
                "order has a record twice in one batch. Its influence on the sum would be twice "
                "the clip."
            )
    return rows


def runs_without_repeats(rows: np.ndarray) -> tuple[int, ...]:
    """Returns the lengths of the longest runs of batches in which no record occurs twice (T8).

    Rows [[0], [1], [1], [0]] have the runs [0], [1] and [1], [0], of lengths (2, 2).
    """
    lengths: list[int] = []
    seen: set[int] = set()
    for batch in rows:
        members = {*batch[batch >= 0].tolist()}
        if not lengths or seen & members:
            lengths.append(0)
            seen = set()
        lengths[-1] += 1
        seen |= members
    return tuple(lengths)


def cut_batch(batch: int, parameters: int) -> tuple[int, int, int]:
    """Returns the cut of a batch: (outer blocks, fragments in each, records in a fragment).

    All blocks of all batches have one size. A matrix product of another shape would sum in another
    order, and a record's bounds would depend on the number of other records.
    """
    fragment = _UNROLLED if parameters > _LARGE else _FRAGMENT
    return math.ceil(batch / BLOCK), BLOCK // fragment, fragment
