"""A model's whole life: python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir
workdir/lifecycle.

It exits with 1 if a stage failed, and with 130 after Ctrl-C.
"""

import sys
from typing import Any

from .. import frame
from . import run, show_plan


def experiment(
    config: Any, workdir: str, *, dry_run: bool = False, target: str = "", **choice: Any
) -> None:
    """Runs the stages that are not done yet."""
    if dry_run:
        return show_plan(config, workdir, target, **choice)
    if any(state["status"] != "done" for state in run(config, workdir, **choice).values()):
        sys.exit(1)


if __name__ == "__main__":
    frame.main(experiment, trains=True, pays=True)
