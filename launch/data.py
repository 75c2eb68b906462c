"""Which data a study reads. All configs describe it with the same fields.

A *set of images* has the fields

    source      "bundled" with scikit-learn, "tfds", or "npz", a file as MedMNIST distributes it
    name        the name of the set
    data_dir    tfds: the folder of the data; "" is the default folder of TFDS
    path        npz: the path of the file, with the arrays {part}_images and {part}_labels; also num_classes, limits
    split_seed  bundled: the seed of the division into parts
    parts       the part of each role, one of `ROLES`:
                bundled  a share of the set (below 1), or a number of records
                tfds     a split of `name`, or of another set as "cifar100/train[:8000]"; "" for none
                npz      a part of the file, or a split of a set of TFDS as above
    prepare     tfds: whether images differ in size and are resized and cut as the model's preprocessing says
    crop_padding, flip   of the augmentation, see `augmentation`

A set under domain shift also has the fields

    severity        1 to 5
    corruptions     names of shifts; "clean" means no shift
    corrupted_name  tfds: a set of images that are corrupted already; "" corrupts the test images here
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp import data
from jaxdp.data import Source, sources
from jaxdp.files import Limits, optional, read_npz

Prepare = Callable[[Any], Any]
CLEAN = "clean"  # no shift
# A bundled set is divided in this order, so studies with the same parts have the same division.
ROLES = ("upstream", "public", "private", "sources", "stream", "client", "test")


def parts(config: Any, *roles: str, prepare: Prepare | None = None) -> dict[str, Source]:
    """Returns the sources of some roles, with names such as "digits/private".

    The division into parts does not depend on the records.

    Args:
      config: The `data` part of a study's config, see above.
      roles: The wanted roles. A role without a part is left out.
      prepare: As in `jaxdp.data.from_tfds`. It is used if config.prepare is True.

    Raises:
      FileNotFoundError: The data is missing. The message says how to get it.
      ValueError: The parts do not fit the data or share a record, or the source is unknown.
    """
    if config.source == "bundled":
        wanted = _wanted(config)
        whole = data.bundled(config.name)
        shares = [_share(role, part, len(whole)) for role, part in wanted.items()]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"config.data.parts must add up to at most {len(whole)} records of {config.name!r}, or to 1 in shares, "
                f"got {dict(wanted)}."
            )
        cut = dict(zip(wanted, whole.split(shares, seed=config.split_seed), strict=True))
        return {k: dataclasses.replace(cut[k], name=f"{config.name}/{k}") for k in roles if k in cut}
    if config.source not in ("tfds", "npz"):
        raise ValueError(f"config.data.source must be 'bundled', 'tfds' or 'npz', got {config.source!r}.")
    where, wanted = splits(config), _wanted(config)
    how = prepare if config.get("prepare", False) else None
    return {
        role: _read(*where[role], config.data_dir or None, how) if role in where else _of_file(config, wanted[role])
        for role in roles
        if role in wanted
    }


def _wanted(config: Any) -> dict[str, Any]:
    return {role: config.parts[role] for role in ROLES if config.parts.get(role)}


def _share(role: str, part: Any, records: int) -> float:
    if isinstance(part, bool) or not isinstance(part, int | float) or part <= 0 or (part > 1 and part % 1):
        raise ValueError(
            f"config.data.parts.{role} must be a share in (0, 1) or a number of records of a bundled set, got {part!r}."
        )
    return part if part < 1 else part / records


def splits(config: Any) -> dict[str, tuple[str, str]]:
    """Returns (set, split) of each role whose part is a split of TFDS.

    Raises:
      ValueError: Two parts share a record, or a part is not a string.
      FileNotFoundError: As in `parts`.
    """
    found, wanted = {}, _wanted(config)
    for role, part in wanted.items():
        if not isinstance(part, str):
            raise ValueError(f"config.data.parts.{role} must be a split such as 'train[:500]', got {part!r}.")
        name, _, split = part.rpartition("/")
        if name or config.get("source") != "npz":
            found[role] = (name or config.name, split)
    if found:
        data.check_disjoint({f"config.data.parts.{role}": (*at, config.data_dir or None) for role, at in found.items()})
    return found


def _of_file(config: Any, part: str) -> Source:
    if [*config.parts.values()].count(part) > 1:
        raise ValueError(f"config.data.parts has {part!r} for several roles, which would share all records.")
    keys = f"{part}_images", f"{part}_labels"
    image, label = arrays(config, "path", keys, "as MedMNIST distributes it").values()
    name = f"{config.name}/{part}"
    return data.from_arrays(image=image, label=label.reshape(-1), num_classes=config.num_classes, name=name)


def arrays(config: Any, field: str, keys: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz file, in the order of `keys`.

    Args:
      config: The `data` part of a study's config. A field `limits` may have fields of `jaxdp.files.Limits`.
      field: The field of the config with the path.
      keys: The names of the arrays.
      what: A description of the file for error messages.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is damaged or lacks an array.
    """
    path, content = config[field], f"{', '.join(keys)} ({what})"
    if not path or not os.path.exists(path):
        raise FileNotFoundError(
            f"File {path!r} does not exist. An .npz file with the arrays {content} is needed. Give its path with "
            f"--config.data.{field}=..., or run the config of the digits, which needs no file."
        )
    limits = Limits(**config.get("limits", {}))
    return read_npz(path, keys, remedy=f"Make it again with {content}.", limits=limits)


