"""Which data a study reads. All configs say it in one vocabulary.

A *set of images* is described by

    source      "bundled" with scikit-learn, or "tfds"
    name        which set
    data_dir    tfds: where it is; "" is TFDS's usual directory
    split_seed  bundled: which record is in which part
    parts       who holds what, by role, one of `ROLES`:
                bundled  a share of the set (below 1), or a number of records
                tfds     a split of `name`, or of another set as "cifar100/train[:8000]"; "" for none
    prepare     tfds: whether images differ in size and are resized and cut as the model's preprocessing says
    crop_padding, flip   of the augmentation, see `augmentation`

and a set under domain shift besides by

    severity        1 to 5
    corruptions     names of shifts; "clean" is none
    corrupted_name  tfds: a set of images that are corrupted already; "" corrupts the test images here
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp import data
from jaxdp.data import Source

Prepare = Callable[[Any], Any]
CLEAN = "clean"  # the shift that is none
# The order in which a bundled set is cut, so that studies with the same parts share the cut.
ROLES = ("public", "private", "sources", "stream", "client", "test")


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
    wanted = {role: config.parts[role] for role in ROLES if config.parts.get(role)}
    if config.source == "bundled":
        whole = data.bundled(config.name)
        shares = [_share(role, part, len(whole)) for role, part in wanted.items()]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"config.data.parts must add up to at most {len(whole)} records of {config.name!r}, or to 1 in shares; "
                f"got {dict(wanted)}."
            )
        cut = dict(zip(wanted, whole.split(shares, seed=config.split_seed), strict=True))
        return {k: dataclasses.replace(cut[k], name=f"{config.name}/{k}") for k in roles if k in cut}
    if config.source != "tfds":
        raise ValueError(f"config.data.source must be 'bundled' or 'tfds', got {config.source!r}.")
    for role, part in wanted.items():
        if not isinstance(part, str):
            raise ValueError(f"config.data.parts.{role} must be a TFDS split such as 'train[:500]', got {part!r}.")
    data_dir = config.data_dir or None
    where = {role: _split(config.name, part) for role, part in wanted.items()}
    data.check_disjoint({f"config.data.parts.{role}": (*split, data_dir) for role, split in where.items()})
    how = prepare if config.get("prepare", False) else None
    return {role: _read(*where[role], data_dir, how) for role in roles if role in where}


def _share(role: str, part: Any, records: int) -> float:
    if isinstance(part, bool) or not isinstance(part, int | float) or part <= 0 or (part > 1 and part % 1):
        raise ValueError(
            f"config.data.parts.{role} must be a share in (0, 1) or a number of records of a bundled set, got {part!r}."
        )
    return part if part < 1 else part / records


def _split(name: str, part: str) -> tuple[str, str]:
    """(set, split): "train[:500]", or "cifar10/train[:500]" of another set."""
    before, slash, split = part.rpartition("/")
    return (before, split) if slash else (name, part)


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
