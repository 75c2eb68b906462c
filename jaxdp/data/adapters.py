"""Records of other libraries and files as sources. All but `from_npz` read records on demand.

A library of these records is imported only if a function here has to open something with it.
"""

import csv
import dataclasses
import functools
import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data.sources import ExampleReader, Examples, from_arrays
from jaxdp.files import Limits, check_image, optional, read_npz

Prepare = Callable[[Any], Any]


def from_npz(
    path: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    num_classes: int = 0,
    name: str = "",
    limits: Limits | None = None,
) -> Examples:
    """Reads the arrays of an .npz file into memory, as `from_arrays` does.

    A compressed archive cannot be mapped into memory. Store what does not fit as .npy files, one per column, and give
    `from_arrays` their `numpy.load(path, mmap_mode="r")`.

    Args:
      path: The file.
      columns: {column: array in the file}. None takes all arrays by their own names.
      num_classes, name: As in `from_arrays`. The default name is the file's.
      limits: The limits on what is read, by default `jaxdp.files.Limits()`.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError, TypeError: The file is damaged, lacks an array or exceeds a limit. Or as in `from_arrays`.
    """
    found = read_npz(path, None if columns is None else list(columns.values()), limits=limits)
    named = found if columns is None else {column: found[stored] for column, stored in columns.items()}
    return from_arrays(**named, num_classes=num_classes, name=name or pathlib.Path(path).stem)


def from_hf(
    dataset: Any,
    split: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    prepare: Prepare | None = None,
    num_classes: int = 0,
    name: str = "",
    declared: str = "",
) -> Examples:
    """Wraps a data set of the library `datasets` (Hugging Face). Records are read on demand.

    Args:
      dataset: A `datasets.Dataset`, the folder of one that `save_to_disk` wrote, or a name for `datasets.load_dataset`.
        Records come as NumPy arrays, unless it has a format or a transform of its own.
      split: The split, if dataset is a name, or a folder with several.
      columns: {column: column of the data set}. None takes all.
      prepare: `prepare(record) -> record` after that, for example to encode text. It must be deterministic.
      num_classes: A public declaration. The default is that of a column "label" of the type `datasets.ClassLabel`.
      name: The name of the source. The default is the name of the data set.
      declared: As in `Examples`.

    Raises:
      ImportError: dataset is a name or a folder, and the extra "hf" is not installed.
      FileNotFoundError: As `datasets` raises it.
      ValueError: dataset has no such column, or has several splits and none is chosen.
      TypeError: dataset is an iterable one without random access.
    """
    if isinstance(dataset, str | os.PathLike):
        name = name or os.fspath(dataset)
        dataset = _open_hf(optional("datasets", "hf"), os.fspath(dataset), split)
    _check_random_access(dataset)
    if isinstance(dataset, Mapping):
        raise ValueError(f"dataset has the splits {', '.join(dataset)}. Give one of them: from_hf(dataset['train']).")
    plain = dataset.format["type"] is None
    there = dataset.column_names if plain else list(dataset[0])  # a transform may change the columns
    wanted = {column: column for column in there} if columns is None else dict(columns)
    if missing := [column for column in wanted.values() if column not in there]:
        raise ValueError(f"dataset has no column {', '.join(missing)}. It has {', '.join(there)}.")
    num_classes = num_classes or getattr(dataset.features.get(wanted.get("label")), "num_classes", 0)
    if plain:
        dataset = dataset.select_columns(list(wanted.values())).with_format("numpy", dtype=None)  # None keeps dtypes

    def renamed(record: Any) -> Any:
        record = {column: record[stored] for column, stored in wanted.items()}
        return record if prepare is None else prepare(record)

    name = name or dataset.info.dataset_name or "hf"
    return Examples(ExampleReader(dataset, renamed), num_classes, name, None, declared)


