"""Writes the report of a run, from its workdir alone: python -m launch.report WORKDIR.

The workdir is of a lifecycle, of one launcher, or of `jaxdp.finetune.fit`. A ledger's file is
reported too. Every launcher writes its report at its end.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxdp.report import runs

from . import frame, run_report

__all__ = ["main", "write"]


def write(workdir: str | os.PathLike[str], **options: Any) -> pathlib.Path:
    """Writes the report of a launcher's run, of a run of `fit`, or of a ledger.

    Args:
      workdir: The workdir, or the ledger's file.
      **options: As `jaxdp.report.write` or `launch.run_report.write` takes them.
    """
    root = pathlib.Path(workdir)
    if root.is_file() or (root / runs.FILE).exists():
        return runs.write(root, **options)
    return run_report.write(root, **options)


def main(argv: Sequence[str]) -> None:
    """Writes WORKDIR/report.html."""
    if len(argv) != 2:
        raise ValueError("give the workdir of one run: python -m launch.report WORKDIR.")
    print(write(argv[1]))


if __name__ == "__main__":
    frame.start(main)
