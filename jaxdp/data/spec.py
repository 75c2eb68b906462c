"""What a study reads, as data: a `DataSpec` for each role, and `open`, which makes the source.

    spec = DataSpec(source="folder", path="xrays", part="site_0.csv", num_classes=2)
    images = jaxdp.data.open(spec)

A launcher parses the `data` part of its config to specs once (`launch.data`). Below that nobody
sees a config. A new format is one function and one row of `FORMATS`.
"""

import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxdp.data.adapters import LABELS, SUBFOLDER, from_folder, from_hf, from_npz
from jaxdp.data.apart import check_owners_apart
from jaxdp.data.arrays import from_arrays
from jaxdp.data.bundled_sets import bundled
from jaxdp.data.ids import owners_of
from jaxdp.data.order import shuffled
from jaxdp.data.owners import families
from jaxdp.data.pictures import PixelRange, PrepareImages
from jaxdp.data.selection import image_shape
from jaxdp.data.sources import Examples, read_ids
from jaxdp.data.tables import read_table
from jaxdp.data.tabular import from_csv
from jaxdp.data.tfds import from_tfds, is_published
from jaxdp.files import Limits, npz_names, read_npz, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSpec:
    """One set of records, or one part of it for a role in a study.

    Attributes:
      source: The format, a key of `FORMATS`, or "package.module:function", which returns the
        examples of a part as function(part, **options).

            "bundled"  a set of scikit-learn
            "tfds"     TensorFlow Datasets
            "npz"      .npz files
            "hf"       a data set of the library `datasets` (Hugging Face)
            "folder"   a folder of images with CSV files, see `from_folder`
            "csv"      a table, see `from_csv`

      name: The name of the set, also in messages and the ledger.
      part: What is read of the set.

            bundled   a word for the rows, such as a role; "" for all rows
            tfds, hf  a split; hf takes a whole one
            npz       a file of the folder `path`, such as "train.npz", or a part of the file `path`
            folder    a CSV file in the folder `path`, or a word for a `share` of its labels.csv
            csv       a file of the folder `path`, or a word for a `share` of the file `path`
            function  its first argument

      rows: bundled: The first and the last row of the part (excluded) in the order of
        `split_seed`. None takes the whole set as it is.
      split_seed: bundled, csv, folder: The seed of the order.
      share: csv, folder: The part of the file `path`, or of labels.csv in it, from and to numbers
        in [0, 1], in the order of `split_seed`. With a group it is a share of the owners, of whom
        those who share records stay together. None takes the whole file.
      path: npz: The path of a file as MedMNIST distributes it, with the arrays {part}_images and
        {part}_labels, or of a folder of .npz files. hf: A folder of `save_to_disk`, or "" to load
        `name`. folder: The folder. csv: The file, or a folder of files.
      label: csv: The column with the class.
      data_dir: tfds: The folder of the data. "" is the default folder of TFDS.
      columns: npz, hf: {column: name in the file}. None takes all by their own names.
      num_classes: npz, hf, folder, csv: The number of classes.
      class_names: folder, csv: The names of the classes in the CSV files, if they are not numbers.
      classes: The labels to keep, which become 0, 1, ... in this order. () keeps all.
      in_memory: tfds, hf, folder, function: Whether all examples are kept in memory, or read on
        demand.
      options: function: Its keyword arguments. csv: The further arguments of `from_csv`. A mapping
        of columns may be pairs (column, value).
      limits: npz, folder: The limits on what is read. None is `Limits()`.
      prepare: tfds, folder: Whether images differ in size and are resized and cut as the model's
        preprocessing says.
      pixel_range: folder: (low, high), the pixel values that become 0 and 1, see `from_folder`.
        None is the range of the pixel type.
      group: The column with the owner of each record, such as a patient. Each owner is then one
        unit of privacy with its records. Its values are texts or whole numbers, see
        `jaxdp.data.ids`: "007" and "7" are two owners. For a folder, "subfolder" is the first
        folder of each path. "" makes each record a unit.
      max_records: With a group: The largest number of records of one owner that count, see
        `by_group`.
      separator: With a group: The text between the owners of one record, see `by_owners`. "" for
        records of one owner each.
      unit: The word for the unit of privacy in the ledger.
      adjacency: The neighbouring relation in the ledger.
      crop_padding, flip: The augmentation of the training images, see `augmentation`.
      role: The role of the part in the study, such as "private". "" for a whole set.
      where: What errors put before the name of a field, such as "config.data".
    """

    source: str
    name: str = ""
    part: str = ""
    rows: tuple[int, int] | None = None
    split_seed: int = 0
    share: tuple[float, float] | None = None
    path: str = ""
    label: str = ""
    data_dir: str = ""
    columns: Mapping[str, str] | None = None
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    in_memory: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limits: Limits | None = None
    prepare: bool = False
    pixel_range: PixelRange | None = None
    group: str = ""
    max_records: int = 0
    separator: str = ""
    unit: str = "example"
    adjacency: str = "add_remove"
    crop_padding: int = 0
    flip: bool = False
    role: str = ""
    where: str = "spec"

    @property
    def title(self) -> str:
        """The name of the source in messages and the ledger, such as "digits/private"."""
        return f"{self.name}/{self.part}" if self.part else self.name

    @property
    def field(self) -> str:
        """What errors call the part, such as "config.data.parts.private"."""
        return f"{self.where}.parts.{self.role}" if self.role else self.where

    @property
    def is_public(self) -> bool:
        """Whether everybody has the records: those of scikit-learn, and those whose name TensorFlow
        Datasets itself knows. Own data in the format of TFDS is private.
        """
        return self.source == "bundled" or (self.source == "tfds" and is_published(self.name))

    @property
    def terms(self) -> dict[str, str]:
        """Unit and adjacency, for `Ledger.register`."""
        return {"unit": self.unit, "adjacency": self.adjacency}


