"""Recalibration: python -m launch.recalibrate --config configs/recalibration/digits.py --workdir workdir/recal."""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs the experiment."""
    from jaxdp.recalibration import experiment

    experiment.run(config, workdir)


if __name__ == "__main__":
    frame.main(experiment)
