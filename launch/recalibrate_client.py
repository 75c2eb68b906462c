"""A hospital of private recalibration, started before or after the calibrator
(`launch.recalibrate_server`).

configs/recalibration/hospitals.py has the commands. The records stay here. --ledger pays before the
first answer.
"""

import pathlib
from typing import Any

from absl import flags

from . import frame, links, plans

_LEDGER = flags.DEFINE_string(
    "ledger", None, "Ledger of the hospital, by default ledger.sqlite in the workdir."
)


def experiment(config: Any, workdir: str, *, dry_run: bool = False) -> None:
    """Runs the hospital."""
    from . import hospitals

    if dry_run:
        charges = hospitals.charges(config, ledger_path=_LEDGER.value)
        return plans.show(charges, None if workdir is None else pathlib.Path(workdir))
    hospitals.run_client(config, workdir, links.serve(), ledger_path=_LEDGER.value)


if __name__ == "__main__":
    frame.main(experiment)