def open(spec: DataSpec, *, prepare: PrepareImages | None = None) -> Examples:
    """Returns the source that a spec describes.

    Args:
      spec: The spec.
      prepare: As in `from_tfds`. It is used if `spec.prepare` is True.

    Raises:
      ValueError: The source is unknown, or the data does not fit the spec.
      FileNotFoundError: The data is missing. The message says how to get it.
    """
    read = format_of(spec.source, where=spec.where)
    records = read(spec, prepare if spec.prepare else None)
    return records.of_classes(spec.classes) if spec.classes else records


def open_parts(
    specs: Mapping[str, DataSpec], *, prepare: PrepareImages | None = None, images: bool = False
) -> dict[str, Examples]:
    """Returns the sources of some parts of a set, by role.

    Args:
      specs: The specs by role. The check of their records is `check_records_apart`.
      prepare: As in `open`.
      images: Whether each source must have images.

    Raises:
      ValueError: A part has no records, two parts share an owner, or a source has no images. Or as
        `open`.
    """
    sources = {role: open(spec, prepare=prepare) for role, spec in specs.items()}
    for role, source in sources.items():
        if not len(source):
            raise ValueError(f"{specs[role].field} must have at least one record, got none.")
    check_owners_apart(specs, sources)
    if images:
        for role, source in sources.items():
            image_shape(source, argument=specs[role].where)
    return sources


# --- Formats ------------------------------------------------------------------------------------


_bundled = functools.cache(bundled)  # one object serves all parts: sources do not change


def whole_bundled(name: str, *, where: str = "spec") -> Examples:
    """Returns a whole bundled set. An error names the field name of `where`."""
    try:
        return _bundled(name)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error  # "name must be one of ..."


