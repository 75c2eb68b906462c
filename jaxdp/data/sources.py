"""Examples by position, in host memory or read on demand.

An example of the bundled sets is a dict of NumPy arrays: {"image": float32 [H, W, C] in [0, 1],
"label": int32 []} or {"features": float32 [d], "label": int32 []}. Other records have any columns,
nested in any way.

No statistic of the records is computed: a mean or a maximum of private rows is an uncharged
release. The number of classes is declared. Splits depend on positions alone.
"""

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tree

from jaxdp.data.ids import Identifier, identifiers
from jaxdp.data.order import shuffled
from jaxdp.data.pictures import scaled
from jaxdp.data.protocol import RowsOf, Source, Units
from jaxdp.data.storage import ExampleReader, Watched, immutable, raw, stored
from jaxdp.files import shown
from jaxdp.transforms.not_finite import is_floating

# How much of a column is read at once to hash or to load it.
_CHUNK_ROWS = 4096
_CHUNK_BYTES = 2**24


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Examples by position: `len(records)`, `records[i]`, `records.gather(indices)`.

    It is a `jaxdp.data.Source`. Build one with `bundled` or a function whose name starts with
    "from_", or from your own arrays.

    Attributes:
      arrays: The stored records: a dict of columns, or any nesting of dicts, lists, tuples and
        named tuples of columns with the same first axis, or a `ExampleReader`. A column is an
        array, or an object with `dtype`, `shape`, `len()` and `column[rows]`, such as a
        memory-mapped array. `gather` reads only its rows. Arrays in memory are copied, once: a
        later change of the given array changes nothing here. dtypes are kept, with one exception:
        the column "image" is for pixels, and uint8 and uint16 are gathered as float32 in [0, 1].
        `jaxdp.data.numbers` says which numbers are refused.
      num_classes: The number of classes, a public declaration. 0 declares none.
      name: The name in messages and ledgers.
      rows: The positions of the examples in `arrays`, in order (int64 [n]). None is all.
      declared: A text that names the content of `arrays`, for example its version. "" hashes the
        content instead, see `fingerprint`.
      texts: {name: n texts} of columns that are text, such as identifiers. They are no part of an
        example. `by_group`, `read_ids` and `read_column` read them.
      feature_names: The names of the numbers in the column "features" of a table, or ().

    Raises:
      ValueError: There is no array, two columns differ in their first axes, or whole numbers do not
          fit into 32 bits.
      TypeError: An array in memory is not of numbers.
    """

    arrays: Any = dataclasses.field(repr=False)
    num_classes: int = 0
    name: str = "records"
    rows: np.ndarray | None = dataclasses.field(default=None, repr=False)
    declared: str = dataclasses.field(default="", repr=False)
    texts: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict, repr=False)
    feature_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    # The columns that are read. `arrays` has the same columns in other dicts and lists, so that no
    # caller can exchange what is read.
    _columns: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        arrays = dict(self.arrays) if isinstance(self.arrays, Mapping) else self.arrays
        texts = {name: tuple(cells) for name, cells in self.texts.items()}
        columns = [
            ("/".join(map(str, path)), column) for path, column in tree.flatten_with_path(arrays)
        ]
        self._check_lengths(columns, texts)
        immutable_columns = [
            stored(column, f"{shown(name)} of source {self.name!r}") for name, column in columns
        ]
        object.__setattr__(self, "_columns", tree.unflatten_as(arrays, immutable_columns))
        public = tree.unflatten_as(arrays, immutable_columns)
        if type(public) is dict:
            public = types.MappingProxyType(public)
        object.__setattr__(self, "arrays", public)
        object.__setattr__(self, "texts", types.MappingProxyType(texts))
        if self.rows is not None:
            object.__setattr__(self, "rows", immutable(np.asarray(self.rows, np.int64)))

    def _check_lengths(
        self, columns: Sequence[tuple[str, Any]], texts: Mapping[str, Sequence[Any]]
    ) -> None:
        """Raises ValueError if there is no array, or columns and texts differ in length."""
        lengths = [(name, len(column)) for name, column in (*columns, *texts.items())]
        if columns and len({length for _, length in lengths}) == 1:
            return
        names = shown(" and ".join(name for name, _ in lengths) or "arrays")
        counts = " and ".join(str(length) for _, length in lengths) if columns else "no array"
        raise ValueError(f"{names} of source {self.name!r} must have one length, got {counts}.")

    def __len__(self) -> int:
        if self.rows is not None:
            return len(self.rows)
        return len(tree.flatten(self._columns)[0])

    def __getitem__(self, index: Any) -> Any:
        """Returns one example for an int, a batch for an integer array (see `gather`)."""
        if np.ndim(index) != 0:
            return self.gather(index)
        batch = self.gather(np.asarray(index)[None])
        return tree.map_structure(lambda array: array[0], batch)

    def gather(self, indices: np.ndarray) -> Any:
        """Returns the examples at `indices`, integers [B] in [0, n), along a new first axis.

        Raises:
          TypeError: indices are not integers, or numbers that are read on demand are none.
          IndexError: An index is outside [0, n). Negative indices do not count from the end.
          ValueError: A whole number that is read on demand does not fit into 32 bits. Or a record
            has changed since the fingerprint was read. The message has the column or the record,
            for the owner of the data.
        """
        records = self._read(self._stored_rows(indices))
        return tree.map_structure_with_path(
            lambda path, array: scaled(array) if path == ("image",) else array, records
        )

    def floats(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of floating point at `indices`, as `gather` takes them, by path.

        They are as they are stored. A reader whose records have none is not asked.
        """
        rows = self._stored_rows(indices)
        if isinstance(self._columns, ExampleReader):
            records = self._columns[rows] if self._columns.has_floats else {}
            return _floating(records)
        columns = _floating(self._columns)
        return {path: np.asarray(column[rows]) for path, column in columns.items()}

    def column(self, key: str) -> Any:
        """Returns `arrays[key]`.

        Raises:
          ValueError: The records are not dicts of columns with this key.
        """
        if not isinstance(self._columns, Mapping) or key not in self._columns:
            raise ValueError(
                f"source {self.name!r} has no column {key!r}. {self._columns_in_words}"
            )
        return self._columns[key]

    @property
    def _columns_in_words(self) -> str:
        """What an error says about the columns."""
        if isinstance(self._columns, ExampleReader):
            return (
                "It has ExampleReader. Its records are read as a whole: load() reads them into "
                "columns."
            )
        names = [type(self._columns).__name__]
        if isinstance(self._columns, Mapping):
            names = sorted(self._columns)
        texts = [name for name in self.texts if name not in names]
        and_texts = f", and as text {', '.join(texts)}" if texts else ""
        return shown(f"It has {', '.join(names)}{and_texts}.")

    def take(self, indices: np.ndarray, *, name: str | None = None) -> "Examples":
        """Returns the examples at `indices` (integers [m] in [0, n)) as a source.

        No record is read or copied.
        """
        return dataclasses.replace(self, rows=self._stored_rows(indices), name=name or self.name)

    def of_classes(self, classes: Sequence[int], *, name: str | None = None) -> "Examples":
        """Returns the examples of some classes, which become classes 0, 1, ... in the given order.

        The choice of records depends on their labels. Use it for public data, or as the owner of
        the data.

        Raises:
          ValueError: A class is outside [0, num_classes), given twice, or the only one, or there is
            no column "label", or the number of classes is not declared.
        """
        labels = np.asarray(self.column("label"))
        if len(classes) < 2 or len(set(classes)) < len(classes):
            raise ValueError(f"classes must be at least two distinct labels, got {list(classes)}.")
        if min(classes) < 0 or max(classes) >= self.num_classes:
            raise ValueError(
                f"classes must be in [0, {self.num_classes}) for {self.name!r}, got "
                f"{list(classes)}."
            )
        # -1 is also the label of a record without a class, such as those of some published tests.
        label = np.full(len(labels), -1, np.int32)
        for new, old in enumerate(classes):
            label[labels == old] = new
        rows = self.positions
        return self.changed(
            f"classes {[int(old) for old in classes]}",
            arrays={**self.arrays, "label": label},
            num_classes=len(classes),
            rows=rows[label[rows] >= 0],
            name=name or self.name,
        )

    def split(self, fractions: Sequence[float], *, seed: int) -> tuple["Examples", ...]:
        """Returns disjoint random parts of the given sizes, for example a public and a private one.

        The assignment depends on the number of examples and the public seed only, and is the same
        for all versions of NumPy. It reads no record. Each part is a separate data set with its own
        registration.

        Args:
          fractions: Positive numbers that sum to at most 1. The remaining examples are in no part.
          seed: A public non-negative int below 2**128.

        Returns:
          One source per fraction, named "name[0]", "name[1]", ...

        Raises:
          ValueError: The fractions are not positive or sum to more than 1, or seed is out of range.
          TypeError: seed is no int.
        """
        sizes = np.asarray(fractions)
        is_list = sizes.ndim == 1 and sizes.size > 0 and sizes.dtype.kind in "iuf"
        # NaN is not positive.
        if not is_list or not (sizes > 0).all() or sum(fractions) > 1 + 1e-9:
            shares = sizes.tolist()
            raise ValueError(f"fractions must be positive and sum to at most 1, got {shares!r}.")
        order = shuffled(len(self), seed=seed)
        sources = []
        start = 0
        # Ends are rounded, and not sizes, whose sum could miss the number of examples.
        for number, fraction in enumerate(np.cumsum(fractions)):
            stop = min(len(self), round(len(self) * fraction))
            sources.append(self.take(order[start:stop], name=f"{self.name}[{number}]"))
            start = stop
        return tuple(sources)

    def load(self) -> "Examples":
        """Returns the same examples as columns in host memory.

        The fingerprint of the result is of their content. Use it for records that fit and are read
        often, such as images that are decoded whenever they are read.
        """
        chunks = [self._read(rows) for rows in _split(self.positions, _CHUNK_ROWS)]
        arrays = tree.map_structure(lambda *parts: np.concatenate(parts), *chunks)
        texts = {key: self.text(key) for key in self.text_names}
        return dataclasses.replace(self, arrays=arrays, rows=None, declared="", texts=texts)

    def changed(self, how: str, **fields: Any) -> "Examples":
        """Returns a copy with other fields. `how` is added to a declared fingerprint."""
        declared = self.declared and f"{self.declared}, {how}"
        return dataclasses.replace(self, **fields, declared=declared)

    @property
    def text_names(self) -> tuple[str, ...]:
        """The names of the columns of text."""
        if isinstance(self._columns, ExampleReader):
            return self._columns.texts
        return tuple(self.texts)

    def text(self, key: str) -> list[Any]:
        """Returns the n values of a column of `text_names`, in order, as they are stored."""
        if not isinstance(self._columns, ExampleReader):
            return [self.texts[key][row] for row in self.positions.tolist()]
        values: list[Any] = []
        for rows in _split(self.positions, self._columns.at_once):
            _, texts = self._columns.read(rows)
            values += texts[key]
        return values

    @property
    def positions(self) -> np.ndarray:
        """The positions of the examples in `arrays`, int64 [n]."""
        return np.arange(len(self)) if self.rows is None else self.rows

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 (64 hex digits). A resumed run compares it to refuse other data.

        Without `declared`, it is of the stored content, which is read once in chunks of bounded
        size. Equal fingerprints then mean equal records, up to a collision of SHA-256. It covers
        num_classes and, per array in the order of the sorted keys, its key (or path, if nested),
        little-endian dtype, shape and bytes. The bytes of a `ExampleReader` come record after
        record. Texts follow as JSON.

        It names what `gather` returns from now on. Arrays in memory cannot change. The hash of each
        record that is read on demand is kept, 16 bytes a record, and `gather` refuses a record that
        has changed. A source of the changed records has to be made again.

        With `declared`, it is of that text, num_classes and the positions. Nothing is read. Records
        that change later are refused if this source has read them before, and are not detected
        otherwise: change the text whenever a record changes. If a crashed run resumes on other
        records under the same text, both runs have the same noise, and what was seen of both
        reveals records.

        It does not cover the name of the source. The hash of the content can confirm a guess of the
        whole data set. Do not publish it for private data.
        """
        digest = hashlib.sha256()
        # Rows are watched before they are hashed, so that the hash names what is read later.
        for column in tree.flatten(self._columns):
            if isinstance(column, Watched | ExampleReader):
                column.watch()
        if self.declared:
            header = json.dumps([self.declared, self.num_classes, len(self)])
            digest.update(header.encode() + b"\n")
            digest.update(self.positions.astype("<i8").tobytes())
        elif isinstance(self._columns, ExampleReader):
            self._hash_records(self._columns, digest)
        else:
            self._hash_columns(digest)
        return digest.hexdigest()

    def _hash_records(self, reader: ExampleReader, digest: Any) -> None:
        """Hashes records one after the other, since only some of them are in memory at a time."""
        for start in range(0, len(self), reader.at_once):
            records, texts = reader.read(self.positions[start : start + reader.at_once])
            columns = tree.flatten_with_path(records)
            if start == 0:
                for path, column in columns:
                    digest.update(self._header(path, column))
            for record in zip(*(column for _, column in columns), strict=True):
                for array in record:
                    digest.update(raw(_little(array)))
            if texts:
                line = json.dumps(sorted(texts.items()), default=repr)
                digest.update(line.encode() + b"\n")

    def _hash_columns(self, digest: Any) -> None:
        """Hashes one column after the other, and then the texts."""
        for path, array in tree.flatten_with_path(self._columns):
            digest.update(self._header(path, array))
            at_once = _rows_at_once(array)
            for start in range(0, len(self), at_once):
                stop = min(len(self), start + at_once)
                rows: Any = slice(start, stop) if self.rows is None else self.rows[start:stop]
                digest.update(raw(_little(array[rows])))
        for key in sorted(self.texts):
            line = json.dumps([key, self.text(key)], default=repr)
            digest.update(line.encode() + b"\n")

    def _header(self, path: tuple[Any, ...], array: Any) -> bytes:
        """Returns what the fingerprint holds of a column besides its bytes, a line of JSON."""
        key = path[0] if len(path) == 1 else path
        dtype = array.dtype.newbyteorder("<").str
        shape = [len(self), *array.shape[1:]]
        return json.dumps([key, dtype, shape, self.num_classes]).encode() + b"\n"

    def _read(self, rows: np.ndarray) -> Any:
        """Returns the stored columns at stored rows, without scaling."""
        if isinstance(self._columns, ExampleReader):
            return self._columns[rows]
        return tree.map_structure(lambda column: np.asarray(column[rows]), self._columns)

    def _stored_rows(self, indices: np.ndarray) -> np.ndarray:
        """Returns the rows of the stored columns at which the examples at `indices` lie."""
        indices = np.asarray(indices)
        if indices.size == 0 and indices.ndim == 1:
            indices = indices.astype(np.int64)  # NumPy makes floats of an empty list.
        if not np.issubdtype(indices.dtype, np.integer):
            raise TypeError(f"indices must be integers, got dtype {indices.dtype}.")
        if indices.ndim != 1:
            raise TypeError(f"indices must be one-dimensional, got shape {indices.shape}.")
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must be in [0, {len(self)}) for source {self.name!r}.")
        indices = indices.astype(np.int64)
        return indices if self.rows is None else self.rows[indices]


def _floating(columns: Any) -> dict[str, Any]:
    """Returns the columns of floating point or complex dtype by path."""
    return {
        "/".join(map(str, path)): column
        for path, column in tree.flatten_with_path(columns)
        if is_floating(column.dtype)
    }


def _little(array: Any) -> np.ndarray:
    """Returns an array in little-endian byte order, so that all machines hash equal bytes."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _rows_at_once(array: Any) -> int:
    """Returns the number of rows of a column that are hashed at once."""
    row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row_bytes)))


