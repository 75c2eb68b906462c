"""Records with several owners: an e-mail with its sender and receivers, a scan of twins.

    mails = jaxdp.data.by_owners(mails, "people", max_records=3)
    sampler = mails.sampler(0.1)  # draws records, and knows how many of them one owner has
    trainer = jaxdp.finetune.dp_sgd(..., sampler=sampler, unit="person", adjacency="zero_out")

Who owns which record is public here, and what the records contain is private (Ganesh et al. 2025,
"It's my data too", arXiv 2503.03622, "fixed graph"). Their algorithm 1 bounds contributions.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from jaxdp.data.ids import Identifier, identifier, owners_of
from jaxdp.data.order import shuffled
from jaxdp.data.protocol import Source, Units
from jaxdp.data.sampling import PoissonSampler
from jaxdp.data.sources import Examples, read_ids
from jaxdp.data.storage import immutable
from jaxdp.files import check_count
from jaxdp.transforms.not_finite import floats

_SEVERAL = (list, tuple, set, frozenset, np.ndarray)


@dataclasses.dataclass(frozen=True, eq=False)
class Owners(Units):
    """A `Source` of records, of which each owner has at most `max_records`. `by_owners` makes it.

    Attributes:
      source: All records.
      rows: int64 [n]. The positions in `source` of the records that count, ascending. Public.
      max_records: k, the most records of one owner among them.
      records_of: int64 [owners]. How many records of each owner count. Public. In a part that
        `take` returns, an owner has at most so many.
      without: A column that `gather` leaves out, or "".
    """

    max_records: int
    records_of: np.ndarray = dataclasses.field(repr=False)
    without: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "records_of", immutable(np.asarray(self.records_of, np.int64)))

    @property
    def owners(self) -> int:
        """The number of owners, also of those none of whose records counts."""
        return len(self.records_of)

    def sampler(self, sampling_probability: float, *, seed: bytes | None = None) -> PoissonSampler:
        """Returns a sampler of these records, whose event is for one owner.

        Args:
          sampling_probability: q, with which each record joins a batch.
          seed: As in `PoissonSampler`. None, the default, takes it from the operating system.
        """
        sampler = PoissonSampler(
            len(self), sampling_probability, records_per_owner=self.max_records
        )
        return sampler if seed is None else dataclasses.replace(sampler, seed=seed)

    def gather(self, indices: np.ndarray) -> Any:
        """Returns the records at `indices`, integers [B] in [0, n)."""
        return self.shown(self.source.gather(self.rows[np.asarray(indices, np.int64)]))

    def floats(self, indices: np.ndarray) -> Any:
        """Returns the columns of floating point of the records at `indices`, [B, ...] each."""
        return floats(self.source, self.rows[np.asarray(indices, np.int64)])

    @property
    def fingerprint(self) -> str:
        """A SHA-256 (64 hex digits) of the records' fingerprint and of those that count."""
        header = json.dumps([self.source.fingerprint, self.max_records, self.without])
        arrays = (self.rows, self.records_of)
        content = b"".join(array.astype("<i8").tobytes() for array in arrays)
        return hashlib.sha256(header.encode() + content).hexdigest()


def by_owners(
    source: Source,
    owners: str | Iterable[Any],
    *,
    max_records: int,
    separator: str = ";",
    seed: int = 0,
) -> Owners:
    """Returns the records of a source of which no owner has more than `max_records`.

    Records are looked at in an order that `seed` draws. One counts if each of its owners still has
    fewer than `max_records` that count (Ganesh et al. 2025, algorithm 1).

    Args:
      source: The records, whose places do not depend on what they contain.
      owners: The owners of each record: a column of `source` with texts such as "anna;ben", or n
        texts or lists of identifiers. The column is left out of the examples. Identifiers are
        those of `jaxdp.data.ids`. An owner who is named twice counts once.
      max_records: k >= 1, the most records of one owner that count.
      separator: The text between the owners of one record.
      seed: A public number that decides the order.

    Returns:
      A source of the records that count, in the order of `source`.

    Raises:
      ValueError: max_records is below 1, separator is empty, owners has another length than
        source, or a record has no owner. source has no such column.
      TypeError: An owner is no identifier: floating point, a flag, a point in time or another type.

    Formal guarantees:
      The choice of records is a function of the owners, k and the seed. It does not depend on what
      the records contain. For data sets with the same owners that differ in the contents of the
      records of one owner, the chosen records therefore are at the same places, and at most k of
      them differ. That is all that is guaranteed: to remove an owner frees places of others, so
      that many records may change. Who owns what, and how many owners there are, is public.
    """
    check_count("max_records", max_records, 1)
    if not separator or not isinstance(separator, str):
        raise ValueError(f"separator must be a text such as ';', got {separator!r}.")
    column = owners if isinstance(owners, str) else ""
    cells: Iterable[Any] = _cells(source, column) if column else owners
    owners_of_record = [_owners_of(cell, separator) for cell in cells]
    if len(owners_of_record) != len(source):
        raise ValueError(
            f"owners must have one value for each of the {len(source)} records, got "
            f"{len(owners_of_record)}."
        )
    number_of: dict[Identifier, int] = {}
    for names in owners_of_record:
        for name in names:
            number_of.setdefault(name, len(number_of))
    records_of = np.zeros(len(number_of), np.int64)
    rows = []
    # Greedy in a random order: a record counts while each of its owners has a place left. The order
    # and the owners are public, so the choice is.
    for row in shuffled(len(source), seed=seed).tolist():
        numbers = [number_of[name] for name in owners_of_record[row]]
        if (records_of[numbers] < max_records).all():
            records_of[numbers] += 1
            rows.append(row)
    if not rows:
        raise ValueError("source must have records, got none.")
    return Owners(source, np.sort(rows), max_records, records_of, column)


def split_owners(source: Source, column: str, separator: str) -> set[Identifier]:
    """Returns all owners of the records of a source, whose column has texts such as "anna;ben"."""
    owners: set[Identifier] = set()
    for cell in _cells(source, column):
        owners |= _owners_of(cell, separator)
    return owners


def families(source: Source, column: str, separator: str) -> np.ndarray:
    """Returns the number of each record's family, int32 [records].

    Two records are of one family if they share an owner, directly or by other records. Arguments
    are those of `split_owners`.
    """
    number_of: dict[Identifier, int] = {}
    edges = []
    for row, cell in enumerate(_cells(source, column)):
        for name in _owners_of(cell, separator):
            edges.append((row, number_of.setdefault(name, len(number_of))))
    rows, owners = np.array(edges).T
    size = len(source) + len(number_of)
    # Records and owners are the nodes of one graph, so that a family is a connected component.
    links = sparse.coo_array((np.ones(len(rows)), (rows, owners + len(source))), (size, size))
    _, family_of = csgraph.connected_components(links, directed=False)
    return owners_of(family_of[: len(source)], len(source))


def _cells(source: Source, column: str) -> Iterable[Any]:
    """Returns the cells of a column of texts, or of whole numbers as texts."""
    if isinstance(source, Examples) and column in source.text_names:
        return source.text(column)
    return read_ids(source, column)


def _owners_of(cell: Any, separator: str) -> set[Identifier]:
    """Returns the identifiers of the owners of one record."""
    names = cell
    if isinstance(cell, str):
        names = cell.split(separator)
    elif not isinstance(cell, _SEVERAL):
        names = [cell]
    owners = {identifier(name, "owners") for name in names}
    if not owners:
        raise ValueError(
            "owners lacks a value: a record without any owner. Give every record its owners, or "
            "leave the record out."
        )
    return owners
