"""Private fine-tuning: python -m launch.finetune --config configs/digits_dpsgd.py --workdir workdir/digits.

A config with `grids`, such as configs/dpadapter_table1.py, is a whole table of them, upstream models included.
"""

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", help_string="The experiment; override fields with --config.x.y=...")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run; an interrupted run in it is resumed.", required=True
)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; config fields are set with --config.x.y=value")
    from jaxdp import finetune
    from jaxdp.finetune import table
    from jaxdp.pretrain import experiment

    logging.set_verbosity(logging.WARNING)  # Orbax reports every checkpoint in a dozen lines

    if "grids" in _CONFIG.value:
        table.run(_CONFIG.value, _WORKDIR.value, pretrain=experiment.run)
    else:
        finetune.run(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