def _open_bundled(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    whole = whole_bundled(spec.name, where=spec.where)
    if spec.rows is None:
        return whole
    first, last = spec.rows
    order = shuffled(len(whole), seed=spec.split_seed)
    return whole.take(order[first:last], name=spec.title)


@functools.lru_cache(maxsize=8)  # decoding CIFAR-10 takes seconds, and several specs may name it
def _split_of_tfds(
    name: str,
    split: str,
    data_dir: str,
    prepare: PrepareImages | None,
    in_memory: bool,
) -> Examples:
    return from_tfds(name, split, data_dir=data_dir or None, prepare=prepare, in_memory=in_memory)


def _open_tfds(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    return _split_of_tfds(spec.name, spec.part, spec.data_dir, prepare, spec.in_memory)


def _open_npz(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    if not spec.part.endswith(".npz"):
        return _open_medmnist(spec)
    path = os.path.join(spec.path, spec.part)
    # A part without owners, such as public images, need not have their column.
    in_file = spec.group and spec.group in (spec.columns or npz_names(path))
    return from_npz(
        path,
        columns=spec.columns,
        texts=[spec.group] if in_file else [],
        num_classes=spec.num_classes,
        name=spec.title,
        limits=spec.limits,
    )


def medmnist_arrays(part: str) -> tuple[str, str]:
    """Returns the names of a part's images and labels in a file as MedMNIST distributes it."""
    return f"{part}_images", f"{part}_labels"


def _open_medmnist(spec: DataSpec) -> Examples:
    keys = medmnist_arrays(spec.part)
    remedy = f"Make it again with {', '.join(keys)} (as MedMNIST distributes it)."
    images, labels = read_npz(spec.path, keys, remedy=remedy, limits=spec.limits).values()
    return from_arrays(
        image=images,
        label=labels.reshape(-1),
        num_classes=spec.num_classes,
        name=spec.title,
    )


def _open_hf(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    source = from_hf(
        spec.path or spec.name,
        spec.part,
        columns=spec.columns,
        texts=[spec.group] if spec.group else [],
        num_classes=spec.num_classes,
        name=spec.title,
    )
    return source.load() if spec.in_memory else source


def _open_folder(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    table = spec.part if spec.share is None else LABELS
    columns = read_table(os.path.join(spec.path, table)).columns
    has_owners = spec.group == SUBFOLDER or spec.group in columns
    source = from_folder(
        spec.path,
        table,
        classes=spec.class_names or None,
        texts=[spec.group] if has_owners else [],
        num_classes=spec.num_classes,
        prepare=prepare,
        pixel_range=spec.pixel_range,
        limits=spec.limits,
        name=spec.title,
    )
    if spec.share is not None:
        source = source.take(_rows_of_share(source, spec))  # before `load`
    return source.load() if spec.in_memory else source


# An argument of `from_csv` in one of its errors, which speak Python.
_ARGUMENT = re.compile(
    r"\b(classes|label|group|texts|drop|ranges|categories|dates|missing|indicators|missing_marks|"
    "decimal|thousands)="
)


def _open_csv(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    path = spec.path
    if spec.share is None:
        path = os.path.join(spec.path, spec.part)
    try:
        table = from_csv(
            path,
            label=spec.label,
            classes=spec.class_names or None,
            num_classes=spec.num_classes,
            group=spec.group,
            name=spec.title,
            **spec.options,
        )
    except ValueError as error:
        if _ARGUMENT.search(str(error)) is None:
            raise
        raise ValueError(
            f"{error} In the config classes= is {spec.where}.class_names, label= and group= are "
            f"fields of {spec.where}, and the others are in {spec.where}.options, which a "
            "columns.json holds."
        ) from error
    except TypeError as error:
        raise ValueError(
            f"{spec.where}.options must be arguments of jaxdp.data.from_csv: {shown(error)}."
        ) from error
    return table if spec.share is None else table.take(_rows_of_share(table, spec))


def _rows_of_share(table: Examples, spec: DataSpec) -> np.ndarray:
    """Returns the rows of a share of a table. Owners who share rows are in one part."""
    owners = np.arange(len(table))
    if spec.group and spec.separator:
        owners = families(table, spec.group, spec.separator)
    elif spec.group:
        owners = owners_of(read_ids(table, spec.group), len(table))
    order = shuffled(owners.max(initial=-1) + 1, seed=spec.split_seed)
    # Shares that meet have the same rounded end, so no owner is between them or in both.
    first, last = (round(len(order) * end) for end in spec.share or (0, 1))
    rows = np.flatnonzero(np.isin(owners, order[first:last]))
    if spec.separator and not len(rows):
        raise ValueError(
            f"{spec.field} has no row: owners who share records, directly or by others, are in one "
            f"part, and these are {len(order)} groups. Give a folder of files as {spec.where}.path."
        )
    return rows


def _open_function(spec: DataSpec, prepare: PrepareImages | None) -> Examples:
    module, _, function = spec.source.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{spec.where}.source={spec.source!r} cannot be imported: {shown(error)}."
        ) from error
    source = make(spec.part, **spec.options)
    if not isinstance(source, Examples):
        raise TypeError(
            f"{spec.where}.source={spec.source!r} must return jaxdp.data.Examples, as from_arrays "
            f"and from_grain do, got {type(source).__name__}."
        )
    named = dataclasses.replace(source, name=spec.title)
    return named.load() if spec.in_memory else named


Format = Callable[[DataSpec, PrepareImages | None], Examples]

FORMATS: Mapping[str, Format] = {
    "bundled": _open_bundled,
    "tfds": _open_tfds,
    "npz": _open_npz,
    "hf": _open_hf,
    "folder": _open_folder,
    "csv": _open_csv,
}


def format_of(source: str, *, where: str = "spec") -> Format:
    """Returns what opens a spec of a source.

    Raises:
      ValueError: The source is unknown. The message names the field source of `where`.
    """
    if source in FORMATS:
        return FORMATS[source]
    if ":" in source:
        return _open_function
    known = ", ".join(map(repr, FORMATS))
    raise ValueError(
        f"{where}.source must be {known} or 'package.module:function', got {source!r}."
    )
