"""Records of other libraries and files as sources. All but `from_npz` read records on demand.

A library of these records is imported only if a function here has to open something with it.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data.arrays import from_arrays
from jaxdp.data.ids import identifiers
from jaxdp.data.pictures import (
    ImageFiles,
    PixelRange,
    PrepareImages,
    check_range,
    path_inside,
)
from jaxdp.data.sources import Examples
from jaxdp.data.storage import ExampleReader
from jaxdp.data.tables import Table, check_classes, numbers, places, read_table
from jaxdp.files import Limits, optional, read_npz, shown

Prepare = Callable[[Any], Any]

LABELS = "labels.csv"  # the table of a folder of images
SUBFOLDER = "subfolder"  # a column that a folder of images has without its table

_NPZ = "Give a file that numpy.savez wrote, and get it again if it is damaged."


def from_npz(
    path: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    texts: Sequence[str] = (),
    num_classes: int = 0,
    name: str = "",
    limits: Limits | None = None,
) -> Examples:
    """Reads the arrays of an .npz file into memory, as `from_arrays` does.

    A compressed archive cannot be mapped into memory. Store what does not fit as .npy files, one
    per column, and give `from_arrays` their `numpy.load(path, mmap_mode="r")`.

    Args:
      path: The file.
      columns: {column: array in the file}. None takes all arrays by their own names.
      texts: Columns that are identifiers: texts, or whole numbers of any size, which become their
        digits. Arrays of texts need not be named.
      num_classes, name: As in `from_arrays`. The default name is the file's.
      limits: The limits on what is read, by default `jaxdp.files.Limits()`.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError, TypeError: The file is damaged or of another kind, lacks an array or exceeds a
        limit. A column of texts is missing or is no identifier. Or as in `from_arrays`.
    """
    named: dict[str, Any]
    if columns is None:
        named = dict(read_npz(path, None, limits=limits, remedy=_NPZ))
    else:
        arrays = read_npz(path, list(columns.values()), limits=limits, remedy=_NPZ)
        named = {column: arrays[stored] for column, stored in columns.items()}
    for key in texts:
        if key not in named:
            has = shown(", ".join(sorted(named)))
            raise ValueError(
                f"{shown(os.fspath(path))} has no column {key!r} of texts=. It has {has}."
            )
        named[key] = identifiers(named[key], f"column {key!r}")
    return from_arrays(**named, num_classes=num_classes, name=name or pathlib.Path(path).stem)


def from_hf(
    dataset: Any,
    split: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    prepare: Prepare | None = None,
    texts: Sequence[str] = (),
    num_classes: int = 0,
    name: str = "",
    declared: str = "",
) -> Examples:
    """Wraps a data set of the library `datasets` (Hugging Face). Records are read on demand.

    Args:
      dataset: A `datasets.Dataset`, the folder of one that `save_to_disk` wrote, or a name for
        `datasets.load_dataset`. Records come as NumPy arrays, unless it has a format or a transform
        of its own.
      split: The split, if dataset is a name, or a folder with several.
      columns: {column: column of the data set}. None takes all.
      prepare: `prepare(record) -> record` after that, for example to encode text. It must be
          deterministic.
      texts: Columns that are identifiers, such as those of patients. They are no part of an
        example: `by_group` takes them by name.
      num_classes: A public declaration. The default is that of a column "label" of the type
          `datasets.ClassLabel`.
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
        splits = shown(", ".join(dataset))
        raise ValueError(
            f"dataset has the splits {splits}. Give one of them: from_hf(dataset['train'])."
        )
    has_format = dataset.format["type"] is not None
    # A transform of the data set may change the columns.
    stored_columns = list(dataset[0]) if has_format else dataset.column_names
    stored_of = {column: column for column in stored_columns}
    if columns is not None:
        stored_of = dict(columns)
    if missing := [column for column in stored_of.values() if column not in stored_columns]:
        raise ValueError(
            shown(
                f"dataset has no column {', '.join(missing)}. It has {', '.join(stored_columns)}."
            )
        )
    if not num_classes:
        label = dataset.features.get(stored_of.get("label"))
        num_classes = getattr(label, "num_classes", 0)
    if not has_format:
        dataset = dataset.select_columns(list(stored_of.values()))
        dataset = dataset.with_format("numpy", dtype=None)  # None keeps dtypes

    def renamed(record: Any) -> Any:
        record = {column: record[stored] for column, stored in stored_of.items()}
        return record if prepare is None else prepare(record)

    reader = ExampleReader(dataset, renamed, texts=tuple(texts))
    return Examples(
        reader, num_classes, name or dataset.info.dataset_name or "hf", declared=declared
    )


