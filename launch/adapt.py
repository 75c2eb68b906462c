"""Test-time adaptation: python -m launch.adapt --config configs/tta/digits.py --workdir workdir/tta_digits."""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs the experiment."""
    from jaxdp.tta import experiment

    experiment.run(config, workdir)


if __name__ == "__main__":
    frame.main(experiment)
