"""The configs that come with jaxdp: their names, their launchers, and their fields with
defaults.
"""

import ast
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import studies

_FLAGS = ("--config", "-config")
FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"


class Known(NamedTuple):
    """A config.

    Attributes:
      name: Its path below the folder of configs, without ".py".
      launchers: The launchers that run it.
      about: The first line of its docstring.
    """

    name: str
    launchers: tuple[str, ...]
    about: str


def known(launcher: str | None = None) -> list[Known]:
    """Returns the configs of a launcher, or of all, by name."""
    importable()
    configs = []
    for path in sorted(FOLDER.rglob("*.py")):
        name = path.relative_to(FOLDER).with_suffix("").as_posix()
        module = runpy.run_path(str(path))
        if "get_config" not in module:  # what several configs share
            continue
        own = launchers(module["get_config"]())
        if own and launcher in (None, *own):
            configs.append(Known(name, own, _first_line(path)))
    return configs


def find(config: str) -> str:
    """Returns the path of a config, with its variant, for a path or for a name of `known`, such as
    "digits_dpsgd".

    Raises:
      FileNotFoundError: There is neither. The message has the names that there are.
    """
    path, colon, variant = config.partition(":")
    if pathlib.Path(path).is_file():
        return config
    named = FOLDER / f"{path.removeprefix('configs/').removesuffix('.py')}.py"
    if not named.is_file():
        names = ", ".join(one.name for one in known())
        raise FileNotFoundError(f"--config={config} is neither a file nor one of {names}.")
    return f"{named}{colon}{variant}"


def launcher(config: str) -> str:
    """Returns the launcher of a config, which its parts tell.

    Raises:
      FileNotFoundError: As in `find`.
      ValueError: No study needs the parts of the config.
    """
    importable()
    own = launchers(load(config))
    if not own:
        raise ValueError(
            f"--config={config} has the parts of no study, so its launcher is not known. Compare "
            "it with a config of `jaxdp configs list`, or run the launcher with --dry_run."
        )
    return own[0]


def load(config: str) -> Any:
    """Returns the `ConfigDict` of a config, by path or name, with its variant.

    Raises:
      ValueError: The config does not have the variant.
    """
    path, colon, variant = find(config).partition(":")
    arguments = [variant] if colon else []
    get_config = runpy.run_path(path)["get_config"]
    try:
        return get_config(*arguments)
    except ValueError as error:
        raise ValueError(f"--config={config}: {error}") from error


def given(arguments: Sequence[str]) -> str | None:
    """Returns the config that command-line arguments name. Of several, the last one counts."""
    config = None
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in _FLAGS:
            config = value if equals else next(iter(arguments[place + 1 :]), None)
    return config


def resolve(arguments: Sequence[str]) -> list[str]:
    """Returns command-line arguments in which the config is a path."""
    config = given(arguments)
    if config is None:
        return list(arguments)
    path = find(config)
    resolved = []
    before = ""
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if before in _FLAGS and argument == config:  # another argument may be the same word
            argument = path
        elif flag in _FLAGS and value == config:
            argument = f"{flag}={path}"
        resolved.append(argument)
        before = argument
    return resolved


def importable() -> None:
    """Makes the configs importable as `configs`, since they import each other by this name, also
    from a wheel.
    """
    if __package__ != "launch":
        from jaxdp import configs

        sys.modules.setdefault("configs", configs)


def launchers(config: Any) -> tuple[str, ...]:
    """Returns the launchers of a config, which its parts tell. None of them for unknown parts."""
    names = (study.launcher for study in studies.recognised(config))
    return tuple(dict.fromkeys(names))


def _first_line(path: pathlib.Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]
