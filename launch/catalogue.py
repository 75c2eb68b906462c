"""The configs that come with jaxdp: their names, their launchers, and their fields with
defaults.
"""

import ast
import pathlib
import re
import runpy
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"


class Known(NamedTuple):
    """A config.

    Attributes:
      name: Its path below the folder of configs, without ".py".
      launchers: The launchers in the commands of its docstring.
      about: The first line of its docstring.
    """

    name: str
    launchers: tuple[str, ...]
    about: str


def known(launcher: str | None = None) -> list[Known]:
    """Returns the configs of a launcher, or of all, by name."""
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        doc = _doc(path)
        if (names := _launchers(doc)) and launcher in (None, *names):
            found.append(
                Known(
                    path.relative_to(FOLDER).with_suffix("").as_posix(), names, doc.splitlines()[0]
                )
            )
    return found


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
        names = ", ".join(found.name for found in known())
        raise FileNotFoundError(f"--config={config} is neither a file nor one of {names}.")
    return f"{named}{colon}{variant}"


def launcher(config: str) -> str:
    """Returns the launcher of a config, from the command in its docstring.

    Raises:
      FileNotFoundError: As in `find`.
      ValueError: The docstring has no command.
    """
    names = _launchers(_doc(pathlib.Path(find(config).partition(":")[0])))
    if not names:
        raise ValueError(
            f"--config={config} does not say its launcher. Put the command into its docstring, for "
            "example 'python -m launch.finetune --config my.py --workdir run', or run the "
            "launcher with --dry_run."
        )
    return names[0]


def load(config: str) -> Any:
    """Returns the `ConfigDict` of a config, by path or name, with its variant."""
    path, colon, variant = find(config).partition(":")
    return runpy.run_path(path)["get_config"](*([variant] if colon else []))


def given(arguments: Sequence[str]) -> str | None:
    """Returns the config that command-line arguments name."""
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config", "-config"):
            return value if equals else next(iter(arguments[place + 1 :]), None)
    return None


def resolve(arguments: Sequence[str]) -> list[str]:
    """Returns command-line arguments in which the config is a path."""
    config = given(arguments)
    if config is None:
        return list(arguments)
    path = find(config)
    return [
        path if one == config else one.replace(f"config={config}", f"config={path}")
        for one in arguments
    ]


def importable() -> None:
    """Makes the configs importable as `configs`, since they import each other by this name, also
    from a wheel.
    """
    if __package__ != "launch":
        from jaxdp import configs

        sys.modules.setdefault("configs", configs)


def _doc(path: pathlib.Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _launchers(doc: str) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(re.findall(r"(?:-m (?:jaxdp\.)?launch\.|jaxdp )(\w+) --config", doc))
    )
