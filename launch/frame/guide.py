"""Which launcher runs here, and its help."""

import sys
from collections.abc import Sequence
from typing import Any

from .. import catalogue, studies, usage

_PACKAGE = (__package__ or "").rpartition(".")[0]  # launch, or jaxdp.launch in a wheel


def launcher() -> str:
    """Returns the name of the running program, as `studies.Listed` has it. "" if it has none.

    launch.lifecycle.__main__ gives "lifecycle", and my.study gives "my.study".
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return ""
    name: str = spec.name.removesuffix(".__main__")
    return name.removeprefix(f"{_PACKAGE}.")


def check_launcher(config: Any) -> None:
    """Raises ValueError for a config of another launcher. Its parts tell whose it is, so that a
    user's own config is recognised too.
    """
    mine = launcher()
    own = [study for study in studies.STUDIES if study.launcher == mine]
    owners = [study.launcher for study in studies.recognised(config)]
    if not own or mine in owners:
        return
    if owners:
        name = catalogue.given(sys.argv)
        raise ValueError(
            f"this is a config of {_title(owners[0])}, not of {_title(mine)}. Run: "
            f"{_command(owners[0])} --config {name} --workdir ..."
        )
    missing = ", ".join(part for part in own[0].needs if part not in config)
    raise ValueError(
        f"config.{missing} is missing, so this is no config of {_title(mine)}. --help lists its "
        "configs."
    )


def _title(name: str) -> str:
    return name if "." in name else f"launch.{name}"


def _command(name: str) -> str:
    if _PACKAGE == "launch" or "." in name:
        return f"python -m {_title(name)}"
    return f"jaxdp {name}"  # who has the wheel has this command


def text(arguments: Sequence[str]) -> str:
    """Returns the help of the running launcher."""
    return usage.text(sys.modules["__main__"].__doc__ or "", launcher(), arguments)
