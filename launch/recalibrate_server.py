"""The calibrator of private recalibration, started before or after the hospitals
(`launch.recalibrate_client`).

configs/recalibration/hospitals.py has the commands. The calibrator sees noisy sums only.
"""

from typing import Any

from . import frame, links, plans


def experiment(config: Any, workdir: str, *, dry_run: bool = False) -> None:
    """Runs the calibrator. It has no private data and charges nothing."""
    from . import hospitals

    if dry_run:
        return plans.show([], None)
    with links.parties() as found:
        hospitals.run_server(config, workdir, found, timeout=links.TIMEOUT.value)


if __name__ == "__main__":
    frame.main(experiment)
