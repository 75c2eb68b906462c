"""Packages, the only thing that two parties exchange: bytes with a kind, fields and arrays.

    SHA-256 of the rest, 32 bytes
    a safetensors file, whose metadata has {"format": 2, "kind": ..., "fields": {...}}

`safetensors.numpy.load(data[32:])` reads the arrays without jaxdp. The sum detects accidents: a
broken transfer, an edited file. It does NOT prove who wrote a package. Send packages over a channel
that authenticates the other party. Reading a package runs no code of its writer and opens no file.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdp.files.durable import write_durably
from jaxdp.files.reading import Limits, check_finite, understood
from jaxdp.files.text import parse_json, shown

FORMAT = 2
# The bytes of the sum, and of the length of the header of safetensors.
_SUM = 32
_LENGTH = 8
_AGAIN = "Send it again."
# The dtypes of safetensors that every NumPy has.
_DTYPES = {
    "BOOL": "?",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}


class Package(NamedTuple):
    """The content of a package.

    It has a kind, fields as in JSON (tuples become lists), and NumPy arrays by name.
    """

    kind: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]


def pack(kind: str, *, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """Returns a package as bytes. The same content gives the same bytes.

    Args:
      kind: The kind of package, for example "frontend".
      fields: JSON-able values by name.
      arrays: NumPy or JAX arrays of bool, integers or floats of at most 64 bits, by name such as
          "blocks/0/kernel".

    Raises:
      TypeError: An array has another dtype.
      ValueError: Fields are not JSON-able, a name is not a string or is empty, or an array has a
          NaN or an infinity.
    """
    from safetensors.numpy import save

    _check_name("kind", kind)
    for name in fields:
        _check_name("every name in fields", name)
    plain_arrays = {name: _plain(name, array) for name, array in arrays.items()}
    check_finite(
        plain_arrays,
        f"the package {kind!r}",
        "Nothing is sent. Leave out the inputs that caused them.",
    )
    content = {"format": FORMAT, "kind": kind, "fields": dict(fields)}
    try:
        # Sorted, so that the same content gives the same bytes.
        metadata = json.dumps(content, sort_keys=True, allow_nan=False)
        parse_json(metadata)  # as the reader will
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            "fields must be JSON-able (numbers, strings, lists, dictionaries): "
            f"{shown(error).removesuffix('.')}."
        ) from error
    rest = save(plain_arrays, {"package": metadata})
    return hashlib.sha256(rest).digest() + rest


def unpack(
    data: bytes,
    kinds: str | Collection[str],
    *,
    fields: Collection[str] = (),
    limits: Limits | None = None,
    name: str = "the package",
) -> Package:
    """Reads a package after it has checked all of it.

    The size is compared with the limits before anything else.

    Args:
      data: The bytes of `pack`.
      kinds: The kind that it must have, or several allowed ones.
      fields: Names of fields that it must have. It may have others.
      limits: Limits on its bytes and its number of arrays, by default `Limits()`.
      name: A name for errors.

    Raises:
      ValueError: The package is damaged, of another kind, of another format or above a limit. Or it
        has a NaN or an infinity, repeats a name, or lacks a field. The message has `name` and the
        remedy.
    """
    limits = limits or Limits()
    name = shown(name)
    limits.check("bytes", len(data), name)
    rest = memoryview(data)[_SUM:]
    if len(rest) < _LENGTH or hashlib.sha256(rest).digest() != data[:_SUM]:
        raise _damaged(name, "does not have the SHA-256 that it states")
    with understood(name, _AGAIN):
        content, arrays = _content(rest, limits, name)
        version = content["format"]
        kind = content["kind"]
        values = content["fields"]
    # Format 1 was a folder.
    if type(version) is not int or version != FORMAT:
        raise ValueError(
            f"{name} has format {version!r}, but this jaxdp reads format {FORMAT}. Upgrade jaxdp, "
            "or ask its writer for a package in this format."
        )
    allowed = [kinds] if isinstance(kinds, str) else sorted(kinds)
    if kind not in allowed or not isinstance(values, dict):
        raise ValueError(
            f"{name} is of kind {kind!r}, not {' or '.join(map(repr, allowed))}. Give another "
            "package."
        )
    missing = sorted(set(fields) - set(values))
    if missing:
        raise ValueError(
            f"{name} is whole, but a package of kind {kind!r} needs the field "
            f"{', '.join(map(repr, missing))}. Its writer must make it again."
        )
    check_finite(arrays, name, "Its writer must make it again.")
    return Package(kind, values, arrays)


def _content(
    rest: memoryview, limits: Limits, name: str
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Returns the metadata and the arrays of a safetensors file."""
    from safetensors import deserialize

    header_length = int.from_bytes(rest[:_LENGTH], "little")
    header = parse_json(bytes(rest[_LENGTH : _LENGTH + header_length]))
    metadata = parse_json(header.pop("__metadata__")["package"])
    limits.check("arrays", len(header), name)
    # It checks sizes before it copies.
    entries: Any = deserialize(bytes(rest))  # type: ignore[no-untyped-call]
    arrays = {}
    for key, entry in entries:
        flat = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
        arrays[key] = flat.reshape(entry["shape"])
    return metadata, arrays


def write_package(path: pathlib.Path, data: bytes) -> None:
    """Writes a package, which appears whole or not at all. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)


def read_package(path: pathlib.Path, *, limits: Limits | None = None) -> bytes:
    """Reads the bytes of a package for `unpack`. It compares the size with the limits first.

    Raises:
      FileNotFoundError: There is no package at `path`.
      ValueError: The file is no plain file, or exceeds the limit.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{shown(path)} does not exist. Give the file of a package, or send it again."
        )
    if path.is_symlink() or not path.is_file():
        raise _damaged(shown(path), "is not a plain file")
    (limits or Limits()).check("bytes", path.stat().st_size, shown(path))
    return path.read_bytes()


def _plain(name: Any, array: Any) -> np.ndarray[Any, Any]:
    """Returns an array as its bytes are sent: little-endian, row after row."""
    _check_name("every name in arrays", name)
    array = np.asarray(array)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(
            f"array {name!r} has dtype {array.dtype}. Packages hold bool, integers and floats of "
            "at most 64 bits. Convert the array, for example with astype(np.float32)."
        )
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    # `ascontiguousarray` gives an array of shape () one axis.
    return np.ascontiguousarray(little_endian).reshape(array.shape)


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} must be a non-empty string, got {name!r}.")


def _damaged(name: str, what: str) -> ValueError:
    return ValueError(f"{name} {what}. The package is damaged. {_AGAIN}")
