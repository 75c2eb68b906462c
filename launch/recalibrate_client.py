"""A hospital of private recalibration, started before or after the calibrator
(`launch.recalibrate_server`).

configs/recalibration/hospitals.py has the commands. The records stay here. --ledger pays before the
first answer.
"""

import pathlib
from typing import Any

from . import frame, links, plans


def experiment(
    config: Any, workdir: str, *, dry_run: bool = False, choice: frame.Choice = frame.DEFAULT
) -> None:
    """Runs the hospital."""
    from . import hospitals, report

    if dry_run:
        charges = hospitals.charges(config, workdir, choice=choice)
        return plans.show(charges, None if workdir is None else pathlib.Path(workdir))
    hospitals.run_client(config, workdir, links.serve(), choice=choice)
    print(report.write(workdir))


if __name__ == "__main__":
    frame.main(experiment, pays=True)