def _open_hf(
    datasets: Any,
    dataset: str,
    split: str | None,
) -> Any:
    """Opens a folder that `save_to_disk` wrote, or loads the data set with a name."""
    folder = pathlib.Path(dataset)
    files = (folder / "state.json", folder / "dataset_dict.json")
    if not any(file.exists() for file in files):
        return datasets.load_dataset(dataset, split=split)
    opened = datasets.load_from_disk(dataset)
    return opened[split] if split and isinstance(opened, Mapping) else opened


def from_grain(
    records: Any,
    *,
    prepare: Prepare | None = None,
    texts: Sequence[str] = (),
    num_classes: int = 0,
    name: str = "grain",
    declared: str = "",
) -> Examples:
    """Wraps a source or `grain.MapDataset` of Grain, or any object with `len()` and `records[i]`.

    Records are read on demand. They may be any nesting of arrays, see `ExampleReader`. Nothing of
    Grain is imported.

    Args:
      records: The object. `records[i]` must be the same whenever it is read: neither augmented nor
          shuffled anew.
      prepare: `prepare(record) -> record`, for example to encode text. It must be deterministic.
      texts: Columns that are identifiers, if records are dicts after `prepare`. See `from_hf`.
      num_classes, name, declared: As in `Examples`.

    Raises:
      TypeError: records has no random access.
    """
    _check_random_access(records)
    reader = ExampleReader(records, prepare, texts=tuple(texts))
    return Examples(reader, num_classes, name, declared=declared)


