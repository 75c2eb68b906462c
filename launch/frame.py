"""What the launchers of experiments share: the flags --config and --workdir, and quiet logs."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags


def main(experiment: Callable[[Any, str], Any]) -> None:
    """Runs `experiment(config, workdir)` with what the command line says, as a program; exits with 130 after Ctrl-C."""
    config = config_flags.DEFINE_config_file(
        "config", help_string="The experiment; override fields with --config.x.y=..."
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "Directory of the run; an interrupted run in it is resumed.", required=True
    )
    flags.mark_flag_as_required("config")
    for name in ("config", "workdir"):  # --help lists the flags of the program itself
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    try:
        app.run(functools.partial(_run, experiment, config, workdir))
    except KeyboardInterrupt as error:
        print(f"\n{error}" if str(error) else "\nInterrupted. The same command goes on from here.", file=sys.stderr)
        sys.exit(130)


def limits(given: Sequence[str]) -> Any:
    """The `jaxdp.files.Limits` of NAME=NUMBER pairs, as a flag has them."""
    from jaxdp.files import Limits

    try:
        return Limits(**{name: int(number) for name, _, number in (pair.partition("=") for pair in given)})
    except (TypeError, ValueError) as error:
        raise app.UsageError(f"--limits must be NAME=NUMBER pairs, for example bytes=17179869184: {error}") from error


def _run(experiment: Callable[[Any, str], Any], config: Any, workdir: Any, argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; config fields are set with --config.x.y=value")
    logging.set_verbosity(logging.WARNING)  # Orbax reports every checkpoint in a dozen lines
    experiment(config.value, workdir.value)
