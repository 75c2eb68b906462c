"""Public pre-training: python -m launch.pretrain --config configs/pretrain/digits.py --workdir workdir/pretrain."""

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
    from jaxdp.pretrain import experiment

    logging.set_verbosity(logging.WARNING)  # Orbax reports every checkpoint in a dozen lines
    experiment.run(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
