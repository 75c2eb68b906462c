"""Checks of public arguments, whose errors name the argument and its value."""

import numbers
import os
import pathlib
from typing import Any, get_args

from jaxdp.files.text import shown


def check_numbers(**values: Any) -> None:
    """Raises TypeError unless every value is one real number. Text, booleans and None are none."""
    for name, value in values.items():
        is_number = hasattr(value, "__float__") and not isinstance(value, bool)
        shape: Any = getattr(value, "shape", ())
        if shape or not is_number:
            raise TypeError(f"{name} must be a number, got {value!r}.")


def check_delta(value: float, *, name: str = "delta") -> None:
    """Raises TypeError or ValueError unless a value is a number in [0, 1)."""
    check_numbers(**{name: value})
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}.")


def check_count(name: str, value: int, minimum: int) -> None:
    """Raises TypeError for what is no int, ValueError for an int below the minimum."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}.")


def check_function(name: str, value: Any, call: str) -> None:
    """Raises TypeError unless the value can be called. `call` shows how, for the error."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, {call}, got {type(value).__name__} {value!r}.")


def check_choice(name: str, value: Any, choices: Any, alternative: str = "") -> None:
    """Raises ValueError unless the value is one of several choices.

    Args:
      name: The argument.
      value: Its value.
      choices: A `Literal`, or a sequence.
      alternative: What else is allowed, for the error.
    """
    *others, last = get_args(choices) or choices
    if value not in (*others, last):
        listed = ", ".join(map(repr, others))
        raise ValueError(f"{name} must be {listed} or {last!r}{alternative}, got {value!r}.")


def check_folder(name: str, path: str | os.PathLike[str]) -> None:
    """Raises ValueError if the folder of a file that is to be written does not exist."""
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"{name} must be in a folder that exists, got {shown(path)}. Create the folder first."
        )
