"""Users or patients as examples: example i of the source is all records of user i.

    patients = jaxdp.data.by_group(scans, group="patient", max_records=4)
    sampler = jaxdp.data.PoissonSampler(len(patients), 0.1)   # draws patients with their records
    trainer = jaxdp.finetune.dp_sgd(..., sampler=sampler, group=True, unit="patient")

Only the number of users and `max_records` are public. Who has which records, and how many, stays
private.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.data.ids import owners_of
from jaxdp.data.protocol import Source, Units
from jaxdp.data.sources import read_ids
from jaxdp.files import check_count
from jaxdp.transforms.not_finite import floats


class Records(NamedTuple):
    """The records of B users.

    Attributes:
      records: A pytree of arrays [B, k, ...].
      present: bool [B, k]. False marks padding, which repeats the first record of the same user.
    """

    records: Any
    present: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Units):
    """A `Source` whose examples are users. `by_group` makes it.

    Attributes:
      source: The records.
      rows: int64 [users, k]. The positions of each user's records in `source`, filled up with -1.
          Private.
      without: A column that `gather` leaves out, or "".
    """

    without: str = ""

    def __getitem__(self, index: int) -> Records:
        """Returns the records of one user: leaves [k, ...], and `present` [k]."""
        return jax.tree.map(lambda x: x[0], self.gather(np.array([index])))

    def gather(self, indices: np.ndarray) -> Records:
        """Returns the records of the users at `indices`, integers [B] in [0, users)."""
        return self._gathered(self.source.gather, indices)

    def floats(self, indices: np.ndarray) -> Any:
        """Returns the columns of floating point of the users at `indices`, [B, k, ...] each."""
        return self._gathered(functools.partial(floats, self.source), indices).records

    def _gathered(self, read: Callable[[np.ndarray], Any], indices: np.ndarray) -> Records:
        rows = self.rows[np.asarray(indices, np.int64)]
        present = rows >= 0
        # Padding repeats the first record of the same user, so that it reveals nobody else's.
        padded = np.where(present, rows, rows[:, :1])
        records = self.shown(read(padded.reshape(-1)))

        def by_user(column: Any) -> Any:
            return column.reshape(*rows.shape, *column.shape[1:])

        return Records(jax.tree.map(by_user, records), present)

    @property
    def fingerprint(self) -> str:
        """A SHA-256 (64 hex digits) of the records' fingerprint and of who has which."""
        header = json.dumps([self.source.fingerprint, self.rows.shape, self.without])
        rows = self.rows.astype("<i8").tobytes()  # equal bytes on all machines
        return hashlib.sha256(header.encode() + rows).hexdigest()


def by_group(source: Source, group: str | Iterable[Hashable], *, max_records: int) -> Groups:
    """Returns a source whose examples are the users, patients or other owners of the records.

    Args:
      source: The records, in an order in which no two records of one user change places when
          another user leaves.
      group: The owner of each record: a column of `source`, or n identifiers. The column is left
        out of the examples. Identifiers are text and compared as bytes, after Unicode NFC and
        without outer blanks: "007" and "7" are two patients, 7 and "7" are one (`jaxdp.data.ids`).
        A column of a table is read as the text of its cells.
      max_records: k, the largest number of records of one user that count. It is public: choose it
        without a look at the data. A user with more has its first k in the order of `source`.

    Returns:
      A source of users in the order of their first records. Its examples are `Records`.

    Raises:
      ValueError: max_records is below 1, group has another length than source, or it lacks a value:
        None, NaN or blanks. source has no such column.
      TypeError: max_records is no int. Or a value is no identifier: floating point, a flag, a point
        in time or another type.

    Formal guarantees:
      An example is a function of the records of one user alone, and so is the choice of those that
      count. Adding or removing a user with all of its records therefore adds or removes one
      example. The number of users is public in the sense of `PoissonSampler.num_examples`. The
      choice is the same in every step, because a run that repeats a step after a crash must see
      equal records.
    """
    check_count("max_records", max_records, 1)
    column = group if isinstance(group, str) else ""
    owners: Any = read_ids(source, column) if column else group
    rows_of_user: dict[int, list[int]] = {}
    for row, user in enumerate(owners_of(owners, len(source)).tolist()):
        rows = rows_of_user.setdefault(user, [])
        # Only the user's own rows decide which of them count, so that a neighbouring data set
        # differs in no other user.
        if len(rows) < max_records:
            rows.append(row)
    table = np.full((len(rows_of_user), max_records), -1, np.int64)
    for user, rows in rows_of_user.items():
        table[user, : len(rows)] = rows
    return Groups(source, table, column)
