"""Which launcher runs here, and its help."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from .. import catalogue, studies
from ..study import Program
from .workdir import flat

_PACKAGE = (__package__ or "").rpartition(".")[0]  # launch, or jaxdp.launch in a wheel


def launcher() -> str:
    """Returns the name of the running program, as `Program.module` has it. "" if it has none.

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
    own: list[Program] = [
        study for study in studies.known() if study.module == mine and study.needs
    ]
    owners = [study.module for study in studies.recognised(config)]
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
    """Returns the help of the running launcher: its flags, its configs, and the fields of one of
    them with their defaults.
    """
    about = sys.modules["__main__"].__doc__ or ""
    sections = [about.strip(), flags.FLAGS.main_module_help().strip()]
    configs = catalogue.known(launcher())
    name = catalogue.given(arguments)
    if configs:
        width = max(len(config.name) for config in configs)
        lines = [f"  {config.name:{width}}  {config.about}" for config in configs]
        sections.append("\n".join(["Configs:", *lines]))
        # Digits are bundled, so a newcomer can run such a config.
        name = name or min(configs, key=lambda config: "digits" not in config.name).name
    if name:
        defaults = flat(json.loads(catalogue.load(name).to_json()))
        lines = [f"  --config.{field}={value!r}" for field, value in defaults.items()]
        sections.append("\n".join([f"Fields of {name}:", *lines]))
    return "\n\n".join(sections)
