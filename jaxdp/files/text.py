"""Texts of other writers: strict JSON, and messages without control characters. Lines of tables.

Numbers for JSON, and numbers that are rounded to one side.
"""

import decimal
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

_DEEPEST = 100


def shown(value: object) -> str:
    """Returns a value as text for a message, with its unprintable characters escaped.

    A name, a path or a message of another writer may hold control characters, such as the colours
    of a terminal.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if text.isprintable():
        return text
    shown_characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        shown_characters.append(character)
    return "".join(shown_characters)


def shown_lines(value: object) -> str:
    """Returns `shown` of each line of a value."""
    return "\n".join(map(shown, str(value).split("\n")))


def aligned(table: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yields the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def indented(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, each behind two blanks."""
    return [f"  {line}" for line in aligned(table)]


def up(value: float, digits: int = 6) -> str:
    """Returns a number as the format "g" does, but never less than its first 12 digits.

    It is for epsilons: 3.0000049 is "3.00001", which "g" makes 3.
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def down(value: float, digits: int = 6) -> str:
    """Returns a number as the format "g" does, but never more than its first 12 digits.

    It is for what is left of a budget, and for proven lower bounds.
    """
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def _rounded(value: float, digits: int, direction: str) -> str:
    if not math.isfinite(value) or not value:
        return f"{value:g}"
    return f"{rounded(value, digits, direction):.{digits}g}"


def rounded(value: float, digits: int, direction: str, *, keeps_whole: bool = False) -> float:
    """Returns the first 12 digits of a finite number, rounded to one side.

    Args:
      value: The number.
      digits: How many significant digits stay.
      direction: A rounding of `decimal`.
      keeps_whole: Whether whole numbers keep all their digits.
    """
    # As exact as budgets are, so that 1e-5 and 3 * 0.1 stay themselves.
    exact = decimal.Decimal(f"{value:.12g}")
    if not exact:
        return 0.0
    place = exact.adjusted() + 1 - digits
    if keeps_whole:
        place = min(place, 0)
    if place <= int(exact.as_tuple().exponent):  # nothing to round, and perhaps too many digits
        return float(exact)
    return float(exact.quantize(decimal.Decimal(1).scaleb(place), rounding=direction))


def finite(value: Any) -> Any:
    """Returns a value for JSON, with None for every number in it that is not finite."""
    match value:
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(finite, value))
        case float() if not math.isfinite(value):
            return None
    return value


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Reads a JSON text strictly (RFC 8259).

    Args:
      text: The text, or its bytes in UTF-8.
      finite: Whether to refuse NaN, infinities and numbers beyond float64. False is for results of
          this library.

    Raises:
      ValueError: The text is not JSON, repeats a key of an object, or nests more than 100 values.
        Or it has a number that is not finite.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refused if finite else None,
            parse_float=_finite if finite else None,
        )
    except RecursionError:
        raise _too_deep() from None
    # Few brackets cannot nest deeply, and spare the walk.
    if text.count("[") + text.count("{") > _DEEPEST:
        _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dictionary of an object. JSON would keep the last of several equal keys."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {repeated!r} twice.")
    return fields


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:20]} is beyond float64.")
    return number


def _check_depth(value: Any) -> None:
    # Level by level, because recursion could exceed Python's limit.
    level = [value]
    for _ in range(_DEEPEST + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"values are nested more than {_DEEPEST} deep.")
