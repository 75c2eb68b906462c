"""Refuses parts of a set that share a record or an owner of records.

No account counts both uses of a record: a ledger knows names of data sets, not their records.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxdp.data.owners import split_owners
from jaxdp.data.protocol import check_source
from jaxdp.data.sources import Examples, read_ids
from jaxdp.data.tables import read_table
from jaxdp.data.tfds import check_disjoint

if TYPE_CHECKING:
    from jaxdp.data.spec import DataSpec

# Public parts may lack the column of the owners.
_PUBLIC_ROLES = ("upstream", "public", "test")


def check_records_apart(specs: Mapping[str, "DataSpec"]) -> None:
    """Raises ValueError if two parts share a record, as far as their specs tell.

    Splits of TFDS are compared record by record. Other parts must differ in their names or be
    different files, and CSV files of a folder must list different images.

    Args:
      specs: The specs of all parts of one set, by role.
    """
    of_tfds = {role: spec for role, spec in specs.items() if spec.source == "tfds"}
    if of_tfds:
        check_disjoint({spec.field: _place(spec) for spec in of_tfds.values()})
    others = {role: spec for role, spec in specs.items() if role not in of_tfds}
    parts_of_roles = [_part(spec) for spec in others.values()]
    for spec in others.values():
        if parts_of_roles.count(_part(spec)) > 1:
            raise ValueError(
                f"{spec.where}.parts has {spec.part!r} for several roles, which would share all "
                "records."
            )
    _check_images_apart(others)


def _place(spec: "DataSpec") -> tuple[str, str, str | None]:
    return spec.name, spec.part, spec.data_dir or None


def _part(spec: "DataSpec") -> str:
    """Returns the name of a part, or the file that it is, which has several names."""
    if spec.source not in ("csv", "folder", "npz") or spec.share is not None:
        return spec.part
    return os.path.realpath(os.path.join(spec.path, spec.part))


def _check_images_apart(specs: Mapping[str, "DataSpec"]) -> None:
    """Refuses two CSV files of a folder that list the same image."""
    first_with = dict[str, "DataSpec"]()
    for spec in specs.values():
        if spec.source != "folder" or spec.share is not None:
            continue
        table = read_table(os.path.join(spec.path, spec.part), needed=("path",))
        for path in map(os.path.normpath, table.columns["path"]):  # "./a.png" is "a.png"
            first = first_with.setdefault(path, spec)
            if first is not spec:
                raise ValueError(
                    f"{first.field} and {spec.field} share an image. No account counts both uses "
                    "of a record. List every image in one part."
                )


def check_owners_apart(specs: Mapping[str, "DataSpec"], sources: Mapping[str, Examples]) -> None:
    """Raises ValueError if two parts share an owner of records.

    Args:
      specs: The specs of the parts, by role.
      sources: Their sources, by role.
    """
    first_with = dict[Any, "DataSpec"]()
    for role, spec in specs.items():
        if not spec.group:
            continue
        kind = spec.role.partition(" ")[0]  # "sources" of "sources 0"
        if kind in _PUBLIC_ROLES and spec.group not in _columns(sources[role]):
            continue
        if spec.separator:
            owners = split_owners(sources[role], spec.group, spec.separator)
        else:
            owners = set(read_ids(sources[role], spec.group))
        for owner in owners:
            first = first_with.setdefault(owner, spec)
            if first is not spec:
                raise ValueError(
                    f"{first.field} and {spec.field} share a {spec.unit}. No account counts both "
                    f"uses of its records. Put all records of a {spec.unit} into one part."
                )


def check_sets_apart(first: "DataSpec", *others: "DataSpec") -> None:
    """Raises ValueError if another set shares a record with the first.

    Only sets of TFDS are compared. Sets with disjoint choices of classes share nothing.
    """
    for other in others:
        if not first.source == other.source == "tfds":
            continue
        # A record has one class, so parts with other classes share none.
        some_classes = first.classes and other.classes
        if some_classes and set(first.classes).isdisjoint(other.classes):
            continue
        check_disjoint({first.field: _place(first), other.field: _place(other)})


def _columns(records: Examples) -> set[str]:
    """Returns the names of the columns of records, with those of texts."""
    example = check_source(records)
    columns = set(example) if isinstance(example, Mapping) else set()
    return columns | set(records.text_names)
