"""Public pre-training: python -m launch.pretrain --config configs/pretrain/digits.py --workdir workdir/pretrain."""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs the experiment."""
    from jaxdp.pretrain import experiment

    experiment.run(config, workdir)


if __name__ == "__main__":
    frame.main(experiment)
