"""Writes the report of a run, from its workdir alone: python -m launch.report WORKDIR.

The workdir is of a lifecycle or of one launcher. Every launcher writes its report at its end.
"""

from collections.abc import Sequence

from . import frame
from .run_report import write

__all__ = ["main", "write"]


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/report.html."""
    if len(argv) != 2:
        raise ValueError("give the workdir of one run: python -m launch.report WORKDIR.")
    print(write(argv[1]))


if __name__ == "__main__":
    frame.start(main)
