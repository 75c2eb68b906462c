"""The `data` part of a study's config: parsed here once, to a `jaxdp.data.DataSpec` for each role.

A *set of images* has the fields of `DataSpec`, with these differences:

    source     a key of `jaxdp.data.spec.FORMATS`, or "package.module:function"
    parts      the part of each role, one of `ROLES`. Several parts in a tuple are several sources
               or streams.
                   bundled  a share of the set (below 1), or a number of records
                   tfds     a split of `name`, or of another set as "cifar100/train[:8000]";
                            "" for none
                   npz      a part of the file, a file of the folder, or a split of TFDS as above
                   csv      a file of the folder, or a share of the rows (or with a group, of the
                            owners) of one file
                   folder   a CSV file of the folder, or a share of the images in its labels.csv
                            (or with a group, of the owners)
                   hf, function   `part` of the spec
    split      in place of parts, for one whole set: `part` of the spec
    limits     the fields of `jaxdp.files.Limits`
    in_memory  whether all images are kept in memory, True by default, or read whenever needed

A set under domain shift also has the fields

    severity        1 to 5
    corruptions     names of shifts; "clean" means no shift
    corrupted_name  tfds: a set of images that are corrupted already; "" corrupts the test
                    images here
    strengths       {shift: strength}: shifts of `jaxdp.data.shifts.STRENGTHS`
    others          {shift: a whole set of images}: shifts that are other sets with the same classes

Errors name the field of the config. Sources come from specs by `jaxdp.data.open`.
"""

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp.data import DataSpec, Examples
from jaxdp.data import tfds as prepared
from jaxdp.data.apart import check_records_apart
from jaxdp.data.pictures import PrepareImages
from jaxdp.data.selection import load_pixels
from jaxdp.data.shifts import STRENGTHS, Shift, shifted
from jaxdp.data.spec import format_of, medmnist_arrays, open_parts, whole_bundled
from jaxdp.files import Limits, optional, read_npz
from jaxdp.report import progress_bar

from .study import Fields

__all__ = [
    "ROLES",
    "arrays",
    "check_group",
    "domains",
    "in_memory",
    "only_adjacency",
    "parts",
    "shift",
    "specs",
    "terms",
    "texts",
    "under",
    "whole",
]

# A bundled set is divided in this order, so studies with the same parts have the same division.
ROLES = ("upstream", "public", "private", "sources", "stream", "client", "test", "tuning")
# Fields that a config and a spec share, by name and meaning.
_SHARED = (
    *("name", "path", "label", "data_dir", "num_classes", "in_memory", "prepare", "split_seed"),
    *("group", "max_records", "separator", "crop_padding", "flip"),
)
_NOT_OWNERS = ("example", "image", "record")
_FOR_TABLES = (
    "launch.finetune takes tables with configs/finetune/csv.py, launch.predict with "
    "configs/predict/csv.py, and launch.recalibrate_client takes a table of logits"
)


# --- From a config to specs ---------------------------------------------------------------------


def specs(
    config: Any,
    *roles: str,
    needs: Sequence[str] = (),
    grouped: bool = False,
    several: bool = False,
    tables: bool = False,
    unit: str = "example",
    source: str = "",
) -> dict[str, DataSpec]:
    """Returns the specs of some roles. A role with several parts has "sources 0", "sources 1", ...

    The division into parts does not depend on the records. All parts are checked, also those of
    other roles.

    Args:
      config: The `data` part of a study's config, see above.
      roles: The roles. A role without a part is left out.
      needs: Those that must have a part.
      grouped: Whether the study can protect the owners of several records.
      several: Whether it can also protect the owners of records that have several.
      tables: Whether the study works on the features of tables.
      unit, source: The defaults of config.unit and config.source.

    Raises:
      ValueError: The source is unknown, a part is missing, or the parts do not fit the data or
        share a record. Or config.data.group is set for a study that protects records. Or
        config.data is a table for a study of images.
      FileNotFoundError: Data is missing whose splits or names are compared. The message says how
        to get it.
    """
    source = config.get("source", source)
    format_of(source, where="config.data")  # raises if the source is unknown
    if not tables:
        _refuse_table(source, "config.data")
    check_group(config, grouped=grouped, several=several)
    part_by_role = _parts(config)
    for role in needs:
        if role not in part_by_role:
            raise ValueError(
                f"config.data.parts.{role} must name a part of the data, got "
                f"{config.parts.get(role)!r}. Give a share such as 0.2, or a split by its name."
            )
    shared = _shared_fields(config) | terms(config, unit=unit) | {"source": source}
    if source == "bundled":
        places = _bundled_places(config, part_by_role)
    elif _is_divided(config, source, part_by_role):
        places = _shares_of_file(config, part_by_role)
    else:
        places = {role: _place(config, source, role, part) for role, part in part_by_role.items()}
    every = {}
    for role, place in places.items():
        fields = shared | place
        every[role] = DataSpec(role=role, where="config.data", **fields)
    check_records_apart(every)
    ordered: dict[str, DataSpec] = {}
    for role in roles:
        ordered |= {name: spec for name, spec in every.items() if _kind(name) == role}
    return ordered


