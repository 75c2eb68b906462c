"""The package, the only thing that the two parties exchange: a folder with a manifest and one .npy file per array.

    manifest.json    {"format": 1, "kind": ..., "fields": {...}, "arrays": [...], "sha256": ...}
    0000.npy         numpy.load(..., allow_pickle=False) reads it, with or without jaxdp
    0001.npy

The manifest has name, file, dtype, shape and SHA-256 of every array, and a SHA-256 of itself. These detect accidents: a
broken transfer, an edited file, a mix of two versions. They do NOT prove who wrote a package: an attacker who changes a
file can change the sums too. Send packages over a channel that authenticates the other party. Reading a package runs no
code of its writer and opens no file outside its folder.
"""

import hashlib
import json
import math
import os
import shutil
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp.files import Limits, check_finite, read_npy, sync_folder, sync_tree

Folder = str | os.PathLike[str]
FORMAT = 1
_MANIFEST = "manifest.json"
# Every NumPy reads these. Objects, text, bfloat16 and floats whose width depends on the machine are not among them.
_WIDE = ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8")
_DTYPES = frozenset({"|b1", "|i1", "|u1", *(order + kind for order in "<>" for kind in _WIDE)})
_MANIFEST_BYTES = 2**26
_KEYS = {"format", "kind", "fields", "arrays", "sha256"}
_ENTRY = {"name": str, "file": str, "dtype": str, "shape": list, "sha256": str}


