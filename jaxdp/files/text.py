"""Texts of other writers: JSON is read strictly, and messages show no character that a terminal
would obey.
"""

import json
import math
import os
from typing import Any

_DEEPEST = 100


def shown(value: object) -> str:
    """Returns a value as text for a message, with its unprintable characters escaped.

    A name, a path or a message of another writer may hold control characters, such as the colours
    of a terminal.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shown_lines(value: object) -> str:
    """Returns `shown` of each line of a value."""
    return "\n".join(map(shown, str(value).split("\n")))


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
    constant, number = (_refused, _finite) if finite else (None, None)
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=constant, parse_float=number
        )
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > _DEEPEST:
        _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {repeated!r} twice.")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:20]} is beyond float64.")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        inner = [part for part in level if isinstance(part, dict | list)]
        if not inner:
            return
        level = []
        for part in inner:
            level += part.values() if isinstance(part, dict) else part
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"values are nested more than {_DEEPEST} deep.")
