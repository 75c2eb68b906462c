"""Identifiers of the people who own records. An identifier is text, everywhere in this library.

    identifiers(["P1", " P1 ", "007", 7])  # ["P1", "P1", "007", "7"]: three people

Two identifiers are one person exactly if their UTF-8 bytes are equal after two steps: Unicode
normalisation NFC, and the removal of blanks at both ends. Letters keep their case, and digits are
no numbers: "007" and "7" are two people.

| value | becomes |
|---|---|
| text | itself |
| `bytes`, which must be UTF-8 | the text |
| a whole number (`int`, integers of NumPy) | its decimal digits, so that 7 and "7" are one person |
| a date (`datetime.date`) | its text as in ISO 8601 |
| a tuple of these | a tuple, which differs from each text |
| floating point | refused: 1e16 + 1 is 1e16, and 200001.01 is 200001.02 in float32 |
| `bool`, points in time and all else | refused: they have several texts, or few values |
| None, NaN, blanks only | refused: a blank owner would join the records of several people |
"""

import datetime
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np

Identifier = Any  # str, or a tuple of identifiers

_KINDS = "iuUSTO"  # of NumPy: integers, texts, bytes, texts of variable length, objects
_AS_TEXT = "Give it as text: read the column with dtype=str, or keep its digits in quotation marks."


def identifier(value: Any, argument: str = "group") -> Identifier:
    """Returns the identifier of a value, as the text of this module says. The errors hold no value.

    Args:
      value: Text, bytes, a whole number, a date, or a tuple of these.
      argument: The name of the value in errors.

    Raises:
      ValueError: The value is missing (None, NaN or blank), or is not Unicode.
      TypeError: The value is of another type.
    """
    if isinstance(value, tuple):
        if not value:
            raise _lacking(argument)
        return tuple(identifier(part, argument) for part in value)
    if isinstance(value, bytes):
        value = _decoded(value, argument)
    if isinstance(value, str):
        return _normal(value, argument)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.isoformat()
    if value is None or (isinstance(value, float | np.floating) and value != value):
        raise _lacking(argument)
    raise _no_identifier(argument, type(value).__name__)


def identifiers(values: Iterable[Any], argument: str = "group") -> list[Identifier]:
    """Returns the identifiers of values, in their order. Arrays of NumPy are told by their dtype.

    Raises:
      ValueError, TypeError: As `identifier`.
    """
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind not in _KINDS:
        raise _no_identifier(argument, str(dtype))
    listed: Any = values.tolist() if hasattr(values, "tolist") else list(values)
    return [identifier(value, argument) for value in listed]


def owners_of(group: Iterable[Any], records: int) -> np.ndarray:
    """Returns the number of each record's owner, int32 [records].

    Owners are counted in the order of their first records.

    Args:
      group: The identifier of the owner of each record.
      records: The number of records.

    Raises:
      ValueError: group has another length, or as `identifier`.
      TypeError: As `identifier`.
    """
    owners = identifiers(group)
    if len(owners) != records:
        raise ValueError(
            f"group must have one value for each of the {records} records, got {len(owners)}."
        )
    known: dict[Identifier, int] = {}
    for owner in owners:
        known.setdefault(owner, len(known))
    return np.array([known[owner] for owner in owners], np.int32)


def _decoded(value: bytes, argument: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{argument} has bytes that are not UTF-8. Decode them with their own encoding."
        ) from error


def _normal(text: str, argument: str) -> str:
    normal = unicodedata.normalize("NFC", text).strip()
    if not normal:
        raise _lacking(argument)
    if any("\ud800" <= char <= "\udfff" for char in normal):  # they have no UTF-8
        raise ValueError(
            f"{argument} has a text with half a surrogate pair. Decode it with its own encoding."
        )
    return normal


def _lacking(argument: str) -> ValueError:
    return ValueError(
        f"{argument} lacks a value: None, NaN or a blank text. Give every record its owner, or "
        "leave the record out."
    )


def _no_identifier(argument: str, kind: str) -> TypeError:
    return TypeError(
        f"{argument} must have identifiers, which are texts or whole numbers, got {kind}. Floating "
        f"point merges digits. {_AS_TEXT}"
    )