def from_torch(
    dataset: Any,
    *,
    prepare: Prepare | None = None,
    texts: Sequence[str] = (),
    num_classes: int = 0,
    name: str = "torch",
    declared: str = "",
) -> Examples:
    """Wraps a map-style `torch.utils.data.Dataset`.

    Records are read on demand, and tensors become NumPy arrays. Nothing of PyTorch is imported.
    Images of torchvision are [C, H, W], those of this library [H, W, C].

    Args:
      dataset: The data set. A random transform belongs into `augment` of the trainer, not into the
          data set.
      prepare: `prepare(record) -> record`, for example
        `lambda pair: {"image": pair[0].permute(1, 2, 0), "label": pair[1]}`. It must be
        deterministic.
      texts, num_classes, name, declared: As in `from_grain`.

    Raises:
      TypeError: dataset is an iterable one, without random access.
    """
    return from_grain(
        dataset, prepare=prepare, texts=texts, num_classes=num_classes, name=name, declared=declared
    )


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
      length: The public number of tokens per row. The rest of a shorter text is -1, which is
          padding.
      encode: The PUBLIC tokenizer: text -> token ids in [0, num_classes). The default are the bytes
        of UTF-8, with a zero before and after each text, which no text contains.
      num_classes: The size of the vocabulary of `encode`, a public declaration.
      name: As in `Examples`.

    Returns:
      A source with the column "tokens", int32 [length].

    Raises:
      ValueError: length is below 2, or a token is outside of the vocabulary (the message says no
          token and no record).
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, a token and the next one, got {length}.")
    tokens = np.full((len(texts), length), -1, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        ids = np.asarray((encode or _bytes)(text)[:length], np.int64)
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= num_classes:
            raise ValueError(
                f"encode returns tokens outside of 0..{num_classes - 1}. Set num_classes to the "
                "size of its vocabulary."
            )
        row[: len(ids)] = ids
    return from_arrays(tokens=tokens, num_classes=num_classes, name=name)


def _bytes(text: str) -> list[int]:
    # The zeros mark both ends of a text. So a NUL in it becomes a blank.
    return [0, *text.encode().replace(b"\0", b" "), 0]


def from_folder(
    folder: str | os.PathLike[str],
    table: str = LABELS,
    *,
    classes: Sequence[str] | None = None,
    texts: Sequence[str] = (),
    num_classes: int = 0,
    prepare: PrepareImages | None = None,
    pixel_range: PixelRange | None = None,
    limits: Limits | None = None,
    name: str = "",
    declared: str = "",
) -> Examples:  # Ten arguments, since each says what a file cannot say about itself.
    """Wraps a folder of images with a CSV file.

    Images are read on demand, the other columns are in memory. Every column but "path" is kept as
    text, cell by cell, so that `by_group(source, "patient", ...)` tells "007" from "7", and
    `by_owners(source, "people", ...)` reads "anna;ben" as two people. A column of
    numbers is also a column of the examples. A column without any number is text alone.

    Args:
      folder: The folder.
      table: The CSV file, relative to the folder: UTF-8, commas, a header (see
        `jaxdp.data.tables`). The column "path" has the path of an image inside the folder, and
        "label" the class.
      classes: The names of the classes in the column "label", in the order of their numbers. A
          public declaration.
      texts: Columns that are text although some cells are numbers, such as the identifiers "12" and
          "1_23". "subfolder" may be among them without a column of that name: it then is the first
          folder of each path, "anna;ben" for "anna;ben/scan_1.png".
      num_classes: If the column "label" has the numbers of the classes. A public declaration.
      prepare: `prepare(images) -> floats in [0, 1]` of one shape, for images of differing sizes,
        such as `jaxdp.models.Preprocessing.prepare`. It is given uint8, or floats in [0, 1] for
        other pixels. The result is kept in the pixel type of the images.
      pixel_range: (low, high), the public pixel values that become 0 and 1, for example (0, 4095).
        The default is the range of the pixel type: 255 or 65535 becomes 1. Pixels of 32 bits and
        floats need it. `jaxdp.data.pictures` has the table of what files hold.
      limits: The limit on the pixels of an image, compared with its header before decoding. The
          default is `Limits()`.
      name: The name of the source. The default is the table's.
      declared: As in `Examples`.

    Returns:
      A source with the column "image" (grey images have one channel, all others become RGB, turned
      as EXIF says), and the columns of numbers: whole numbers as int32, others as float32.

    Raises:
      FileNotFoundError: The folder has no such table or image.
      ValueError: The table is not as above, has no column "path" or has one "image", or a path
        leads out of the folder. A column has numbers and other cells, or whole numbers outside of
        32 bits. A label is not as declared. When records are read: an image is damaged, too large,
        of another size or pixel type than the first, has several frames, or has no range. The
        message names the line or file and no cell, for the owner of the data.
    """
    root = pathlib.Path(folder)
    if root.is_file():
        raise ValueError(
            f"folder must be a folder, got the file {shown(root)}. Give its folder, and the name "
            "of the CSV file as the second argument."
        )
    check_range(pixel_range)
    rows = _read_image_table(root, table, texts)
    cells = {key: column for key, column in rows.columns.items() if key != "path"}
    # Names of classes become numbers in the column of the examples, and stay text in `cells`.
    cells_or_numbers = dict(cells)
    if classes is not None and "label" in cells:
        labels = places(rows, "label", cells["label"], classes, kind="classes")
        cells_or_numbers["label"] = tuple(map(str, labels))
        num_classes = len(classes)
    coded = dataclasses.replace(rows, columns=cells_or_numbers)
    columns: dict[str, Any] = numbers(coded, texts=texts)
    if num_classes and "label" not in columns:
        where = shown(os.fspath(root / table))
        raise ValueError(
            f"{where} must have a column 'label' of integers, or of names that classes= declares."
        )
    if num_classes:
        check_classes(rows, "label", columns["label"], num_classes)
    if columns:
        columns = dict(from_arrays(**columns, num_classes=num_classes).arrays)
    images = ImageFiles(root, rows.columns["path"], prepare, limits or Limits(), pixel_range)
    return Examples(
        {"image": images, **columns},
        num_classes,
        name or pathlib.Path(table).stem,
        declared=declared,
        texts=cells,
    )


def _read_image_table(
    root: pathlib.Path,
    table: str,
    texts: Sequence[str],
) -> Table:
    """Reads the table of a folder of images, whose paths all lead into the folder."""
    rows = read_table(root / table, needed=("path", *(set(texts) - {SUBFOLDER})))
    for row, path in enumerate(rows.columns["path"]):
        if not path_inside(root, path):
            raise rows.error(
                "must have a path inside of the folder in the column 'path'. Correct the path.", row
            )
    if SUBFOLDER in texts and SUBFOLDER not in rows.columns:
        cells = tuple(_subfolder(rows, row) for row in range(len(rows)))
        rows = dataclasses.replace(rows, columns={**rows.columns, SUBFOLDER: cells})
    if "image" in rows.columns:
        raise ValueError(
            f"{shown(os.fspath(root / table))} has a column 'image', the name of the pixels. "
            "Rename it."
        )
    return rows


def _subfolder(rows: Table, row: int) -> str:
    """Returns the first folder of the path of an image."""
    path = pathlib.PurePath(os.path.normpath(rows.columns["path"][row]))
    if len(path.parts) < 2:
        raise rows.error(
            f"must have an image in a folder of its own, for the owner {SUBFOLDER!r}. Move the "
            "image, or name a column with owners.",
            row,
        )
    return path.parts[0]


def _check_random_access(records: Any) -> None:
    if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
        raise TypeError(
            f"records must have len() and records[i], but {type(records).__name__} has not. "
            "Private sampling needs random access: give a map-style data set, not an iterable one."
        )
