"""Private prediction: python -m launch.predict --config configs/predict/digits.py --workdir workdir/predict_digits."""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs the experiment."""
    from jaxdp.prediction import experiment

    experiment.run(config, workdir)


if __name__ == "__main__":
    frame.main(experiment)