class Package(NamedTuple):
    """The result of `read_package`: fields as in JSON (tuples become lists), and NumPy arrays by name."""

    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_package(folder: Folder, kind: str, *, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes a folder that appears whole or not at all. On return it is on the disk.

    Args:
      folder: The new folder. Missing parents are made.
      kind: The kind of package, for example "frontend". The reader asks for the same kind.
      fields: JSON-able values by name.
      arrays: NumPy or JAX arrays of bool, integers or floats of at most 64 bits, by name such as "blocks/0/kernel".

    Raises:
      FileExistsError: `folder` exists already. It is not changed.
      TypeError: An array has another dtype.
      ValueError: Fields are not JSON-able, a name is not a string or is empty, or an array has a NaN or an infinity.
    """
    target = Path(folder)
    _check_name("kind", kind)
    for name in fields:
        _check_name("every name in fields", name)
    converted = {name: _plain(name, array) for name, array in arrays.items()}
    check_finite(converted, target, "Nothing is written. Leave out the inputs that caused them.")
    try:
        plain_fields = json.loads(json.dumps(dict(fields), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"fields must be JSON-able (numbers, strings, lists, dictionaries): {error}.") from error
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already. Packages are never overwritten. Choose another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
    partial.mkdir()
    try:
        entries = []
        for index, (name, array) in enumerate(converted.items()):
            path = partial / _file(index)
            np.save(path, array, allow_pickle=False)
            entry = {"name": name, "file": path.name, "dtype": array.dtype.str, "shape": list(array.shape)}
            entries.append({**entry, "sha256": _digest(path)})
        manifest = {"format": FORMAT, "kind": kind, "fields": plain_fields, "arrays": entries}
        text = json.dumps({**manifest, "sha256": _seal(manifest)}, indent=2, allow_nan=False)
        (partial / _MANIFEST).write_text(f"{text}\n", encoding="utf-8")
        sync_tree(partial)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(target.parent)


def read_package(
    folder: Folder, kind: str, *, fields: Iterable[str] = (), arrays: Iterable[str] = (), limits: Limits | None = None
) -> Package:
    """Reads a folder of `write_package` after it has checked all of it.

    It compares the declared sizes with the limits and with the files before it reads any array.

    Args:
      folder: The package.
      kind: The kind that it must have.
      fields, arrays: Names that it must have. It may have others.
      limits: Limits on the number of arrays and their bytes, by default `Limits()`.

    Raises:
      FileNotFoundError: There is no package at `folder`, or one of its files is missing.
      ValueError: The package is damaged, of another kind, from a newer jaxdp or above a limit. Or it has a NaN or an
        infinity, or lacks a required field or array. The message names the file and the remedy.
    """
    root, limits = Path(folder), limits or Limits()
    path, manifest = root / _MANIFEST, _read_manifest(root)
    if manifest["kind"] != kind:
        raise ValueError(f"{path} is of kind {manifest['kind']!r}, not {kind!r}. Give a folder of kind {kind!r}.")
    entries = manifest["arrays"]
    limits.check("arrays", len(entries), str(path))
    declared = sum(math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize for entry in entries)
    limits.check("bytes", declared, str(path))
    there, stated = set(os.listdir(root)), {_MANIFEST, *(entry["file"] for entry in entries)}
    if lost := sorted(stated - there):
        raise FileNotFoundError(f"{root / lost[0]} is missing from the package. Send it again.")
    if extra := sorted(there - stated):
        raise ValueError(f"{root / extra[0]} is not in the package's manifest. Remove it, or send the package again.")
    names = [entry["name"] for entry in entries]
    for what, required, present in (("field", fields, manifest["fields"]), ("array", arrays, names)):
        if missing := sorted(set(required) - set(present)):
            raise ValueError(
                f"{path} is whole, but a package of kind {kind!r} needs the {what} {', '.join(map(repr, missing))}. "
                "Its writer must make it again."
            )
    found = {entry["name"]: _read_array(root / entry["file"], entry) for entry in entries}
    check_finite(found, root, "Its writer must make it again.")
    return Package(manifest["fields"], found)


def package_bytes(folder: Folder) -> int:
    """Returns how many bytes a package takes to send. Raises FileNotFoundError if there is none."""
    if not (Path(folder) / _MANIFEST).exists():
        raise _absent(Path(folder))
    return sum(path.stat().st_size for path in Path(folder).iterdir())


# --- Writing ----------------------------------------------------------------------------------------------------------


def _plain(name: Any, array: Any) -> np.ndarray:
    _check_name("every name in arrays", name)
    array = np.asarray(array)
    if array.dtype.str not in _DTYPES:
        raise TypeError(
            f"array {name!r} has dtype {array.dtype}. Packages hold bool, integers and floats of at most 64 bits. "
            "Convert the array, for example with astype(np.float32)."
        )
    return array


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} must be a non-empty string, got {name!r}.")


def _file(index: int) -> str:
    return f"{index:04d}.npy"  # Names of arrays may not be valid file names.


def _seal(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest without its own sum."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Reading ----------------------------------------------------------------------------------------------------------


def _read_manifest(root: Path) -> dict[str, Any]:
    path = root / _MANIFEST
    if not os.path.lexists(path):
        raise _absent(root)
    _check_regular(path)
    if path.stat().st_size > _MANIFEST_BYTES:
        raise _damaged(path, f"has more than the {_MANIFEST_BYTES} bytes of a manifest")
    try:
        manifest = json.loads(path.read_bytes())
        seal = _seal(manifest) if isinstance(manifest, dict) else ""
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "is not JSON") from error
    if not seal or not isinstance(manifest.get("format"), int):
        raise _damaged(path, "is not a manifest")
    if manifest["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']}, but this jaxdp reads formats up to {FORMAT}. Upgrade jaxdp, or "
            "ask for a package in an older format."
        )
    if manifest.get("sha256") != seal:
        raise _damaged(path, "does not have the SHA-256 that it states")
    entries = manifest.get("arrays")
    proper = set(manifest) == _KEYS and manifest["format"] == FORMAT and isinstance(manifest["fields"], dict)
    if not proper or not isinstance(entries, list) or not all(_is_entry(i, entry) for i, entry in enumerate(entries)):
        raise _damaged(path, "does not describe a package")
    if len({entry["name"] for entry in entries}) < len(entries):
        raise _damaged(path, "names an array twice")
    return manifest


def _is_entry(index: int, entry: Any) -> bool:
    """Checks an entry of a manifest. It must name a numbered file, so a file in the folder, and a plain dtype."""
    if not isinstance(entry, dict) or {k: type(v) for k, v in entry.items()} != _ENTRY:
        return False
    plain = entry["dtype"] in _DTYPES and all(type(n) is int and n >= 0 for n in entry["shape"])
    return plain and entry["file"] == _file(index)


def _read_array(path: Path, entry: Mapping[str, Any]) -> np.ndarray:
    _check_regular(path)
    if _digest(path) != entry["sha256"]:
        raise _damaged(path, "does not have the SHA-256 of the manifest")
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    try:
        return read_npy(path, shape=shape, dtype=dtype)
    except (ValueError, SyntaxError, tokenize.TokenError) as error:  # a header that is not Python raises the last two
        raise _damaged(path, f"is not the {dtype} array of shape {shape} that the manifest states") from error


def _check_regular(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise _damaged(path, "is not a plain file")


def _absent(root: Path) -> FileNotFoundError:
    return FileNotFoundError(f"{root / _MANIFEST} does not exist. Give the folder of a package, or send it again.")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}. The package is damaged. Send it again.")
