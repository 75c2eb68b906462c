"""Stored columns that do not change under their fingerprint.

A release that repeats after a crash has the same noise exactly if the fingerprint of its records is
the same. Records that change in between would get the old noise, and the difference of the two
values would be the difference of two sums. So a fingerprint names what is read, in one of two ways:

- Arrays in memory are copied once, into memory that NumPy lets nobody write (`immutable`).
- All else is read on demand: mapped files, folders of images, records of other libraries. From the
  first fingerprint on, the hash of each row that is read is kept, 16 bytes a row. A row that is
  read again and differs is refused.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tree

from jaxdp.data.numbers import check_digits, check_mask, check_whole, native
from jaxdp.files import shown
from jaxdp.transforms.not_finite import is_floating

_HASH_BYTES = 16


def immutable(array: np.ndarray) -> np.ndarray:
    """Returns an array with the same numbers that nobody can change.

    It is a copy, unless the given one is immutable already.
    """
    if _is_immutable(array):
        return array
    # An array over `bytes` stays read-only: NumPy refuses to set its flag.
    return np.ndarray(array.shape, array.dtype, buffer=array.tobytes())


def _is_immutable(array: np.ndarray) -> bool:
    """Returns whether the numbers lie in `bytes`.

    Any other read-only array can be made writable again.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return type(array) is np.ndarray and isinstance(base, bytes)


def on_device(array: Any, dtype: Any = None) -> jax.Array:
    """Returns a JAX array that shares no memory with an array of NumPy.

    `jax.device_put` shares an aligned array on a CPU, and a program may read its arguments after
    the call of it returned. So an edit in place would reach the device. Which of the two is right
    depends on who else has the array:

    - `on_device`: The array is a caller's, who may change or free it, and the result is read after
      this call.
    - `jax.device_put`: Nobody else has the array, or nobody can change it. It was computed or read
      here, it comes from `Source.gather`, or it is `immutable`.

    Neither compiles anything. `jnp.asarray` compiles a program for each shape. It is for values
    that may be traced.
    """
    if isinstance(array, jax.Array):
        return jnp.asarray(array, dtype)
    return own_copy(array, dtype)


def own_copy(array: Any, dtype: Any = None) -> jax.Array:
    """Returns a JAX array whose memory nobody else has.

    `jnp.array` would compile a program for each shape.
    """
    if isinstance(array, jax.Array):
        return jax.device_put(jnp.asarray(array, dtype), may_alias=False)
    # JAX may share the memory of this copy, which nobody else has either. `may_alias=False` does
    # not keep JAX from sharing an array of NumPy.
    return jax.device_put(np.array(array, dtype))


def zeros_on_device(shapes: Any) -> Any:
    """Returns a pytree of zeros of the shapes and dtypes of a pytree.

    Zeros that the device makes would need a program for each shape.
    """
    return jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))


def stored(column: Any, where: str) -> Any:
    """Returns a column for `Examples`: an immutable array, or a `Watched` column.

    Arrays in memory are checked (`jaxdp.data.numbers`). What is read on demand is checked when it
    is read.

    Raises:
      TypeError, ValueError: An array in memory does not hold numbers that a device has.
    """
    if isinstance(column, Watched | ExampleReader):
        return column
    if isinstance(column, jax.Array):
        column = np.asarray(column)
    if isinstance(column, np.memmap) or not isinstance(column, np.ndarray):
        return Watched(column, where)
    if _is_immutable(column):
        return column
    column = native(column, where)
    check_whole(column, where)
    check_digits(column, where)
    return immutable(column)


