"""Prepared data sets of TensorFlow Datasets, without TensorFlow."""

import contextlib
import dataclasses
import itertools
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp.data.arrays import from_arrays
from jaxdp.data.pictures import PrepareImages, in_unit_range
from jaxdp.data.sources import Examples
from jaxdp.files import Limits, check_image, optional

_CHUNK_ROWS = 4096
_PHOTOGRAPHS = 256  # decoded at once: before `prepare` shrinks them, they are large

# Public encoding of adult's numbers to [0, 1]: the divisor, and whether log(1 + v) of both is taken
# first. fnlwgt is left out, because it is a weight of the census sample and not an attribute of the
# person.
_ADULT_NUMBERS = {
    "age": (100.0, False),
    "capital-gain": (1e5, True),
    "capital-loss": (1e4, True),
    "education-num": (16.0, False),
    "hours-per-week": (100.0, False),
}
_ADULT_CATEGORIES = (
    "education",
    "marital-status",
    "native-country",
    "occupation",
    "race",
    "relationship",
    "sex",
    "workclass",
)

# Data sets that everybody has and TFDS lacks, which configs of this package read in its format.
_PUBLISHED = ("usps", "pneumonia_mnist", "cifar100_subset")


def from_tfds(
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    download: bool = False,
    prepare: PrepareImages | None = None,
    limits: Limits | None = None,
    in_memory: bool = True,
) -> Examples:
    """Reads a prepared split of TensorFlow Datasets, without TensorFlow.

    It handles data sets with an "image" of one fixed shape and a class "label", and the table
    "adult" (UCI census income). The table has 107 features in [0, 1]: five numbers scaled by public
    constants, then the one-hot codes of eight categories in the order of the schema.

    Args:
      name: The TFDS name, with configuration if any, for example "cifar10".
      split: The TFDS split, for example "train" or "test[:1000]".
      data_dir: The TFDS directory. The default is the environment variable TFDS_DATA_DIR, else
          ~/tensorflow_datasets.
      download: Whether TFDS may download and prepare a missing data set. It may need TensorFlow.
          False stays offline.
      prepare: `prepare(images) -> floats in [0, 1] of one shape` for images of differing sizes,
        such as `jaxdp.models.Preprocessing.prepare`. The result is kept as uint8.
      limits: The limit on the pixels of an image, compared with its header before decoding. The
          default is `Limits()`.
      in_memory: Whether all images are decoded now and kept. False decodes images whenever they are
        gathered, so that only those of one batch are in memory. An error about a record is then
        raised when it is read.

    Raises:
      FileNotFoundError: The data set is not prepared there in a random-access format. The message
          says how to do it.
      ValueError: The split is unknown or the features are not handled. Or an image is damaged, of
        another size than declared, or larger than the limit. The message names the record, for the
        owner who reads the data. Or in_memory is False for a table.
    """
    tfds = optional("tensorflow_datasets", "tfds")

    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR") or None
    with _quiet_array_record():
        builder = _prepared_builder(tfds, name, data_dir, download)
        features = dict(builder.info.features.items())
        keys = _check_features(tfds, name, features, any_shape=prepare is not None)
        try:
            # Images are decoded here, after a look at their headers.
            decoders = {"image": tfds.decode.SkipDecoding()} if "image" in keys else None
            records = builder.as_data_source(split=split, decoders=decoders)
        except NotImplementedError as error:  # a format that is read in order only
            raise FileNotFoundError(_not_prepared(tfds, name, data_dir)) from error
        except ValueError as error:
            raise ValueError(_unreadable(name, split, builder.info)) from error
        images = _Images(
            feature=features.get("image"),
            where=f"of {name}/{split} in {builder.data_dir}",
            prepare=prepare,
            limits=limits or Limits(),
        )
        if not len(records):
            raise ValueError("The split is empty. Choose a split with records.")
        if not in_memory:
            num_classes = features["label"].num_classes
            return _on_demand(records, keys, images, num_classes, f"{name}/{split}")
        columns = _read_columns(records, keys, images)
    if (columns["label"] < 0).any():
        raise ValueError(
            f"split {split!r} of data set {name!r} has no labels (they are stored as -1)."
        )
    inputs = {"image": columns["image"]} if "image" in keys else {}
    if not inputs:
        inputs["features"] = _encode_adult(columns, features)
    return from_arrays(
        **inputs,
        label=columns["label"],
        num_classes=features["label"].num_classes,
        name=f"{name}/{split}",
    )


def is_published(name: str) -> bool:
    """Returns whether a data set of this name comes with TensorFlow Datasets, or is unknown here
    because the library is missing.

    Args:
      name: The TFDS name, with configuration and version if any, such as "cifar10_corrupted/fog_5".
    """
    try:
        tfds = optional("tensorflow_datasets", "tfds")
    except ImportError:  # then no run can read it either
        return True
    if name in _PUBLISHED:
        return True
    return _base(name) in tfds.list_builders(with_community_datasets=False)


def _base(name: str) -> str:
    """Returns the name of a data set without configuration and version: "a" of "a/b:1.0.0"."""
    return name.partition("/")[0].partition(":")[0]


