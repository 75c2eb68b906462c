"""Split Adaptation: python -m launch.split --config configs/split/digits.py --workdir workdir/split_digits."""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs the experiment."""
    from jaxdp.split import experiment

    experiment.run(config, workdir)


if __name__ == "__main__":
    frame.main(experiment)
