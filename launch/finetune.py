"""Private fine-tuning: python -m launch.finetune --config configs/digits_dpsgd.py --workdir workdir/digits.

A config with `grids`, such as configs/dpadapter_table1.py, is a whole table of them, upstream models included.
"""

from typing import Any

from launch import frame


def experiment(config: Any, workdir: str) -> None:
    """Runs the experiment, or the table of them."""
    from jaxdp import finetune, pretrain
    from jaxdp.finetune import table

    if "grids" in config:
        table.run(config, workdir, pretrain=pretrain.run)
    else:
        finetune.run(config, workdir)


if __name__ == "__main__":
    frame.main(experiment)