def _open_hf(datasets: Any, dataset: str, split: str | None) -> Any:
    if not any((pathlib.Path(dataset) / file).exists() for file in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(dataset, split=split)
    found = datasets.load_from_disk(dataset)
    return found[split] if split and isinstance(found, Mapping) else found


def from_grain(
    records: Any,
    *,
    prepare: Prepare | None = None,
    num_classes: int = 0,
    name: str = "grain",
    declared: str = "",
) -> Examples:
    """Wraps a random-access source of Grain, a `grain.MapDataset`, or any object with `len()` and `records[i]`.

    Records are read on demand. They may be any nesting of arrays, see `ExampleReader`. Nothing of Grain is imported.

    Args:
      records: The object. `records[i]` must be the same whenever it is read: neither augmented nor shuffled anew.
      prepare: `prepare(record) -> record`, for example to encode text. It must be deterministic.
      num_classes, name, declared: As in `Examples`.

    Raises:
      TypeError: records has no random access.
    """
    _check_random_access(records)
    return Examples(ExampleReader(records, prepare), num_classes, name, None, declared)


def from_torch(
    dataset: Any,
    *,
    prepare: Prepare | None = None,
    num_classes: int = 0,
    name: str = "torch",
    declared: str = "",
) -> Examples:
    """Wraps a map-style `torch.utils.data.Dataset`. Records are read on demand, and tensors become NumPy arrays.

    Nothing of PyTorch is imported. Images of torchvision are [C, H, W], those of this library [H, W, C].

    Args:
      dataset: The data set. A random transform belongs into `augment` of the trainer, not into the data set.
      prepare: `prepare(record) -> record`, for example `lambda pair: {"image": pair[0].permute(1, 2, 0), "label":
        pair[1]}`. It must be deterministic.
      num_classes, name, declared: As in `Examples`.

    Raises:
      TypeError: dataset is an iterable one, without random access.
    """
    return from_grain(dataset, prepare=prepare, num_classes=num_classes, name=name, declared=declared)


def from_texts(
    texts: Sequence[str],
    *,
    length: int,
    encode: Callable[[str], Sequence[int]] | None = None,
    num_classes: int = 256,
    name: str = "texts",
) -> Examples:
    """Encodes texts as rows of tokens of one length, in memory. Longer texts are cut.

    Args:
      texts: One text per record.
      length: The public number of tokens per row. The rest of a shorter text is -1, which is padding.
      encode: The PUBLIC tokenizer: text -> token ids in [0, num_classes). The default are the bytes of UTF-8, with a
        zero before and after each text, which no text contains.
      num_classes: The size of the vocabulary of `encode`, a public declaration.
      name: As in `Examples`.

    Returns:
      A source with the column "tokens", int32 [length].

    Raises:
      ValueError: length is below 2, or a token is outside of the vocabulary (the message says no token and no record).
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, a token and the next one, got {length}.")
    tokens = np.full((len(texts), length), -1, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        ids = (encode or _bytes)(text)[:length]
        row[: len(ids)] = ids
    if tokens.max(initial=0) >= num_classes or tokens.min(initial=-1) < -1:
        raise ValueError(
            f"encode returns tokens outside of 0..{num_classes - 1}. Set num_classes to the size of its vocabulary."
        )
    return from_arrays(tokens=tokens, num_classes=num_classes, name=name)


def _bytes(text: str) -> list[int]:
    return [0, *text.encode().replace(b"\0", b" "), 0]


def from_folder(
    folder: str | os.PathLike[str],
    table: str = "labels.csv",
    *,
    classes: Sequence[str] | None = None,
    num_classes: int = 0,
    prepare: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None,
    limits: Limits | None = None,
    name: str = "",
    declared: str = "",
) -> Examples:
    """Wraps a folder of images with a CSV file. Images are read on demand, the other columns are in memory.

    Args:
      folder: The folder.
      table: The CSV file, relative to the folder. Its header has "path", the path of an image relative to the folder.
        Its other columns are of numbers. "label" has the class. Text columns are left out, except "label" with classes.
      classes: The names of the classes in the column "label", in the order of their numbers. A public declaration.
      num_classes: If the column "label" has the numbers of the classes. A public declaration.
      prepare: `prepare(images) -> floats in [0, 1]` of one shape, for images of differing sizes, such as
        `jaxdp.models.Preprocessing.prepare`. The result is kept as uint8.
      limits: The limit on the pixels of an image, compared with its header before decoding. The default is `Limits()`.
      name: The name of the source. The default is the table's.
      declared: As in `Examples`.

    Returns:
      A source with the column "image" (grey images have one channel, all others become RGB), and the other columns:
      whole numbers as int32 or int64, others as float32.

    Raises:
      FileNotFoundError: The folder has no such table or image.
      ValueError: The table has no rows or no column "path", or a label is not as declared. When records are read: an
        image is damaged, too large, or of another size than the first. The message names the row or file, for the owner
        of the data.
    """
    root = pathlib.Path(folder)
    with (root / table).open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows or "path" not in rows[0]:
        raise ValueError(f"{root / table} must have rows, and a header with 'path'.")
    text = {key: [row[key] for row in rows] for key in rows[0] if key is not None and key != "path"}
    if classes is not None and "label" in text:
        text["label"] = [_class_of(label, classes, root / table, line) for line, label in enumerate(text["label"], 2)]
        num_classes = len(classes)
    found = {key: _numbers(values) for key, values in text.items()}
    columns: Any = {key: numbers for key, numbers in found.items() if numbers is not None}
    if num_classes and "label" not in columns:
        raise ValueError(f"{root / table} must have a column 'label' of integers, or of names that classes= declares.")
    if columns:
        columns = from_arrays(**columns, num_classes=num_classes).arrays
    paths = np.array([row["path"] for row in rows], object)
    images = _ImageFiles(root, paths, prepare, limits or Limits())
    return Examples({"image": images, **columns}, num_classes, name or pathlib.Path(table).stem, None, declared)


def _class_of(label: Any, classes: Sequence[str], path: pathlib.Path, line: int) -> str:
    if label not in classes:
        raise ValueError(f"label of line {line} of {path} must be one of the classes {', '.join(classes)}.")
    return str(list(classes).index(label))


def _numbers(values: Sequence[str]) -> np.ndarray | None:
    for dtype in (np.int64, np.float32):
        try:
            numbers = np.array(values).astype(dtype)
        except (ValueError, OverflowError):
            continue
        narrow = dtype is np.int64 and np.abs(numbers).max() < 2**31
        return numbers.astype(np.int32) if narrow else numbers
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class _ImageFiles:
    """A column of `Examples` that reads as a uint8 array [n, H, W, C]. It decodes the files of rows that are read."""

    root: pathlib.Path
    paths: np.ndarray
    prepare: Callable[[Sequence[np.ndarray]], np.ndarray] | None
    limits: Limits

    dtype = np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.paths), *self._first)

    def __getitem__(self, rows: Any) -> np.ndarray:
        found = [self._decoded(path) for path in self.paths[rows]]
        if not found:
            return np.zeros((0, *self._first), np.uint8)
        if self.prepare is not None:
            return np.rint(255 * np.asarray(self.prepare(found))).astype(np.uint8)
        for path, image in zip(self.paths[rows], found, strict=True):
            if image.shape != self._first:
                raise ValueError(
                    f"image {self.root / path} has the shape {image.shape}, and the first one {self._first}. Give all "
                    "images one shape with prepare=."
                )
        return np.stack(found)

    @functools.cached_property
    def _first(self) -> tuple[int, ...]:
        first = self._decoded(self.paths[0])
        return first.shape if self.prepare is None else np.shape(self.prepare([first]))[1:]

    def _decoded(self, path: str) -> np.ndarray:
        from PIL import Image

        data = (self.root / path).read_bytes()
        check_image(data, shape=(), what=f"image {self.root / path}", limits=self.limits)
        with Image.open(io.BytesIO(data)) as image:
            grey = image.mode in ("1", "L", "I;16", "I", "LA")
            return np.atleast_3d(np.asarray(image.convert("L" if grey else "RGB")))


def _check_random_access(records: Any) -> None:
    if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
        raise TypeError(
            f"records must have len() and records[i], but {type(records).__name__} has not. Private sampling needs "
            "random access: give a map-style data set, not an iterable one."
        )