def parts(
    config: Any,
    *roles: str,
    needs: Sequence[str] = (),
    prepare: PrepareImages | None = None,
    grouped: bool = False,
) -> dict[str, Examples]:
    """Returns the sources of some roles, with names such as "digits/private".

    Args:
      config, roles, needs, grouped: As in `specs`.
      prepare: As in `jaxdp.data.spec.open_parts`.

    Raises:
      FileNotFoundError: The data is missing. The message says how to get it.
      ValueError: As in `specs`, or two parts share an owner.
    """
    specs_of_roles = specs(config, *roles, needs=needs, grouped=grouped)
    return open_parts(specs_of_roles, prepare=prepare)


def whole(config: Any, where: str = "config.data") -> DataSpec:
    """Returns the spec of one whole set, or of some classes of it.

    Args:
      config: Has the fields of a set of images, `split` in place of parts, and `classes`, the
        labels to keep. They are renumbered in this order. () keeps all.
      where: The field of the config with the set, for errors.
    """
    format_of(config.source, where=where)
    _refuse_table(config.source, where)
    check_group(config, where=where)
    part = "" if config.source == "bundled" else config.split
    _check_part(config, config.source, part, where)
    return DataSpec(
        source=config.source,
        part=part,
        classes=tuple(config.classes),
        where=where,
        **_shared_fields(config),
    )


def _refuse_table(source: str, where: str) -> None:
    """Raises ValueError for a table in a study of images."""
    if source == "csv":
        raise ValueError(
            f"{where}.source='csv' is a table, and this config is for images, tokens or texts. "
            f"{_FOR_TABLES}."
        )


def _shared_fields(config: Any) -> Fields:
    """Returns the fields of a spec that do not depend on its role."""
    fields: Fields = {name: config[name] for name in _SHARED if name in config}
    fields["columns"] = dict(config.get("columns", {})) or None
    fields["class_names"] = tuple(config.get("class_names", ()))
    fields["options"] = dict(config.get("options", {}))
    fields["limits"] = Limits(**config.get("limits", {}))
    fields["pixel_range"] = config.get("pixel_range", None)
    return fields


def terms(config: Any, *, unit: str = "example", adjacency: str = "add_remove") -> Fields:
    """Returns unit and adjacency of the private data for `frame.account`.

    Args:
      config: The `data` part of a study's config. Its fields `unit` and `adjacency` are used if
          they are there.
      unit, adjacency: The defaults. A unit is a word for people: without config.data.group the
        guarantee is for one record of a part, so declare "patient" only if no patient has two
        records.
    """
    return {"unit": config.get("unit", unit), "adjacency": config.get("adjacency", adjacency)}


def only_adjacency(config: Any, adjacency: str) -> None:
    """Raises ValueError if the `data` part of a config has another adjacency than a study's proofs
    are for.
    """
    declared = config.get("adjacency", adjacency)
    if declared != adjacency:
        raise ValueError(
            f"config.data.adjacency must be {adjacency!r} for this study, got {declared!r}."
        )