def raw(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array in C order, uint8 [m], as a view where the memory allows it."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Seen:
    """Hashes of rows that have been read. Equal rows pass, and others are refused.

    Args:
      count: The number of rows.
      where: The name of the rows in errors.
    """

    def __init__(self, count: int, where: str):
        self._where = where
        self._hashes = np.zeros((count, _HASH_BYTES), np.uint8)
        self._known = np.zeros(count, bool)

    def compare(self, rows: Sequence[int], contents: Sequence[Sequence[np.ndarray]]) -> None:
        """Compares rows with what was read before, and remembers new ones.

        Raises:
          ValueError: A row has changed. The message names it, for the owner of the data.
        """
        for row, arrays in zip(rows, contents, strict=True):
            row_hash = _hash(arrays)
            if self._known[row] and not np.array_equal(self._hashes[row], row_hash):
                raise ValueError(
                    f"record {row} of {self._where} has changed since its fingerprint was read. A "
                    "release that is repeated would put its old noise on other records. Make the "
                    "source again: its next release has fresh noise and is charged."
                )
            self._hashes[row] = row_hash
            self._known[row] = True


def _hash(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the hash of the dtypes, shapes and bytes of arrays, uint8 [16]."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for array in arrays:
        # Other shapes may have these bytes.
        digest.update(f"{array.dtype.str} {array.shape}\n".encode())
        digest.update(raw(array).data)
    return np.frombuffer(digest.digest(), np.uint8)


class Watched:
    """A column that is read on demand: an object with `dtype`, `shape`, `len()` and `column[rows]`.

    Attributes:
      column: The object.
      where: Its name in errors.
    """

    def __init__(self, column: Any, where: str):
        self.column = column
        self.where = where
        self._seen: Seen | None = None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers, in the byte order of the machine."""
        dtype: np.dtype = self.column.dtype
        return dtype.newbyteorder("=")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the column."""
        return tuple(self.column.shape)

    def __len__(self) -> int:
        return len(self.column)

    def watch(self) -> None:
        """Keeps the hashes of all rows that are read from now on."""
        if self._seen is None:
            self._seen = Seen(len(self), self.where)

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns the rows at integers [B], or of a slice, as an array in memory.

        Raises:
          TypeError, ValueError: The numbers are not such as a device has, or a watched row has
              changed.
        """
        # A copy: a mapped file could change between its hash and its use.
        array = native(np.array(self.column[rows]), self.where)
        check_whole(array, self.where)
        if self._seen is not None:
            numbers = np.arange(len(self))[rows]
            self._seen.compare(numbers.tolist(), [(row,) for row in array])
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleReader:
    """Records that are read as a whole, one by one, from an object with `len()` and `records[i]`.

    `reader[rows]` reads only these records, by `records.__getitems__` if there is one. All records
    must have the columns, shapes and dtypes of record 0.

    Attributes:
      records: The object. A record is any nesting of dicts and tuples. Its leaves and its lists
        become NumPy arrays. A grey "image" [H, W] becomes [H, W, 1].
      prepare: `prepare(record) -> record`, for example to encode text or to pad. It must be
          deterministic.
      at_once: The number of records that the fingerprint reads at once.
      texts: Columns of a record that are text, such as the identifier of a patient. They are no
        part of an example, see `jaxdp.data.read_ids`.
    """

    records: Any
    prepare: Callable[[Any], Any] | None = None
    at_once: int = 64
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rows: np.ndarray) -> Any:
        """Returns the records at `rows`, integers [B], stacked and without texts.

        Raises:
          ValueError: A record differs from record 0, or has changed since the fingerprint. The
            message names it, for the owner who reads the data.
          TypeError: A column is not of numbers.
        """
        return self.read(rows)[0]

    def read(self, rows: np.ndarray) -> tuple[Any, dict[str, list[Any]]]:
        """Returns the records at `rows` as `reader[rows]` does, and their texts by column."""
        numbers = rows.tolist()
        pairs = self._read(numbers) if numbers else []
        records = [record for record, _ in pairs]
        for row, record in zip(numbers, records, strict=True):
            self._check_like_first(row, record)
        if self._seen:
            contents = [tree.flatten(record) for record in records]
            self._seen[0].compare(numbers, contents)
        texts = {key: [text[key] for _, text in pairs] for key in self.texts}
        if not records:
            empty = tree.map_structure(
                lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), self._first
            )
            return empty, texts
        stacked = tree.map_structure(lambda *leaves: np.stack(leaves), *records)
        for path, array in tree.flatten_with_path(stacked):
            check_whole(array, _column_name(path))
        return stacked, texts

    @property
    def has_floats(self) -> bool:
        """Whether a column is of floating point."""
        return any(is_floating(dtype) for _, _, dtype in _column_types(self._first))

    def _check_like_first(self, row: int, record: Any) -> None:
        """Raises ValueError if a record has other columns, shapes or dtypes than record 0."""
        columns = _column_types(record)
        first = _column_types(self._first)
        if columns == first:
            return
        different = {"/".join(map(str, path)) for path, *_ in set(columns) ^ set(first)}
        raise ValueError(
            f"record {row} differs from record 0 in the shape or dtype of "
            f"{', '.join(sorted(different))}. Give all records the same columns, shapes and "
            "dtypes, for example by padding in prepare=."
        )

    def watch(self) -> None:
        """Keeps the hashes of all records that are read from now on."""
        if not self._seen:
            self._seen.append(Seen(len(self), "the source"))

    @functools.cached_property
    def _seen(self) -> list[Seen]:
        # The dataclass is frozen, so the list holds what `watch` sets.
        return []

    @functools.cached_property
    def _first(self) -> Any:
        ((first, _),) = self._read([0])
        for path, _, dtype in _column_types(first):
            if dtype.kind in "OSUMmT":  # objects, texts, dates and times
                raise TypeError(
                    f"{_column_name(path)} has the dtype {dtype}. Encode it as numbers in "
                    "prepare=, or leave it out. If it is an identifier, name it in texts=."
                )
        for path, array in tree.flatten_with_path(first):
            native(array, _column_name(path))
        return first

    def _read(self, rows: list[int]) -> list[tuple[Any, dict[str, Any]]]:
        """Returns the records at `rows` as arrays, and their texts."""
        if hasattr(self.records, "__getitems__"):
            records = self.records.__getitems__(rows)
            return [self._arrays(row, record) for row, record in zip(rows, records, strict=True)]
        # One by one, because an object may fill the same arrays for every record.
        return [self._arrays(row, self.records[row]) for row in rows]

    def _arrays(self, row: int, record: Any) -> tuple[Any, dict[str, Any]]:
        """Returns a record as arrays, and its texts."""
        if self.prepare is not None:
            record = self.prepare(record)
        texts: dict[str, Any] = {}
        if self.texts:
            texts, record = self._apart(row, record)
        try:
            # A list is an array, not a part of the structure.
            record = tree.traverse(
                lambda part: np.asarray(part) if isinstance(part, list) else None, record
            )
        except ValueError as error:
            raise ValueError(
                f"record {row} has a list of several lengths. Pad it in prepare=."
            ) from error
        arrays = tree.map_structure(_array, record)
        # A grey image has one channel, as models take it.
        if isinstance(arrays, dict) and "image" in arrays and arrays["image"].ndim == 2:
            arrays["image"] = arrays["image"][..., None]
        return arrays, texts

    def _apart(self, row: int, record: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the texts of a record, and the record without them."""
        has = [type(record).__name__]
        if isinstance(record, dict):
            has = sorted(map(str, record))
        if missing := [key for key in self.texts if key not in has]:
            names = ", ".join(map(repr, missing))
            raise ValueError(
                f"record {row} has no column {names} of texts=. It has {shown(', '.join(has))}."
            )
        texts = {key: record[key] for key in self.texts}
        return texts, {key: part for key, part in record.items() if key not in texts}


def _array(leaf: Any) -> np.ndarray:
    """Returns a copy as an array of NumPy in the byte order of the machine."""
    if hasattr(leaf, "detach"):
        # PyTorch makes NumPy arrays only of tensors on the host without a gradient.
        leaf = leaf.detach().cpu()
    check_mask(leaf, "a record")
    array = np.array(leaf)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _column_name(path: Sequence[Any]) -> str:
    return f"column {'/'.join(map(str, path))!r}"


def _column_types(record: Any) -> list[tuple[Any, ...]]:
    """Returns (path, shape, dtype) of each column of a record."""
    return [(path, leaf.shape, leaf.dtype) for path, leaf in tree.flatten_with_path(record)]
