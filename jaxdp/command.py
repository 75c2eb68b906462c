"""The console script `jaxdp`, and `python -m jaxdp.command`: `launch.command` is the command.

A script has one address in the metadata of a package. The launchers have two: `jaxdp.launch` in a
wheel and `launch` in a checkout (docs/design/architecture.md says why). So the script begins here.
"""

import importlib
import importlib.util
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with arguments, by default those of the process."""
    is_wheel = importlib.util.find_spec("jaxdp.launch") is not None
    command = importlib.import_module("jaxdp.launch.command" if is_wheel else "launch.command")
    command.main(arguments)


if __name__ == "__main__":
    main()