def check_group(
    config: Any, *, grouped: bool = False, several: bool = False, where: str = "config.data"
) -> None:
    """Raises ValueError for a group of a study that protects single records, or one that lacks a
    unit or a limit. So it does for records of several owners that the study cannot protect.
    """
    group = config.get("group", "")
    separator = config.get("separator", "")
    if separator and not several:
        raise ValueError(
            f"{where}.separator must be '' for this study, whose records have one owner each, got "
            f"{separator!r}. launch.finetune takes records of several owners."
        )
    adjacency = config.get("adjacency", "add_remove")
    if separator and (adjacency != "zero_out" or not group):
        raise ValueError(
            f"{where}.adjacency must be 'zero_out' with {separator=}, and {where}.group a column, "
            f"got {adjacency!r}. Who owns which record is public, and what it contains is hidden."
        )
    if not group:
        return
    if not grouped:
        raise ValueError(
            f"{where}.group must be '' for this study, which protects single records, got "
            f"{group!r}."
        )
    if config.source == "bundled":
        raise ValueError(
            f"{where}.group={group!r} needs other data: no bundled set says who owns a record."
        )
    if config.get("unit", "example") in _NOT_OWNERS:
        raise ValueError(
            f"{where}.unit must name an owner of records, such as 'patient', with {group=}."
        )
    if config.get("max_records", 0) < 1:
        raise ValueError(f"{where}.max_records must be at least 1 with {group=}.")


def _parts(config: Any) -> Fields:
    """Returns the parts by role, in the order of `ROLES`: {"private": 0.5, "sources": (0.1, 0.2)}
    becomes {"private": 0.5, "sources 0": 0.1, "sources 1": 0.2}.
    """
    part_by_role: Fields = {}
    for role in ROLES:
        part = config.parts.get(role)
        if not part:
            continue
        if isinstance(part, list | tuple):
            part_by_role |= {f"{role} {k}": one for k, one in enumerate(part)}
        else:
            part_by_role[role] = part
    return part_by_role


def _kind(role: str) -> str:
    """Returns "sources" for "sources 0"."""
    return role.partition(" ")[0]


def _bundled_places(config: Any, parts: Fields) -> dict[str, Fields]:
    """Returns the fields of a spec with the rows of each part, one part after the other."""
    if not parts:
        raise ValueError(f"config.data.parts must name a part of {config.name!r}, got none.")
    records = len(whole_bundled(config.name, where="config.data"))
    shares = [_share(role, part, records) for role, part in parts.items()]
    if sum(shares) > 1 + 1e-9:
        raise ValueError(
            f"config.data.parts must add up to at most {records} records of {config.name!r}, or "
            f"to 1 in shares, got {dict(parts)}."
        )
    places = {}
    first = 0
    for role, end in zip(parts, np.cumsum(shares), strict=True):
        # Ends are rounded, not sizes, so that shares that add up to 1 take every record.
        last = min(records, round(records * end))
        places[role] = {"part": role, "rows": (first, last)}
        first = last
    return places


def _is_divided(config: Any, source: str, parts: Fields) -> bool:
    """Returns whether parts are shares: of one CSV file, or of the images of a folder."""
    if source == "folder":
        return any(isinstance(part, float) for part in parts.values())
    return source == "csv" and not os.path.isdir(config.get("path", ""))


def _shares_of_file(config: Any, parts: Fields) -> dict[str, Fields]:
    """Returns the fields of a spec with the share of each part of one CSV file."""
    path = config.get("path", "")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"File {path!r} does not exist. Give a CSV file, or a folder of them or of "
            "images, with --config.data.path=..."
        )
    shares = list(parts.values())
    numbers = [share for share in shares if isinstance(share, int | float) and 0 < share < 1]
    if numbers != shares or not shares or sum(shares) > 1 + 1e-9:
        raise ValueError(
            "config.data.parts must be shares of the file config.data.path that add up to at most "
            f"1, such as private=0.8 and test=0.2, got {dict(parts)}."
        )
    ends = [0.0, *np.cumsum(shares).tolist()]
    places = {}
    for role, share in zip(parts, itertools.pairwise(ends), strict=True):
        places[role] = {"part": role, "share": share}
    return places


def _share(role: str, part: Any, records: int) -> float:
    """Returns a part of a bundled set as a share of its records."""
    is_number = isinstance(part, int | float) and not isinstance(part, bool)
    if not is_number or part <= 0 or (part > 1 and part % 1):
        raise ValueError(
            f"config.data.parts.{role} must be a share in (0, 1) or a number of records of a "
            f"bundled set, got {part!r}."
        )
    return part if part < 1 else part / records


def _place(config: Any, source: str, role: str, part: Any) -> Fields:
    """Returns the fields of a spec that say where a part of a set that is not bundled lies."""
    if not isinstance(part, str):
        must = "a split such as 'train[:500]'" if source in ("tfds", "npz") else "a text"
        raise ValueError(
            f"config.data.parts.{role} must be {must} for config.data.source={source!r}, got "
            f"{part!r}."
        )
    name, _, split = part.rpartition("/")
    if source == "tfds" or (source == "npz" and name):
        return {"source": "tfds", "name": name or config.name, "part": split}
    _check_part(config, source, part, "config.data")
    return {"part": part}


