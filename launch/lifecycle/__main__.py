"""python -m launch.lifecycle. It exits with 1 if a stage failed, and with 130 after Ctrl-C."""

import sys
from typing import Any

from .. import frame
from . import run


def experiment(config: Any, workdir: str) -> None:
    """Runs the stages that are not done yet."""
    if any(state["status"] != "done" for state in run(config, workdir).values()):
        sys.exit(1)


if __name__ == "__main__":
    frame.main(experiment)
