"""Examples by position, in host memory or read on demand.

An example of the bundled sets is a dict of NumPy arrays: {"image": float32 [H, W, C] in [0, 1],
"label": int32 []} or {"features": float32 [d], "label": int32 []}. Other records have any columns,
nested in any way.

This module computes no statistic of the records. Every scaling constant is public and written in
this file. The number of classes is declared. Splits depend on positions alone. A mean or a maximum
of private rows is an uncharged release.
"""

import dataclasses
import functools
import hashlib
import json
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tree

from jaxdp.data.ids import Identifier, identifiers
from jaxdp.data.numbers import check_digits, native
from jaxdp.data.order import shuffled
from jaxdp.data.pictures import scaled
from jaxdp.data.protocol import Source
from jaxdp.data.storage import ExampleReader, Watched, immutable, raw, stored
from jaxdp.files import shown

_CHUNK_ROWS = 4096
_CHUNK_BYTES = 2**24


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Examples by position: `len(records)`, `records[i]`, `records.gather(indices)`. It is a
    `jaxdp.data.Source`.

    Build one with `bundled` or a function whose name starts with "from_", or from your own arrays.

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
    _columns: Any = dataclasses.field(
        init=False, repr=False
    )  # what is read: nobody else has these dicts and lists

    def __post_init__(self) -> None:
        given = dict(self.arrays) if isinstance(self.arrays, Mapping) else self.arrays
        named = [("/".join(map(str, path)), array) for path, array in tree.flatten_with_path(given)]
        texts = {name: tuple(cells) for name, cells in self.texts.items()}
        lengths = [(name, str(len(column))) for name, column in (*named, *texts.items())]
        if not named or len({length for _, length in lengths}) > 1:
            what = f"{shown(' and '.join(name for name, _ in lengths) or 'arrays')} of source {self.name!r}"
            count = " and ".join(length for _, length in lengths) if named else "no array"
            raise ValueError(f"{what} must have one length, got {count}.")
        columns = [
            stored(column, f"{shown(name)} of source {self.name!r}") for name, column in named
        ]
        inside = tree.unflatten_as(given, columns)
        object.__setattr__(self, "_columns", inside)
        outside = tree.unflatten_as(given, columns)
        object.__setattr__(
            self, "arrays", types.MappingProxyType(outside) if type(outside) is dict else outside
        )
        object.__setattr__(self, "texts", types.MappingProxyType(texts))
        if self.rows is not None:
            object.__setattr__(self, "rows", immutable(np.asarray(self.rows, np.int64)))

    def __len__(self) -> int:
        return len(tree.flatten(self._columns)[0] if self.rows is None else self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Returns one example for an int, a batch for an integer array (see `gather`)."""
        if np.ndim(index) == 0:
            return tree.map_structure(lambda array: array[0], self.gather(np.asarray(index)[None]))
        return self.gather(index)

    def gather(self, indices: np.ndarray) -> Any:
        """Returns the examples at `indices` (integers [B] in [0, n)), stacked along a new first
        axis.

        Raises:
          TypeError: indices are not integers, or numbers that are read on demand are none.
          IndexError: An index is outside [0, n). Negative indices do not count from the end.
          ValueError: A whole number that is read on demand does not fit into 32 bits. Or a record
            has changed since the fingerprint was read. The message has the column or the record,
            for the owner of the data.
        """
        return tree.map_structure_with_path(
            lambda path, array: scaled(array) if path == ("image",) else array,
            self._read(self._stored_rows(indices)),
        )

    def column(self, key: str) -> Any:
        """Returns `arrays[key]`. Raises ValueError if the records are not dicts of columns with
        this key.
        """
        if not isinstance(self._columns, Mapping) or key not in self._columns:
            raise ValueError(f"source {self.name!r} has no column {key!r}. {self._says}")
        return self._columns[key]

    @property
    def _says(self) -> str:
        """What an error says about the columns."""
        if isinstance(self._columns, ExampleReader):
            return "It has ExampleReader. Its records are read as a whole: load() reads them into columns."
        names = (
            sorted(self._columns)
            if isinstance(self._columns, Mapping)
            else [type(self._columns).__name__]
        )
        texts = ", ".join(name for name in self.texts if name not in names)
        return shown(f"It has {', '.join(names)}{f', and as text {texts}' if texts else ''}.")

    def take(self, indices: np.ndarray, *, name: str | None = None) -> "Examples":
        """Returns the examples at `indices` (integers [m] in [0, n)) as a source. It reads and
        copies no record.
        """
        return dataclasses.replace(self, rows=self._stored_rows(indices), name=name or self.name)

    def of_classes(self, classes: Sequence[int], *, name: str | None = None) -> "Examples":
        """Returns the source of the examples of some classes, which become classes 0, 1, ... in the
        given order.

        The choice of records depends on their labels. Use it for public data, or as the owner of
        the data.

        Raises:
          ValueError: A class is outside [0, num_classes), given twice, or the only one, or there is
            no column "label", or the number of classes is not declared.
        """
        wanted, labels = np.asarray(classes, np.int32), self.column("label")
        if len(wanted) < 2 or len(set(wanted.tolist())) < len(wanted):
            raise ValueError(f"classes must be at least two distinct labels, got {list(classes)}.")
        if wanted.min() < 0 or wanted.max() >= self.num_classes:
            raise ValueError(
                f"classes must be in [0, {self.num_classes}) for {self.name!r}, got "
                f"{list(classes)}."
            )
        renamed = np.full(self.num_classes, -1, np.int32)
        renamed[wanted] = np.arange(len(wanted))
        label = renamed[np.asarray(labels)]
        arrays, rows = {**self.arrays, "label": label}, self.positions
        kept = rows[label[rows] >= 0]
        how = f"classes {wanted.tolist()}"
        return self.changed(
            how, arrays=arrays, num_classes=len(wanted), rows=kept, name=name or self.name
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
          ValueError: The fractions are not positive or sum to more than 1.
        """
        if not fractions or min(fractions) <= 0 or sum(fractions) > 1 + 1e-9:
            raise ValueError(
                f"fractions must be positive and sum to at most 1, got {list(fractions)}."
            )
        order = shuffled(len(self), seed=seed)
        ends = [min(len(self), round(len(self) * part)) for part in np.cumsum(fractions)]
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        return tuple(
            self.take(order[a:b], name=f"{self.name}[{k}]") for k, (a, b) in enumerate(bounds)
        )

    def load(self) -> "Examples":
        """Returns the same examples as columns in host memory. The fingerprint of the result is of
        their content.

        Use it for records that fit and are read often, such as images that are decoded whenever
        they are read.
        """
        chunks = np.split(self.positions, range(_CHUNK_ROWS, len(self), _CHUNK_ROWS))
        arrays = tree.map_structure(lambda *parts: np.concatenate(parts), *map(self._read, chunks))
        texts = {key: self.text(key) for key in self.text_names}
        return dataclasses.replace(self, arrays=arrays, rows=None, declared="", texts=texts)

    def changed(self, how: str, **fields: Any) -> "Examples":
        """Returns a copy with other fields. `how` describes the change of the content for a
        declared fingerprint.
        """
        return dataclasses.replace(
            self, **fields, declared=self.declared and f"{self.declared}, {how}"
        )

    @property
    def text_names(self) -> tuple[str, ...]:
        """The names of the columns of text."""
        return (
            self._columns.texts if isinstance(self._columns, ExampleReader) else tuple(self.texts)
        )

    def text(self, key: str) -> list[Any]:
        """Returns the n values of a column of `text_names`, in order, as they are stored."""
        if not isinstance(self._columns, ExampleReader):
            return [self.texts[key][row] for row in self.positions.tolist()]
        at_once = self._columns.at_once
        chunks = np.split(self.positions, range(at_once, len(self), at_once))
        return [text for rows in chunks for text in self._columns.read(rows)[1][key]]

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
        for column in tree.flatten(self._columns):
            if isinstance(column, Watched | ExampleReader):
                column.watch()
        if self.declared:
            digest.update(json.dumps([self.declared, self.num_classes, len(self)]).encode() + b"\n")
            digest.update(self.positions.astype("<i8").tobytes())
        elif isinstance(self._columns, ExampleReader):
            self._hash_records(self._columns, digest)
        else:
            self._hash_columns(digest)
        return digest.hexdigest()

    def _hash_records(self, reader: ExampleReader, digest: Any) -> None:
        for start in range(0, len(self), reader.at_once):
            records, texts = reader.read(self.positions[start : start + reader.at_once])
            arrays = tree.flatten_with_path(records)
            if start == 0:
                digest.update(b"".join(self._header(path, array) for path, array in arrays))
            for row in range(len(arrays[0][1])):
                for _, array in arrays:
                    digest.update(raw(_little(array[row])))
            if texts:
                digest.update(json.dumps(sorted(texts.items()), default=repr).encode() + b"\n")

    def _hash_columns(self, digest: Any) -> None:
        for path, array in tree.flatten_with_path(self._columns):
            digest.update(self._header(path, array))
            at_once = _rows_at_once(array)
            for start in range(0, len(self), at_once):
                stop = min(len(self), start + at_once)
                rows: Any = slice(start, stop) if self.rows is None else self.rows[start:stop]
                digest.update(raw(_little(array[rows])))
        for key in sorted(self.texts):
            digest.update(json.dumps([key, self.text(key)], default=repr).encode() + b"\n")

    def _header(self, path: tuple[Any, ...], array: Any) -> bytes:
        key = path[0] if len(path) == 1 else path
        little = array.dtype.newbyteorder("<")
        return (
            json.dumps([key, little.str, [len(self), *array.shape[1:]], self.num_classes]).encode()
            + b"\n"
        )

    def _read(self, rows: np.ndarray) -> Any:
        if isinstance(self._columns, ExampleReader):
            return self._columns[rows]
        return tree.map_structure(lambda column: np.asarray(column[rows]), self._columns)

    def _stored_rows(self, indices: np.ndarray) -> np.ndarray:
        indices = np.asarray(indices)
        if indices.size == 0 and indices.ndim == 1:
            indices = indices.astype(np.int64)
        if not np.issubdtype(indices.dtype, np.integer):
            raise TypeError(f"indices must be integers, got dtype {indices.dtype}.")
        if indices.ndim != 1:
            raise TypeError(f"indices must be one-dimensional, got shape {indices.shape}.")
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must be in [0, {len(self)}) for source {self.name!r}.")
        indices = indices.astype(np.int64)
        return indices if self.rows is None else self.rows[indices]


def _little(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _rows_at_once(array: Any) -> int:
    row = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """Some examples of any source."""

    whole: Source
    rows: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", immutable(np.asarray(self.rows, np.int64)))

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, indices: np.ndarray) -> Any:
        return self.whole.gather(self.rows[np.asarray(indices, np.int64)])

    @property
    def fingerprint(self) -> str:
        rows = hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()
        return hashlib.sha256(json.dumps([self.whole.fingerprint, rows]).encode()).hexdigest()


def take(source: Source, indices: np.ndarray) -> Source:
    """Returns the examples at `indices` (integers [m] in [0, n)) of any source, as `Examples.take`.
    Reads nothing.
    """
    return source.take(indices) if isinstance(source, Examples) else _Part(source, indices)


def read_column(source: Source, key: str) -> np.ndarray:
    """Returns all values of a column of any source, [n, ...] in order, with the rest of the records
    unread if possible.

    A column of text is an array of Python objects: the texts as they are stored, such as "007".

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
            source.column(key)
    chunks = np.split(np.arange(len(source)), range(64, len(source), 64))
    batches = [source.gather(rows) for rows in chunks]
    if not (isinstance(batches[0], Mapping) and key in batches[0]):
        raise ValueError(f"source {getattr(source, 'name', '')!r} has no column {key!r}.")
    return np.concatenate([np.asarray(batch[key]) for batch in batches])


def read_ids(source: Source, key: str) -> list[Identifier]:
    """Returns the identifiers of a column of any source, in order, as `jaxdp.data.ids` defines
    them.

    The cells of a table and other texts are read as text, so "007" and "7" differ, also where the
    same column is a feature. Columns of integers become their decimal digits.

    Raises:
      ValueError: The records have no such column, or a value is missing.
      TypeError: The column is of floating point, flags, dates or others that merge people.
    """
    is_text = isinstance(source, Examples) and key in source.text_names
    values: Any = (
        source.text(key) if isinstance(source, Examples) and is_text else read_column(source, key)
    )
    return identifiers(values, f"column {key!r}")


def from_arrays(*, num_classes: int = 0, name: str = "arrays", **columns: Any) -> Examples:
    """Copies local arrays, one keyword per column, for example `from_arrays(tokens=..., mask=...,
    name="reviews")`.

    A later change of a given array does not reach the source. The dtype of a column is kept, except
    for three names with a meaning:

    - "image": Pixels, [n, H, W, C] or [n, H, W]: uint8 in 0..255, uint16 in 0..65535, or floating
      point in [0, 1], stored as float32. `gather` returns float32 in [0, 1] for all.
    - "features": Real numbers [n, d]. Floating point is stored as float32. Nothing is rescaled.
      Scale with public constants only.
    - "label", if num_classes is given: Integers [n] in [0, num_classes), stored as int32.

    A column of text [n] (or of UTF-8 bytes) is kept as text, and is no part of an example.
    `by_group` takes it as identifiers, such as those of patients.

    A memory-mapped column (`numpy.load(path, mmap_mode="r")`, `numpy.memmap`) stays on disk: its
    values are neither checked nor converted here, and `gather` reads its rows on demand.

    Numbers that a device would change are refused by name: whole numbers outside of 32 bits, long
    double, float64 that is infinite in float32. float64 whose last digits matter gives a warning
    (`jaxdp.data.numbers`).

    Single records with NaN are accepted, because private training zeroes their gradients. Records
    without any finite number are refused, because training on them spends the budget and learns
    nothing. Errors about the records are for the owner who loads the data, and are not a release.

    Args:
      num_classes: The number of classes, at least 2, a public declaration. It is not read off the
        labels. 0 declares none. With it, labels that are booleans or whole floating-point numbers
        are cast with a warning.
      name: The name of the source.
      columns: Arrays [n, ...] of numbers or booleans, or any nesting of such arrays, or texts [n].

    Raises:
      ValueError: There is no column, shapes do not match, labels, pixels or whole numbers are out
        of range, or no number is finite. No value is shown.
      TypeError: A dtype is not as above.
    """
    if not columns:
        raise ValueError(
            "from_arrays needs at least one column, for example image=, features= or tokens=."
        )
    if num_classes < 0 or num_classes == 1:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    if num_classes and "label" in columns:
        columns["label"] = _as_labels(columns["label"], num_classes)
    texts = {key: cells for key, value in columns.items() if (cells := _as_text(value)) is not None}
    named = {"image": _as_images, "features": _as_features}
    arrays = {}
    for key, value in columns.items():
        if key not in texts:
            arrays[key] = named[key](value) if key in named else value
    if not arrays:
        raise TypeError(
            f"{shown(', '.join(texts))} of source {name!r} must not be all: a source needs an "
            "array [n, ...] of numbers, and texts are no part of an example. Encode them, for "
            "example with jaxdp.data.from_texts."
        )
    columns = tree.map_structure_with_path(functools.partial(_as_column, name), arrays)
    return Examples(columns, num_classes, name, texts=texts)


def _as_text(values: Any) -> list[Any] | None:
    """Returns the texts of an array [n] or list of texts or bytes, or None."""
    if isinstance(values, Mapping | tuple | np.memmap):
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # a nesting of several lengths
        return None
    if array.ndim != 1 or not array.size or array.dtype.kind not in "USTO":
        return None
    cells: list[Any] = array.tolist()
    return cells if all(isinstance(cell, str | bytes) for cell in cells) else None


def _as_column(name: str, path: tuple[Any, ...], values: Any) -> np.ndarray:
    key = shown("/".join(map(str, path)))
    array = values if isinstance(values, np.memmap) else np.asarray(values)
    if array.dtype.kind in "OSUMmT" or not array.ndim:
        raise TypeError(
            f"{key} of source {name!r} must be an array [n, ...] of numbers, got dtype "
            f"{array.dtype} and shape {array.shape}. Encode text and dates as numbers, and pad "
            "lists to one length."
        )
    if isinstance(array, np.memmap):
        return array
    if array.size and array.dtype.kind == "f" and not np.isfinite(array).any():
        raise ValueError(
            f"{key} of source {name!r} has no finite number. The file is damaged. Get or make it "
            "again."
        )
    return array


def _as_labels(label: Any, num_classes: int) -> np.ndarray:
    labels = np.asarray(label)
    if labels.ndim != 1:
        raise ValueError(
            f"label must have shape [n], got {labels.shape}. Leave out num_classes for other "
            "labels."
        )
    with np.errstate(invalid="ignore"):
        whole = labels.dtype.kind in "fb" and (labels.astype(np.float64) % 1 == 0).all()
    if whole:
        warnings.warn(
            f"label has dtype {labels.dtype} and is cast to int32. Store classes as integers.",
            stacklevel=3,
        )
        labels = labels.astype(np.int32)
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(
            f"label must be integers, got dtype {labels.dtype}. Leave out num_classes for other "
            "labels."
        )
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(
            f"label must be in [0, {num_classes}), but some are outside. Declare num_classes to "
            "fit."
        )
    return labels.astype(np.int32)


def _as_images(image: Any) -> np.ndarray:
    image = image if isinstance(image, np.memmap) else np.asarray(image)
    if image.ndim == 3:
        image = image[..., None]
    if image.ndim != 4:
        raise ValueError(
            f"image must have shape [n, H, W, C] or [n, H, W], got {image.shape}. Give volumes "
            "another name than image."
        )
    whole = image.dtype.kind == "u" and image.dtype.itemsize <= 2
    if not whole and not np.issubdtype(image.dtype, np.floating):
        raise TypeError(
            "image must be uint8 in 0..255, uint16 in 0..65535 or floating point in [0, 1], got "
            f"dtype {image.dtype}. Subtract and divide by public constants to reach [0, 1]."
        )
    if whole or isinstance(image, np.memmap):
        return image
    if np.any((image < 0) | (image > 1)):
        raise ValueError(
            "image must be in [0, 1] when floating point. Divide by the largest possible pixel "
            "value."
        )
    return image.astype(np.float32)


def _as_features(features: Any) -> np.ndarray:
    features = features if isinstance(features, np.memmap) else np.asarray(features)
    if features.ndim != 2:
        raise ValueError(
            f"features must have shape [n, d], got {features.shape}. Give other arrays another "
            "name."
        )
    if not np.issubdtype(features.dtype, np.number) or np.iscomplexobj(features):
        raise TypeError(f"features must be real numbers, got dtype {features.dtype}.")
    if isinstance(features, np.memmap) or not np.issubdtype(features.dtype, np.floating):
        return features
    features = native(features, "features")
    check_digits(features, "features")
    return features.astype(np.float32)


# Public ranges (low, high) of the mean, standard error and worst value of each measurement in
# breast_cancer, from its documentation, rounded outwards.
_BREAST_CANCER_RANGES = {
    "radius": ((6, 30), (0, 3), (6, 40)),
    "texture": ((9, 40), (0, 5), (10, 50)),
    "perimeter": ((40, 200), (0, 25), (50, 260)),
    "area": ((100, 2600), (0, 600), (100, 4300)),
    "smoothness": ((0.05, 0.2), (0, 0.04), (0.05, 0.25)),
    "compactness": ((0, 0.4), (0, 0.15), (0, 1.1)),
    "concavity": ((0, 0.5), (0, 0.4), (0, 1.3)),
    "concave points": ((0, 0.25), (0, 0.06), (0, 0.3)),
    "symmetry": ((0.1, 0.4), (0, 0.1), (0.1, 0.7)),
    "fractal dimension": ((0.04, 0.1), (0, 0.04), (0.05, 0.25)),
}


def bundled(name: str) -> Examples:
    """Returns a data set that needs no download: "digits", "breast_cancer" or "blobs".

    - "digits": 1797 handwritten digits, image 8x8x1 with 17 grey levels divided by 16, 10 classes
      (UCI).
    - "breast_cancer": 569 rows of 30 features, 2 classes, 1 = benign (UCI). Each feature is mapped
      affinely from the range that the data set's documentation states (rounded outwards) to [-1, 1]
      and clipped there.
    - "blobs": synthetic, 1000 rows of 2 features, 4 classes in turn. The centre of class k is 2
      (cos a, sin a) with
      a = pi k / 2 + pi / 4. `numpy.random.RandomState(0)` adds independent normal noise of standard deviation 0.6.

    Raises:
      ValueError: The name is another one.
    """
    from sklearn import datasets

    if name == "digits":
        digits = datasets.load_digits()
        return from_arrays(image=digits.images / 16, label=digits.target, num_classes=10, name=name)
    if name == "breast_cancer":
        table = datasets.load_breast_cancer()
        # The columns have all means, then all standard errors, then all worst values.
        low, high = (
            np.array(list(_BREAST_CANCER_RANGES.values()), np.float64)
            .swapaxes(0, 1)
            .reshape(30, 2)
            .T
        )
        features = np.clip(2 * (table.data - low) / (high - low) - 1, -1, 1)
        return from_arrays(features=features, label=table.target, num_classes=2, name=name)
    if name == "blobs":
        label = np.arange(1000) % 4
        angle = np.pi * label / 2 + np.pi / 4
        # The stream of RandomState is the same in all versions of NumPy.
        noise = np.random.RandomState(0).standard_normal((1000, 2))
        features = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.6 * noise
        return from_arrays(features=features, label=label, num_classes=4, name=name)
    raise ValueError(
        f"name must be one of 'digits', 'breast_cancer', 'blobs', got {name!r}. See also from_tfds."
    )
