"""Which data a study reads. All configs say it in one vocabulary.

A *set of images* is described by

    source      "bundled" with scikit-learn, "tfds", or "npz", a file as MedMNIST distributes it
    name        which set
    data_dir    tfds: where it is; "" is TFDS's usual directory
    path        npz: of the file, with the arrays {part}_images and {part}_labels; num_classes, limits go with it
    split_seed  bundled: which record is in which part
    parts       who holds what, by role, one of `ROLES`:
                bundled  a share of the set (below 1), or a number of records
                tfds     a split of `name`, or of another set as "cifar100/train[:8000]"; "" for none
                npz      a part of the file, or a split of a set of TFDS as above
    prepare     tfds: whether images differ in size and are resized and cut as the model's preprocessing says
    crop_padding, flip   of the augmentation, see `augmentation`

and a set under domain shift besides by

    severity        1 to 5
    corruptions     names of shifts; "clean" is none
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
from jaxdp.files import Limits, read_npz

Prepare = Callable[[Any], Any]
CLEAN = "clean"  # the shift that is none
# The order in which a bundled set is cut, so that studies with the same parts share the cut.
ROLES = ("upstream", "public", "private", "sources", "stream", "client", "test")


def parts(config: Any, *roles: str, prepare: Prepare | None = None) -> dict[str, Source]:
    """Returns the sources of some roles, named such as "digits/private".

    Which record is where does not depend on the records.

    Args:
      config: the `data` part of a study's config, see above.
      roles: those wanted; a role without a part is left out.
      prepare: as in `jaxdp.data.from_tfds`; used if config.prepare asks for it.

    Raises:
      FileNotFoundError: the data is not there; the message says how to get it.
      ValueError: parts that do not fit the data or share a record, or an unknown source.
    """
    if config.source == "bundled":
        wanted = _wanted(config)
        whole = data.bundled(config.name)
        shares = [_share(role, part, len(whole)) for role, part in wanted.items()]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"config.data.parts must add up to at most {len(whole)} records of {config.name!r}, or to 1 in shares; "
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
    """Returns (set, split) of each role whose part is one of TFDS.

    Raises:
      ValueError: two parts share a record, or a part is no text.
      FileNotFoundError: as `parts`.
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
      config: the `data` part of a study's config; a field `limits` may have fields of `jaxdp.files.Limits`.
      field: of the config, with the path.
      keys: of the arrays.
      what: is in the file, for the message of an error.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged or lacks an array.
    """
    path, content = config[field], f"{', '.join(keys)} ({what})"
    if not path or not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no file at {path!r}; it should be an .npz file with the arrays {content}. Give its path with "
            f"--config.data.{field}=..., or run the config of the digits, which needs no file."
        )
    limits = Limits(**config.get("limits", {}))
    return read_npz(path, keys, remedy=f"It should hold {content}; make it again.", limits=limits)


def texts(name: str, split: str, field: str, *, data_dir: str | None = None) -> tuple[list[str], np.ndarray]:
    """Returns the texts of a field, and the labels int32 [n], of a split of TFDS.

    Raises:
      ValueError: the split has no labels.
      FileNotFoundError: as `parts`.
    """
    import tensorflow_datasets as tfds

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
      spec: with source, name, data_dir, `split` (tfds), and `classes`, labels that are kept and renumbered in this
        order; () keeps all.
      prepare: as in `parts`.
    """
    if spec.source == "bundled":
        source = data.bundled(spec.name)
    else:
        source = _read(spec.name, spec.split, spec.data_dir or None, prepare if spec.prepare else None)
    return source.of_classes(spec.classes) if spec.classes else source


def check_apart(sets: Any, first: str, *others: str) -> None:
    """Raises ValueError where another set, each as in `read`, shares a record with the first.

    Args:
      sets: the `data` part of a config, by name. Those of TFDS are compared; a set without a name is none.
      first, others: names.
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

    Corruptions that are made here are made whenever an image is read; `in_memory` keeps them.

    Args:
      test: the images without a shift. Images that are corrupted already need none.
      config: the `data` part of a study's config, see above.
      shift: its name.

    Raises:
      ValueError: for an unknown shift, or without test images that are needed.
      FileNotFoundError: as in `parts`.
    """
    if config.get("corrupted_name", "") and shift != CLEAN:
        return data.corrupted_tfds(config.corrupted_name, shift, config.severity, data_dir=config.data_dir or None)
    if test is None:
        raise ValueError(f"config.data.parts.test must name the images that are put under {shift!r}, got none.")
    return test if shift == CLEAN else data.corrupt(test, shift, severity=config.severity)


def in_memory(source: Source, name: str = "") -> Source:
    """Returns a source with all images in memory as whole numbers, as after a corruption that is made once."""
    columns = source.gather(np.arange(len(source)))
    image = np.rint(255 * columns["image"]).astype(np.uint8)
    return data.from_arrays(
        image=image, label=columns["label"], num_classes=source.num_classes, name=name or source.name
    )


def everything(source: Source) -> dict[str, np.ndarray]:
    """Returns all columns of a source."""
    return source.gather(np.arange(len(source)))


def labels(source: Source) -> np.ndarray:
    """Returns all labels of a source, which needs no image."""
    stored = source.arrays["label"]
    return stored if source.rows is None else stored[source.rows]


def choose(count: int, chosen: int, *, seed: int) -> np.ndarray:
    """Returns a public choice of `chosen` of `count` rows in a random order, int64 [chosen]."""
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")[:chosen]


def at_most(source: Source, count: int, *, seed: int) -> Source:
    """Returns a public choice of `count` records in a random order; of all of them for 0."""
    return source.take(choose(len(source), count or len(source), seed=seed))


def smallest_class(source: Source) -> int:
    """Returns how many records the rarest class has."""
    return int(np.bincount(labels(source), minlength=source.num_classes).min())


def few_shots(source: Source, shots: int, *, seed: int) -> dict[str, np.ndarray]:
    """Returns `shots` records of every class, class by class, drawn without replacement.

    Raises:
      ValueError: a class has fewer.
    """
    if (most := smallest_class(source)) < shots:
        raise ValueError(f"shots={shots}, but a class has only {most} images; take fewer shots")
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