@dataclasses.dataclass(frozen=True)
class _Images:
    """The decoding of the images of a split. `from_tfds` documents the arguments.

    Attributes:
      feature: The `tfds.features.Image`.
      where: The place of the images, for messages.
    """

    feature: Any
    where: str
    prepare: PrepareImages | None
    limits: Limits

    def decode(self, encoded: Sequence[bytes], rows: Sequence[int]) -> np.ndarray:
        """Returns the pixels of the images of the records `rows`."""
        decoded = []
        for record, data in zip(rows, encoded, strict=True):
            what = f"image {record} {self.where}"
            check_image(data, shape=self.feature.shape, what=what, limits=self.limits)
            decoded.append(self.feature.decode_example_np(data))
        if self.prepare is None:
            return np.stack(decoded)
        prepared = in_unit_range(np.asarray(self.prepare(decoded)))
        return np.rint(255 * prepared).astype(np.uint8)


def _read_columns(records: Any, keys: Sequence[str], images: _Images) -> dict[str, np.ndarray]:
    """Reads columns of a split into memory, some records at a time."""
    columns: dict[str, np.ndarray] = {}
    at_once = _CHUNK_ROWS if images.prepare is None else _PHOTOGRAPHS
    for start in range(0, len(records), at_once):
        stop = min(len(records), start + at_once)
        rows = list(range(start, stop))
        chunk = records.__getitems__(rows)
        for key in keys:
            cells = [record[key] for record in chunk]
            values = images.decode(cells, rows) if key == "image" else np.stack(cells)
            if start == 0:
                shape = (len(records), *values.shape[1:])
                columns[key] = np.empty(shape, values.dtype)
            columns[key][start:stop] = values
    return columns


def _on_demand(
    records: Any, keys: Sequence[str], images: _Images, num_classes: int, name: str
) -> Examples:
    """Returns the images and labels of a split as columns that are read when they are gathered."""
    if "image" not in keys:
        raise ValueError(f"in_memory must be True for {name!r}, which has no images.")
    pixels = images.decode([records[0]["image"]], [0])
    image = _StoredColumn(records, "image", pixels.shape[1:], pixels.dtype, images)
    label = _StoredColumn(records, "label", (), np.dtype(np.int32), images)
    return Examples({"image": image, "label": label}, num_classes=num_classes, name=name)


@dataclasses.dataclass(frozen=True, eq=False)
class _StoredColumn:
    """A column of a split that stays on disk: `column[rows]` reads and decodes these rows.

    Attributes:
      records: The split, as TFDS reads it.
      key: "image" or "label".
      cell_shape, dtype: Of one cell.
      images: The decoding of images.
    """

    records: Any
    key: str
    cell_shape: tuple[int, ...]
    dtype: np.dtype
    images: _Images

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.cell_shape)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rows: Any) -> np.ndarray:
        numbers = np.arange(len(self))[rows]
        cells = np.empty((len(numbers), *self.cell_shape), self.dtype)
        # Encoded images come along with labels, so those of 50,000 labels would be gigabytes.
        for start in range(0, len(numbers), _PHOTOGRAPHS):
            chunk = numbers[start : start + _PHOTOGRAPHS].tolist()
            cells[start : start + len(chunk)] = self._read(chunk)
        return cells

    def _read(self, rows: list[int]) -> np.ndarray:
        with _quiet_array_record():
            values = [record[self.key] for record in self.records.__getitems__(rows)]
        if self.key == "image":
            return self.images.decode(values, rows)
        labels = np.stack(values)
        if (labels < 0).any():
            raise ValueError(f"an image {self.images.where} has no label (it is stored as -1).")
        return labels


def check_disjoint(parts: Mapping[str, tuple[str, str, str | None]]) -> None:
    """Refuses parts of TensorFlow Datasets that share a record, which no ledger can detect.

    Records are compared by data set, configuration, split and position, as TFDS resolves them, for
    all versions and directories. Copies under another name are not found.

    Args:
      parts: (name, split, data_dir) by the part's name in messages, as in `from_tfds`.

    Raises:
      ValueError: Two parts share a record, a part has a record twice, or a split is unknown.
      FileNotFoundError: As in `from_tfds`.
    """
    tfds = optional("tensorflow_datasets", "tfds")

    slices = []
    for part, (name, split, data_dir) in parts.items():
        with _quiet_array_record():
            info = _prepared_builder(tfds, name, data_dir).info
        try:
            absolute = tfds.core.ReadInstruction.from_spec(split).to_absolute(info.splits)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(_unreadable(name, split, info)) from error
        for piece in absolute:
            count = info.splits[piece.splitname].num_examples
            rows = range(count)[piece.from_ : piece.to]
            stored = (info.name, info.config_name, piece.splitname)
            slices.append(_Slice(f"{part}={name}/{split}", stored, rows))
    for one, other in itertools.combinations(slices, 2):
        start = max(one.rows.start, other.rows.start)
        stop = min(one.rows.stop, other.rows.stop)
        if one.stored != other.stored or start >= stop:
            continue
        who = f"{one.part} repeats"
        if one.part != other.part:
            who = f"{one.part} and {other.part} share"
        records = "1 record" if stop - start == 1 else f"{stop - start} records"
        raise ValueError(
            f"{who} {records}, [{start}:{stop}] of {one.stored[-1]!r}. No account counts both uses "
            "of a record. Choose splits that do not overlap."
        )