# --- Files and texts ----------------------------------------------------------------------------


def _check_part(config: Any, source: str, part: str, where: str) -> None:
    """Raises an error if a part cannot be read: a missing file, or some records of a split of
    Hugging Face.
    """
    if source == "npz" and not part.endswith(".npz"):
        content = f"{', '.join(medmnist_arrays(part))} (as MedMNIST distributes it)"
        _check_file(config.get("path", ""), f"{where}.path", content)
    if source == "hf" and set("[+") & set(part):
        raise ValueError(
            f"{where}.parts must have whole splits for 'hf', got {part!r}. Cut them before."
        )


def _check_file(path: str, field: str, content: str) -> None:
    if not path or not os.path.exists(path):
        raise FileNotFoundError(
            f"File {path!r} does not exist. An .npz file with the arrays {content} is needed. Give "
            f"its path with --{field}=..., or run the config of the digits, which needs no file."
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
    content = f"{', '.join(keys)} ({what})"
    _check_file(config[field], f"config.data.{field}", content)
    limits = Limits(**config.get("limits", {}))
    return read_npz(config[field], keys, remedy=f"Make it again with {content}.", limits=limits)


def texts(spec: DataSpec, field: str, *, labelled: bool = True) -> tuple[list[str], np.ndarray]:
    """Returns the texts of a field, and the labels int32 [n] (without `labelled` zeros), of a split
    of TFDS.

    Raises:
      ValueError: The split has no labels, or no such field.
      FileNotFoundError: As in `parts`.
    """
    tfds = optional("tensorflow_datasets", "tfds")

    data_dir = spec.data_dir or os.environ.get("TFDS_DATA_DIR") or None
    with prepared._quiet_array_record():
        builder = prepared._prepared_builder(tfds, spec.name, data_dir)
        records = builder.as_data_source(split=spec.part)
        rows = records.__getitems__(list(range(len(records))))
    if rows and field not in rows[0]:
        known = ", ".join(map(repr, sorted(rows[0])))
        raise ValueError(f"{spec.where}.field must be one of {known}, got {field!r}.")
    label = np.zeros(len(rows), np.int32)
    if labelled:
        label[:] = [row["label"] for row in rows]
    if (label < 0).any():
        raise ValueError(
            f"split {spec.part!r} of data set {spec.name!r} has no labels (they are stored as -1)."
        )
    return [row[field].decode("utf-8", "replace") for row in rows], label


# --- Shifts -------------------------------------------------------------------------------------


def shift(config: Any, name: str) -> Shift:
    """Returns the shift of a name in the `data` part of a config.

    Raises:
      ValueError: config.data.strengths has a strength for an unknown shift.
    """
    published = config.get("corrupted_name", "")
    strengths = config.get("strengths", {})
    strength = None if published else strengths.get(name)
    if strength is not None and name not in STRENGTHS:
        raise ValueError(f"config.data.strengths must name {', '.join(STRENGTHS)}, got {name!r}.")
    return Shift(
        name,
        severity=config.get("severity", 5),
        strength=strength,
        published=published,
        data_dir=config.get("data_dir", ""),
        in_memory=config.get("in_memory", True),
    )


def domains(config: Any, names: Sequence[str]) -> dict[str, Shift | DataSpec]:
    """Returns the shift of each name, or the other set that stands for it in config.data.others."""
    others = config.get("others", {})
    sets: dict[str, Shift | DataSpec] = {}
    for name in names:
        if name in others:
            sets[name] = whole(others[name], f"config.data.others.{name}")
        else:
            sets[name] = shift(config, name)
    return sets


def under(test: Examples | None, shift: Shift) -> Examples:
    """Returns test images under a shift, always in the same order.

    Raises:
      ValueError: The shift is unknown, or the test images are missing.
      FileNotFoundError: As in `parts`.
    """
    if test is None and shift.reads_images:
        raise ValueError(
            f"config.data.parts.test must name the images for the shift {shift.name!r}, got none."
        )
    return shifted(test, shift)


def in_memory(source: Examples, name: str = "") -> Examples:
    """Returns a source with all images in memory, and shows the progress. See `load_pixels`."""
    bar = functools.partial(progress_bar, label=f"images of {source.name}", unit="batch")
    return load_pixels(source, name=name, progress=bar)
