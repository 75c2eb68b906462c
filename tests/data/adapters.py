"""Adapters of data: each function makes a source of given columns, {name: array [n, ...]}, and
texts, {name: n texts}.

The conformance suite (`test_adapters`) and the tests of identifiers, numbers and edits draw from
here. A new adapter is one function and one row of `ADAPTERS`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp import data

Columns = Mapping[str, Any]
Texts = Mapping[str, Sequence[str]]
NO_TEXTS: Texts = {}


def arrays(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    return data.from_arrays(**columns, **texts)


def texts_as_bytes(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    encoded = {name: [text.encode() for text in cells] for name, cells in texts.items()}
    return data.from_arrays(**columns, **encoded)


def examples(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    return data.Examples(columns, texts=texts)


def npz(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    np.savez(
        folder / "x.npz", **columns, **{name: np.array(cells) for name, cells in texts.items()}
    )
    return data.from_npz(folder / "x.npz")


def mapped_columns(folder: Path, columns: Columns) -> dict[str, np.ndarray]:
    """Writes a file for each column, and maps it into memory."""
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in columns}


def mapped(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    return data.from_arrays(**mapped_columns(folder, columns), **texts)


def declared(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    return data.Examples(mapped_columns(folder, columns), texts=texts, declared="version 1")


class Column:
    """A column of another library, such as HDF5."""

    def __init__(self, x: np.ndarray):
        self.x, self.dtype, self.shape = x, x.dtype, x.shape

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.x[rows]


def columns_of_a_library(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    return data.Examples({name: Column(x) for name, x in columns.items()}, texts=texts)


def records_of(columns: Columns, texts: Texts = NO_TEXTS) -> list[tuple[Any, ...]]:
    return list(zip(*columns.values(), *texts.values(), strict=True))


def records(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    names = (*columns, *texts)
    dicts = [dict(zip(names, record, strict=True)) for record in records_of(columns, texts)]
    return data.from_grain(dicts, texts=tuple(texts))


def torch(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    def prepare(record: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip((*columns, *texts), record, strict=True))

    return data.from_torch(records_of(columns, texts), prepare=prepare, texts=tuple(texts))


class Own:
    """A source of a user, without a base class, a name, classes or texts."""

    fingerprint = "version 1"

    def __init__(self, columns: Columns):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def gather(self, indices: np.ndarray) -> Any:
        return {name: column[indices] for name, column in self.columns.items()}


def own(folder: Path, columns: Columns, texts: Texts = NO_TEXTS) -> Any:
    return Own(columns)


ADAPTERS = {
    adapter.__name__: adapter
    for adapter in (
        arrays,
        examples,
        npz,
        mapped,
        declared,
        columns_of_a_library,
        records,
        torch,
        own,
    )
}