def _split(rows: np.ndarray, at_once: int) -> list[np.ndarray]:
    """Returns rows in pieces of `at_once`, at least one piece."""
    return np.split(rows, range(at_once, len(rows), at_once))


class _Part(RowsOf):
    """Some examples of any source."""

    def gather(self, indices: np.ndarray) -> Any:
        return self.source.gather(self.rows[np.asarray(indices, np.int64)])

    @property
    def fingerprint(self) -> str:
        rows = hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()
        both = json.dumps([self.source.fingerprint, rows])
        return hashlib.sha256(both.encode()).hexdigest()


def take(source: Source, indices: np.ndarray) -> Source:
    """Returns the examples at `indices` (integers [m] in [0, n)) of any source. Reads nothing.

    A part of `Groups` or `Owners` is of the same class, and its indices differ.
    """
    if isinstance(source, Examples | Units):
        return source.take(indices)
    return _Part(source, indices)


def read_column(source: Source, key: str) -> np.ndarray:
    """Returns all values of a column of any source, [n, ...] in order.

    The other columns are not read if the source can read one alone. A column of text is an array of
    Python objects: the texts as they are stored, such as "007".

    Raises:
      ValueError: The records have no such column.
    """
    if isinstance(source, Examples):
        if isinstance(source._columns, Mapping) and key in source._columns:
            return np.asarray(source.column(key)[source.positions])
        if key in source.text_names:
            values = np.empty(len(source), object)
            values[:] = source.text(key)
            return values
        if not isinstance(source._columns, ExampleReader):
            source.column(key)  # raises, with the names of the columns that there are
    batches = [source.gather(rows) for rows in _split(np.arange(len(source)), 64)]
    if not (isinstance(batches[0], Mapping) and key in batches[0]):
        raise ValueError(f"source {getattr(source, 'name', '')!r} has no column {key!r}.")
    return np.concatenate([np.asarray(batch[key]) for batch in batches])


def read_ids(source: Source, key: str) -> list[Identifier]:
    """Returns the identifiers of a column of any source, in order (`jaxdp.data.ids`).

    The cells of a table and other texts are read as text, so "007" and "7" differ, also where the
    same column is a feature. Columns of integers become their decimal digits.

    Raises:
      ValueError: The records have no such column, or a value is missing.
      TypeError: The column is of floating point, flags, dates or others that merge people.
    """
    values: Any
    if isinstance(source, Examples) and key in source.text_names:
        values = source.text(key)
    else:
        values = read_column(source, key)
    return identifiers(values, f"column {key!r}")
