"""Keyword arguments of a `TypedDict` that `help` and `inspect.signature` show by name."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Required, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")


def shows_keywords(
    keywords: type, defaults: Mapping[str, Any]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a function that takes `**options: Unpack[keywords]`.

    The signature of the decorated function has each option by name. An unknown one is refused
    before the function is called.

    Args:
      keywords: The `TypedDict` of the options.
      defaults: The default of each option, such as `vars` of the dataclass that has the options as
        fields. An option that it lacks is required.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        shown = []
        for parameter in signature.parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                shown.append(parameter)
        for name, annotation in keywords.__annotations__.items():
            origin: Any = get_origin(annotation)
            if origin is Required:
                [annotation] = get_args(annotation)
            option = inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, inspect.Parameter.empty),
                annotation=annotation,
            )
            shown.append(option)
        names = [parameter.name for parameter in shown]

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name in options:
                if name not in names:
                    raise TypeError(_unknown(function.__name__, name, names))
            return function(*args, **options)

        checked.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return checked

    return decorate


def _unknown(function: str, name: str, names: list[str]) -> str:
    """Returns the error for an argument that a function does not have."""
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"Did you mean {near[0]}=?" if near else f"It has {', '.join(names)}."
    return f"{function} has no argument {name!r}. {remedy}"