class _Slice(NamedTuple):
    """A range of records of a stored split.

    Attributes:
      part: The part that has them, for messages.
      stored: (data set, configuration, split), as TFDS stores them.
      rows: The positions in the split.
    """

    part: str
    stored: tuple[Any, ...]
    rows: range


def _unreadable(name: str, split: str, info: Any) -> str:
    """Returns the error about a split that TFDS cannot read."""
    return f"split {split!r} of data set {name!r} cannot be read. There are {sorted(info.splits)}."


def _prepared_builder(
    tfds: Any,
    name: str,
    data_dir: str | None,
    download: bool = False,
) -> Any:
    """Returns the builder of a data set that is prepared, or raises FileNotFoundError."""
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR") or None
    reason: Exception | None = None
    try:
        if download:  # TFDS reads array_record without TensorFlow.
            tfds.data_source(
                name, data_dir=data_dir, builder_kwargs={"file_format": "array_record"}
            )
        builder = tfds.builder(name, data_dir=data_dir)
        if builder.is_prepared():
            return builder
    except (tfds.core.registered.DatasetNotFoundError, ImportError) as error:
        # TFDS needs TensorFlow and importlib_resources to write images, but depends on neither.
        reason = error
    raise FileNotFoundError(_not_prepared(tfds, name, data_dir)) from reason


def _not_prepared(tfds: Any, name: str, data_dir: str | None) -> str:
    """Returns the error about a data set that is not prepared, with the remedy."""
    place = data_dir or tfds.core.constants.DATA_DIR
    build = shlex.join(["tfds", "build", name, "--file_format=array_record", f"--data_dir={place}"])
    text = (
        f"data set {name!r} is not prepared in a random-access format (ArrayRecord) in "
        f"{str(place)!r}. Prepare it on a machine with network access. Use a separate "
        "environment, because TFDS may need TensorFlow to write:\n"
        "    pip install tensorflow-datasets tensorflow array-record importlib_resources\n"
        f"    {build}\n"
        "Or pass data_dir= or set the environment variable TFDS_DATA_DIR to a directory with a "
        "prepared copy."
    )
    if _base(name) in tfds.list_builders(with_community_datasets=False):
        return text
    return (  # without TensorFlow the list lacks some data sets of the catalogue, such as glue
        f"{text}\nThe TFDS that is installed does not list {name!r}. If the catalogue of TFDS "
        "does not have it either, "
        "TFDS cannot build it. Then correct the name, or read files of your own with "
        "jaxdp.data.from_npz, from_hf or "
        "from_folder. In a launcher these are config.data.source='npz', 'hf' and 'folder'."
    )


def _check_features(
    tfds: Any,
    name: str,
    features: Mapping[str, Any],
    *,
    any_shape: bool,
) -> list[str]:
    """Returns the columns to read, or raises ValueError."""
    if isinstance(features.get("label"), tfds.features.ClassLabel):
        image = features.get("image")
        if isinstance(image, tfds.features.Image):
            if image.np_dtype != np.uint8 or (None in image.shape and not any_shape):
                raise ValueError(
                    f"data set {name!r} has images of shape {image.shape} and dtype "
                    f"{np.dtype(image.np_dtype)}. Only uint8 images of one shape are handled. Pass "
                    "prepare= to give images one shape."
                )
            return ["image", "label"]
        adult = [*_ADULT_NUMBERS, *_ADULT_CATEGORIES]
        if _base(name) == "adult" and set(adult) <= set(features):
            return [*adult, "label"]
    raise ValueError(
        f"data set {name!r} has the features {sorted(features)}, which are not handled. Only an "
        "image with a class label and the table 'adult' are handled. Encode other records and use "
        "from_arrays."
    )


def _encode_adult(columns: Mapping[str, np.ndarray], features: Mapping[str, Any]) -> np.ndarray:
    """Returns the features of the table "adult", float64 [n, 107] in [0, 1]."""
    encoded = []
    for key, (divisor, logarithmic) in _ADULT_NUMBERS.items():
        values = columns[key].astype(np.float64)
        if logarithmic:
            scaled = np.log1p(values) / np.log1p(divisor)
        else:
            scaled = values / divisor
        encoded.append(np.clip(scaled, 0, 1)[:, None])
    for key in _ADULT_CATEGORIES:
        encoded.append(np.eye(features[key].num_classes)[columns[key]])  # one-hot codes
    return np.concatenate(encoded, axis=1)


@contextlib.contextmanager
def _quiet_array_record() -> Iterator[None]:
    """Drops harmless log lines of TFDS and ArrayRecord."""
    harmless = (
        "was created with group size",
        "OpenCV is not installed",
        "has no dataset_info.json",
    )
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return not any(phrase in record.getMessage() for phrase in harmless)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
