"""Which data a study reads. All configs describe it with the same fields.

A *set of images* has the fields

    source      "bundled"  a set of scikit-learn
                "tfds"     TensorFlow Datasets
                "npz"      .npz files
                "hf"       a data set of the library `datasets` (Hugging Face)
                "folder"   a folder of images with CSV files, see `jaxdp.data.from_folder`
                "package.module:function", which returns the examples of a part: function(part, **options)
    name        the name of the set, also for messages and the ledger
    path        npz: the path of a file as MedMNIST distributes it, with the arrays {part}_images and {part}_labels, or
                a folder of .npz files; hf: a folder of `save_to_disk`, or "" to load `name`; folder: the folder
    data_dir    tfds: the folder of the data; "" is the default folder of TFDS
    split_seed  bundled: the seed of the division into parts
    parts       the part of each role, one of `ROLES`. Several parts in a tuple are several sources or streams.
                bundled  a share of the set (below 1), or a number of records
                tfds     a split of `name`, or of another set as "cifar100/train[:8000]"; "" for none
                npz      a part of the file, a file of the folder such as "train.npz", or a split of TFDS as above
                hf       a whole split
                folder   a CSV file in the folder
    columns     npz, hf: {column: name in the file}; without it all by their own names
    num_classes npz, hf, folder: the number of classes
    class_names folder: the names of the classes in the CSV files, if they are not numbers
    in_memory   hf, folder, function: whether to keep all examples in memory (True), or to read them on demand
    options     function: its keyword arguments
    limits      the fields of `jaxdp.files.Limits`
    prepare     tfds, folder: whether images differ in size and are resized and cut as the model's preprocessing says
    group       the column with the owner of each record, such as a patient. Each owner is then one unit of privacy with
                its records. Its values are texts or whole numbers, see `jaxdp.data.ids`: "007" and "7" are two owners.
                Studies of single records refuse it.
    pixel_range folder: (low, high), the pixel values that become 0 and 1, see `jaxdp.data.from_folder`; without it the
                range of the pixel type
    max_records with group: the largest number of records of one owner that count, see `jaxdp.data.by_group`
    unit        the unit of privacy in the ledger, see `terms`
    adjacency   the neighbouring relation in the ledger, see `terms`
    crop_padding, flip   of the augmentation, see `augmentation`

A set under domain shift also has the fields

    severity        1 to 5
    corruptions     names of shifts; "clean" means no shift
    corrupted_name  tfds: a set of images that are corrupted already; "" corrupts the test images here
    strengths       {shift: strength}: shifts of `launch.shifts`, computed here
    others          {shift: a whole set of images, see `read`}: shifts that are other sets with the same classes
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp import data
from jaxdp.data import Examples
from jaxdp.data import tfds as prepared
from jaxdp.data.ids import owners_of
from jaxdp.data.tables import read_table
from jaxdp.files import Limits, npz_names, optional, read_npz, shown
from jaxdp.report import progress_bar

from . import settings, shifts

Prepare = Callable[[Any], Any]
CLEAN = "clean"  # no shift
SOURCES = ("bundled", "tfds", "npz", "hf", "folder")
# A bundled set is divided in this order, so studies with the same parts have the same division.
ROLES = ("upstream", "public", "private", "sources", "stream", "client", "test", "tuning")


def parts(
    config: Any, *roles: str, prepare: Prepare | None = None, grouped: bool = False
) -> dict[str, Examples]:
    """Returns the sources of some roles, with names such as "digits/private".

    The division into parts does not depend on the records.

    Args:
      config: The `data` part of a study's config, see above.
      roles: The wanted roles. A role without a part is left out.
      prepare: As in `jaxdp.data.from_tfds`. It is used if config.prepare is True.
      grouped: Whether the study can protect the owners of several records, with `units` and
          `one_each`.

    Raises:
      FileNotFoundError: The data is missing. The message says how to get it.
      ValueError: The parts do not fit the data or share a record or an owner, or the source is
        unknown. Or config.data.group is set for a study that protects records.
    """
    if config.source not in SOURCES and ":" not in config.source:
        known = ", ".join(map(repr, SOURCES))
        raise ValueError(
            f"config.data.source must be {known} or 'package.module:function', got "
            f"{config.source!r}."
        )
    check_group(config, grouped=grouped)
    wanted = _wanted(config)
    chosen = [name for role in roles for name in wanted if _role(name) == role]
    if config.source == "bundled":
        whole = _bundled(config)
        shares = [_share(role, part, len(whole)) for role, part in wanted.items()]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"config.data.parts must add up to at most {len(whole)} records of "
                f"{config.name!r}, or to 1 in shares, got {dict(wanted)}."
            )
        cut = dict(zip(wanted, whole.split(shares, seed=config.split_seed), strict=True))
        return {k: dataclasses.replace(cut[k], name=f"{config.name}/{k}") for k in chosen}
    how = prepare if config.get("prepare", False) else None
    where = splits(config) if config.source in ("tfds", "npz") else {}
    _check_apart(config, {name: part for name, part in wanted.items() if name not in where})
    found = {
        name: _read(*where[name], config.data_dir or None, how)
        if name in where
        else _opened(config, wanted[name], how)
        for name in chosen
    }
    _check_owners(config, found)
    return found


def _bundled(config: Any) -> Examples:
    with settings.named("data", config):
        return data.bundled(config.name)


def _wanted(config: Any) -> dict[str, Any]:
    """Returns the parts by role. Several parts of a role have the names "role 0", "role 1", ..."""
    given = {role: config.parts[role] for role in ROLES if config.parts.get(role)}
    several = {role: part for role, part in given.items() if isinstance(part, list | tuple)}
    return {
        name: each
        for role, part in given.items()
        for name, each in (
            [(f"{role} {k}", x) for k, x in enumerate(part)] if role in several else [(role, part)]
        )
    }


def _role(name: str) -> str:
    return name.partition(" ")[0]


def terms(config: Any, *, unit: str = "example", adjacency: str = "add_remove") -> dict[str, Any]:
    """Returns unit and adjacency of the private data for `frame.account`.

    Args:
      config: The `data` part of a study's config. Its fields `unit` and `adjacency` are used if
          they are there.
      unit, adjacency: The defaults. A unit is a word for people: without config.data.group the
        guarantee is for one record of a part, so declare "patient" only if no patient has two
        records.
    """
    return {"unit": config.get("unit", unit), "adjacency": config.get("adjacency", adjacency)}


def units(config: Any, images: Examples, records: Any = None) -> Any:
    """Returns private records by unit of privacy: their owners if config.data.group is set,
    otherwise the records.

    Args:
      config: The `data` part of a study's config.
      images: The records as `parts` returns them.
      records: What is computed from each, in their order. None takes the images.
    """
    records = images if records is None else records
    if not config.get("group", ""):
        return records
    owners = config.group if records is images else data.read_ids(images, config.group)
    return data.by_group(records, owners, max_records=config.max_records)


def held(units: Any) -> tuple[Examples, np.ndarray]:
    """Returns the records of `units` that count, in their order, and the number of the owner of
    each.
    """
    if not isinstance(units, data.Groups):
        return units, np.arange(len(units))
    records: Any = units.source
    owners, columns = np.nonzero(units.rows >= 0)
    rows = units.rows[owners, columns]
    order = np.argsort(rows)
    return records.take(rows[order]), owners[order]


def one_each(config: Any, records: Examples) -> Examples:
    """Returns the first record of each owner if config.data.group is set, for a guarantee that is
    for one record.
    """
    if not config.get("group", ""):
        return records
    return records.take(data.by_group(records, config.group, max_records=1).rows[:, 0])


def check_group(config: Any, *, grouped: bool = False) -> None:
    """Raises ValueError for a group of a study that protects single records, or one that lacks a
    unit or a limit.
    """
    if not (group := config.get("group", "")):
        return
    if not grouped:
        raise ValueError(
            "config.data.group must be '' for this study, which protects single records, got "
            f"{group!r}."
        )
    if config.source == "bundled":
        raise ValueError(
            f"config.data.group={group!r} needs other data: no bundled set says who owns a record."
        )
    if config.get("unit", "example") in ("example", "image", "record"):
        raise ValueError(
            f"config.data.unit must name an owner of records, such as 'patient', with {group=}."
        )
    if config.get("max_records", 0) < 1:
        raise ValueError(f"config.data.max_records must be at least 1 with {group=}.")


def _check_owners(config: Any, found: Mapping[str, Examples]) -> None:
    """Refuses parts that share an owner of records."""
    if not (group := config.get("group", "")):
        return
    first = dict[Any, str]()
    for name, records in found.items():
        if _role(name) in ("upstream", "public", "test") and group not in _columns(records):
            continue
        for owner in set(data.read_ids(records, group)):
            if first.setdefault(owner, name) != name:
                raise ValueError(
                    f"config.data.parts.{first[owner]} and config.data.parts.{name} share a "
                    f"{config.unit}. No account counts both uses of its records. Put all records "
                    f"of a {config.unit} into one part."
                )


def _columns(records: Examples) -> set[str]:
    """Returns the names of the columns of records, with those of texts."""
    example = data.check_source(records)
    return set(records.text_names) | (set(example) if isinstance(example, Mapping) else set())


def only_adjacency(config: Any, adjacency: str) -> None:
    """Raises ValueError if the `data` part of a config has another adjacency than a study's proofs
    are for.
    """
    if (given := config.get("adjacency", adjacency)) != adjacency:
        raise ValueError(
            f"config.data.adjacency must be {adjacency!r} for this study, got {given!r}."
        )


def _share(role: str, part: Any, records: int) -> float:
    if (
        isinstance(part, bool)
        or not isinstance(part, int | float)
        or part <= 0
        or (part > 1 and part % 1)
    ):
        raise ValueError(
            f"config.data.parts.{role} must be a share in (0, 1) or a number of records of a "
            f"bundled set, got {part!r}."
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
            raise ValueError(
                f"config.data.parts.{role} must be a split such as 'train[:500]', got {part!r}."
            )
        name, _, split = part.rpartition("/")
        if name or config.get("source") != "npz":
            found[role] = (name or config.name, split)
    if found:
        data.check_disjoint(
            {
                f"config.data.parts.{role}": (*at, config.data_dir or None)
                for role, at in found.items()
            }
        )
    return found


def _opened(config: Any, part: str, prepare: Prepare | None) -> Examples:
    """Returns a part of npz, hf, folder or a function."""
    if not isinstance(part, str):
        raise ValueError(
            f"config.data.parts must have texts for config.data.source={config.source!r}, got "
            f"{part!r}."
        )
    name, path = f"{config.name}/{part}", config.get("path", "")
    columns, limits = dict(config.get("columns", {})) or None, Limits(**config.get("limits", {}))
    group = config.get("group", "")
    how: dict[str, Any] = {"name": name, "num_classes": config.get("num_classes", 0)}
    match config.source:
        case "npz" if part.endswith(".npz"):
            where = os.path.join(path, part)
            texts = [group] if group and group in (columns or npz_names(where)) else []
            return data.from_npz(where, columns=columns, texts=texts, limits=limits, **how)
        case "npz":
            image, label = arrays(
                config, "path", (f"{part}_images", f"{part}_labels"), "as MedMNIST distributes it"
            ).values()
            return data.from_arrays(image=image, label=label.reshape(-1), **how)
        case "hf":
            if set("[+") & set(part):
                raise ValueError(
                    f"config.data.parts must have whole splits for 'hf', got {part!r}. Cut them "
                    "before."
                )
            texts = [group] if group else []
            found = data.from_hf(path or config.name, part, columns=columns, texts=texts, **how)
        case "folder":
            classes = tuple(config.get("class_names", ())) or None
            texts = (
                [group] if group and group in read_table(os.path.join(path, part)).columns else []
            )
            found = data.from_folder(
                path,
                part,
                classes=classes,
                texts=texts,
                prepare=prepare,
                pixel_range=config.get("pixel_range", None),
                limits=limits,
                **how,
            )
        case _:
            found = _called(config, part)
    return found.load() if config.get("in_memory", True) else found


def _called(config: Any, part: str) -> Examples:
    module, _, function = config.source.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"config.data.source={config.source!r} cannot be imported: {shown(error)}."
        ) from error
    found = make(part, **dict(config.get("options", {})))
    if not isinstance(found, Examples):
        raise TypeError(
            f"config.data.source={config.source!r} must return jaxdp.data.Examples, as from_arrays "
            f"and from_grain do, got {type(found).__name__}."
        )
    return dataclasses.replace(found, name=f"{config.name}/{part}")


def _check_apart(config: Any, wanted: Mapping[str, Any]) -> None:
    """Refuses parts that share a file of records, or an image of a folder."""
    for part in (parts := list(wanted.values())):
        if parts.count(part) > 1:
            raise ValueError(
                f"config.data.parts has {part!r} for several roles, which would share all records."
            )
    owner = dict[str, str]()
    for name in wanted if config.source == "folder" else ():
        table = read_table(os.path.join(config.path, wanted[name]), needed=("path",))
        for path in map(os.path.normpath, table.columns["path"]):
            if owner.setdefault(path, name) != name:
                raise ValueError(
                    f"config.data.parts.{owner[path]} and config.data.parts.{name} share an image. "
                    "No account counts both uses of a record. List every image in one part."
                )


def arrays(config: Any, field: str, keys: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz file, in the order of `keys`.

    Args:
      config: The `data` part of a study's config. A field `limits` may have fields of
          `jaxdp.files.Limits`.
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
            f"File {path!r} does not exist. An .npz file with the arrays {content} is needed. Give "
            f"its path with --config.data.{field}=..., or run the config of the digits, which "
            "needs no file."
        )
    limits = Limits(**config.get("limits", {}))
    return read_npz(path, keys, remedy=f"Make it again with {content}.", limits=limits)


def texts(
    name: str, split: str, field: str, *, data_dir: str | None = None, labelled: bool = True
) -> tuple[list[str], np.ndarray]:
    """Returns the texts of a field, and the labels int32 [n] (without `labelled` zeros), of a split
    of TFDS.

    Raises:
      ValueError: The split has no labels, or no such field.
      FileNotFoundError: As in `parts`.
    """
    tfds = optional("tensorflow_datasets", "tfds")

    with prepared._quiet_array_record():
        builder = prepared._prepared_builder(
            tfds, name, data_dir or os.environ.get("TFDS_DATA_DIR") or None
        )
        records = builder.as_data_source(split=split)
        rows = records.__getitems__(list(range(len(records))))
    if rows and field not in rows[0]:
        raise ValueError(
            f"field must be one of {', '.join(map(repr, sorted(rows[0])))}, got {field!r}."
        )
    label = np.array([row["label"] if labelled else 0 for row in rows], np.int32)
    if (label < 0).any():
        raise ValueError(
            f"split {split!r} of data set {name!r} has no labels (they are stored as -1)."
        )
    return [row[field].decode("utf-8", "replace") for row in rows], label


@functools.lru_cache(maxsize=8)
def _read(name: str, split: str, data_dir: str | None, prepare: Prepare | None) -> Examples:
    return data.from_tfds(name, split, data_dir=data_dir, prepare=prepare)


def read(spec: Any, prepare: Prepare | None = None) -> Examples:
    """Returns one whole set, or some classes of it.

    Args:
      spec: Has the fields of a set of images, `split` in place of parts, and `classes`, the labels
        to keep. They are renumbered in this order. () keeps all.
      prepare: As in `parts`.
    """
    check_group(spec)
    if spec.source == "bundled":
        source = _bundled(spec)
    elif spec.source == "tfds":
        source = _read(
            spec.name, spec.split, spec.data_dir or None, prepare if spec.prepare else None
        )
    else:
        source = _opened(spec, spec.split, prepare if spec.prepare else None)
    return source.of_classes(spec.classes) if spec.classes else source


def check_apart(sets: Any, first: str, *others: str) -> None:
    """Raises ValueError if another set, each as in `read`, shares a record with the first.

    Args:
      sets: The `data` part of a config, by name. Only sets of TFDS are compared. A set without a
          name is skipped.
      first, others: Names of sets.
    """
    mine = sets[first]
    for name in others:
        other = sets[name]
        known = other.name and mine.source == other.source == "tfds"
        if known and not (
            mine.classes and other.classes and set(mine.classes).isdisjoint(other.classes)
        ):
            parts = {first: mine, name: other}
            data.check_disjoint(
                {
                    f"config.data.{part}": (spec.name, spec.split, spec.data_dir or None)
                    for part, spec in parts.items()
                }
            )


def under(test: Examples | None, config: Any, shift: str) -> Examples:
    """Returns test images under a shift, `CLEAN` or a corruption, always in the same order.

    Corruptions that are computed here are computed whenever an image is read. `in_memory` keeps
    them.

    Args:
      test: The images without a shift. Published corrupted sets need none.
      config: The `data` part of a study's config, see above.
      shift: The name of the shift.

    Raises:
      ValueError: The shift is unknown, or the test images are missing.
      FileNotFoundError: As in `parts`.
    """
    if config.get("corrupted_name", "") and shift != CLEAN:
        return data.corrupted_tfds(
            config.corrupted_name, shift, config.severity, data_dir=config.data_dir or None
        )
    if test is None:
        raise ValueError(
            f"config.data.parts.test must name the images for the shift {shift!r}, got none."
        )
    if shift in (strengths := config.get("strengths", {})):
        return shifts.shifted(test, shift, strengths[shift])
    return test if shift == CLEAN else data.corrupt(test, shift, severity=config.severity)


def in_memory(source: Examples, name: str = "") -> Examples:
    """Returns a source with all images in memory as uint8. A corruption is thus computed once."""
    parts = np.split(np.arange(len(source)), range(256, len(source), 256))
    read = [
        source.gather(rows)
        for rows in progress_bar(parts, label=f"images of {source.name}", unit="batch")
    ]
    image = np.concatenate([np.rint(255 * columns["image"]).astype(np.uint8) for columns in read])
    label = np.concatenate([columns["label"] for columns in read])
    return data.from_arrays(
        image=image, label=label, num_classes=source.num_classes, name=name or source.name
    )


def everything(source: Examples) -> dict[str, np.ndarray]:
    """Returns all columns of a source."""
    return source.gather(np.arange(len(source)))


def labels(source: Examples) -> np.ndarray:
    """Returns all labels of a source without reading an image."""
    return data.read_column(source, "label")


def choose(count: int, chosen: int, *, seed: int) -> np.ndarray:
    """Returns a public choice of `chosen` of `count` rows in a random order, int64 [chosen]."""
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")[:chosen]


def at_most(source: Examples, count: int, *, seed: int) -> Examples:
    """Returns a public choice of `count` records in a random order. 0 takes all records."""
    return source.take(choose(len(source), count or len(source), seed=seed))


def smallest_class(source: Examples) -> int:
    """Returns the number of records of the rarest class."""
    return int(np.bincount(labels(source), minlength=source.num_classes).min())


def few_shots(source: Examples, shots: int, *, seed: int) -> dict[str, np.ndarray]:
    """Returns `shots` records of every class, class by class, drawn without replacement.

    Raises:
      ValueError: A class has fewer records.
    """
    if (most := smallest_class(source)) < shots:
        raise ValueError(
            f"shots must be at most {most}, the size of the smallest class, got {shots}."
        )
    rng, known = np.random.Generator(np.random.Philox(key=seed)), labels(source)
    rows = [
        rng.choice(np.flatnonzero(known == k), shots, replace=False)
        for k in range(source.num_classes)
    ]
    return source.gather(np.concatenate(rows))


def turned(source: Examples, quarters: int) -> Examples:
    """Returns a source with its images rotated by quarter turns."""
    if quarters % 4 == 0:
        return source
    columns = everything(source)
    image = np.rot90(columns["image"], quarters, axes=(1, 2))
    return data.from_arrays(
        image=image, label=columns["label"], num_classes=source.num_classes, name=source.name
    )


def cut(config: Any, source: Examples, pieces: int) -> Sequence[Examples]:
    """Returns a source in pieces of nearly equal numbers of units, in its order. No two pieces
    share an owner.

    The division follows from positions, so each piece is a data set of its own. A neighbour differs
    in one piece.
    """
    owners = np.arange(len(source))
    if group := config.get("group", ""):
        owners = owners_of(data.read_ids(source, group), len(source))
    parts = np.array_split(np.arange(owners.max(initial=-1) + 1), pieces)
    return [source.take(np.flatnonzero(np.isin(owners, part))) for part in parts]


def require_images(sources: Mapping[str, Examples]) -> None:
    """Raises ValueError for a source without images."""
    for source in sources.values():
        image_shape(source)


def image_shape(source: Examples) -> tuple[int, ...]:
    """Returns (height, width, channels) of the images. Raises ValueError for a source without
    images.
    """
    return data.check_source(source, "image", argument=f"config.data: {source.name!r}")[
        "image"
    ].shape