def texts(name: str, split: str, field: str, *, data_dir: str | None = None) -> tuple[list[str], np.ndarray]:
    """Returns the texts of a field, and the labels int32 [n], of a split of TFDS.

    Raises:
      ValueError: The split has no labels.
      FileNotFoundError: As in `parts`.
    """
    tfds = optional("tensorflow_datasets", "tfds")

    with sources._quiet_array_record():
        builder = sources._prepared_builder(tfds, name, data_dir or os.environ.get("TFDS_DATA_DIR") or None)
        records = builder.as_data_source(split=split)
        rows = records.__getitems__(list(range(len(records))))
    label = np.array([row["label"] for row in rows], np.int32)
    if (label < 0).any():
        raise ValueError(f"split {split!r} of data set {name!r} has no labels (they are stored as -1).")
    return [row[field].decode("utf-8", "replace") for row in rows], label


@functools.lru_cache(maxsize=8)
def _read(name: str, split: str, data_dir: str | None, prepare: Prepare | None) -> Source:
    return data.from_tfds(name, split, data_dir=data_dir, prepare=prepare)


def read(spec: Any, prepare: Prepare | None = None) -> Source:
    """Returns one whole set, or some classes of it.

    Args:
      spec: Has source, name, data_dir, `split` (tfds), and `classes`, the labels to keep. They are renumbered in this
        order. () keeps all.
      prepare: As in `parts`.
    """
    if spec.source == "bundled":
        source = data.bundled(spec.name)
    else:
        source = _read(spec.name, spec.split, spec.data_dir or None, prepare if spec.prepare else None)
    return source.of_classes(spec.classes) if spec.classes else source


def check_apart(sets: Any, first: str, *others: str) -> None:
    """Raises ValueError if another set, each as in `read`, shares a record with the first.

    Args:
      sets: The `data` part of a config, by name. Only sets of TFDS are compared. A set without a name is skipped.
      first, others: Names of sets.
    """
    mine = sets[first]
    for name in others:
        other = sets[name]
        known = other.name and mine.source == other.source == "tfds"
        if known and not (mine.classes and other.classes and set(mine.classes).isdisjoint(other.classes)):
            parts = {first: mine, name: other}
            data.check_disjoint(
                {f"config.data.{part}": (spec.name, spec.split, spec.data_dir or None) for part, spec in parts.items()}
            )


def under(test: Source | None, config: Any, shift: str) -> Source:
    """Returns test images under a shift, `CLEAN` or a corruption, always in the same order.

    Corruptions that are computed here are computed whenever an image is read. `in_memory` keeps them.

    Args:
      test: The images without a shift. Published corrupted sets need none.
      config: The `data` part of a study's config, see above.
      shift: The name of the shift.

    Raises:
      ValueError: The shift is unknown, or the test images are missing.
      FileNotFoundError: As in `parts`.
    """
    if config.get("corrupted_name", "") and shift != CLEAN:
        return data.corrupted_tfds(config.corrupted_name, shift, config.severity, data_dir=config.data_dir or None)
    if test is None:
        raise ValueError(f"config.data.parts.test must name the images for the shift {shift!r}, got none.")
    return test if shift == CLEAN else data.corrupt(test, shift, severity=config.severity)


def in_memory(source: Source, name: str = "") -> Source:
    """Returns a source with all images in memory as uint8. A corruption is thus computed once."""
    columns = source.gather(np.arange(len(source)))
    image = np.rint(255 * columns["image"]).astype(np.uint8)
    return data.from_arrays(
        image=image, label=columns["label"], num_classes=source.num_classes, name=name or source.name
    )


def everything(source: Source) -> dict[str, np.ndarray]:
    """Returns all columns of a source."""
    return source.gather(np.arange(len(source)))


def labels(source: Source) -> np.ndarray:
    """Returns all labels of a source without reading an image."""
    stored = source.arrays["label"]
    return stored if source.rows is None else stored[source.rows]


def choose(count: int, chosen: int, *, seed: int) -> np.ndarray:
    """Returns a public choice of `chosen` of `count` rows in a random order, int64 [chosen]."""
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")[:chosen]


def at_most(source: Source, count: int, *, seed: int) -> Source:
    """Returns a public choice of `count` records in a random order. 0 takes all records."""
    return source.take(choose(len(source), count or len(source), seed=seed))


def smallest_class(source: Source) -> int:
    """Returns the number of records of the rarest class."""
    return int(np.bincount(labels(source), minlength=source.num_classes).min())


def few_shots(source: Source, shots: int, *, seed: int) -> dict[str, np.ndarray]:
    """Returns `shots` records of every class, class by class, drawn without replacement.

    Raises:
      ValueError: A class has fewer records.
    """
    if (most := smallest_class(source)) < shots:
        raise ValueError(f"shots must be at most {most}, the size of the smallest class, got {shots}.")
    rng, known = np.random.Generator(np.random.Philox(key=seed)), labels(source)
    rows = [rng.choice(np.flatnonzero(known == k), shots, replace=False) for k in range(source.num_classes)]
    return source.gather(np.concatenate(rows))


def turned(source: Source, quarters: int) -> Source:
    """Returns a source with its images rotated by quarter turns."""
    if quarters % 4 == 0:
        return source
    columns = everything(source)
    image = np.rot90(columns["image"], quarters, axes=(1, 2))
    return data.from_arrays(image=image, label=columns["label"], num_classes=source.num_classes, name=source.name)


def cut(source: Source, pieces: int) -> Sequence[Source]:
    """Returns a source in pieces of nearly equal size, in its order."""
    return [source.take(rows) for rows in np.array_split(np.arange(len(source)), pieces)]


def require_images(sources: Mapping[str, Source]) -> None:
    """Raises ValueError for a source without images."""
    for source in sources.values():
        if "image" not in source.arrays:
            raise ValueError(f"config.data.name must name a data set of images, got {source.name!r} without any.")
