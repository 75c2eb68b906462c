"""The flags of all launchers."""

import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from jaxdp import compilers

from ..config_dict import config_flags
from ..study import Study
from . import guide, ledgers, running
from .program import start

_DEVICES = (
    "The devices that share each batch: one, local (all of this process), cluster (all of the "
    "processes that SLURM, Open MPI, Kubernetes or a TPU pod has started), or HOST:PORT,I,N (all "
    "of N processes, of which this is number I and number 0 listens at HOST:PORT)."
)
_LEDGER = (
    "The ledger that counts what is released about the private records. All runs about the same "
    "records share one. The default is that of the workdir, then that of JAXDP_LEDGER, then the "
    "one that counts these records already, then a new one outside of the workdir. Records that "
    "everybody has are counted in the workdir."
)
_NEW_LEDGER = (
    f"Count records anew that another ledger counts already. {ledgers.NEW.partition('. ')[2]}"
)
_TARGET = (
    "With --dry_run: a TPU or GPU that need not be there. The private steps are compiled for it, "
    "and the compiler's estimates of memory and time are shown. One of "
    f"{', '.join(compilers.TARGETS)}."
)


def main(
    experiment: Callable[..., Any] | Study,
    *,
    divides: bool = False,
    trains: bool = False,
    pays: bool = False,
) -> None:
    """Runs a study, or `experiment(config, workdir, dry_run=)`, with the flags of the command line.
    See `start`.

    An experiment that `divides` its work among devices also takes `mesh=`, the mesh of --devices or
    None. One that `trains` takes `target=`, the name of --target or "". One that `pays` takes
    `choice=`, what the user says about its ledger. A study does both.
    """
    if isinstance(experiment, Study):
        run: Callable[..., Any] = functools.partial(running.run, experiment)
        trains = pays = True
    else:
        run = experiment
    config = config_flags.DEFINE_config_file(
        "config",
        help_string="The experiment: a file, or a name of `jaxdp configs list`. Its fields are "
        "flags.",
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "Directory of the run. An interrupted run in it is resumed."
    )
    dry_run = flags.DEFINE_bool(
        "dry_run", False, "Only say what the run would cost and take. Nothing is written."
    )
    ledger = flags.DEFINE_string("ledger", None, _LEDGER)
    new_ledger = flags.DEFINE_bool("new_ledger", False, _NEW_LEDGER)
    devices = flags.DEFINE_string("devices", "one", _DEVICES)
    target = flags.DEFINE_string("target", "", _TARGET)
    for flag in (config, workdir, dry_run, ledger, new_ledger, devices, target):
        # --help lists the flags of the program itself, and these are defined in another module.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])

    def program(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise ValueError(
                f"unexpected arguments {argv[1:]}. Set config fields with --config.x.y=value."
            )
        if config.value is None:
            raise ValueError("--config must be given. --help lists the configs.")
        if workdir.value is None and not dry_run.value:
            raise ValueError(
                "--workdir must be given: the directory of the run. Or give --dry_run."
            )
        guide.check_launcher(config.value)
        if devices.value != "one" and not divides:
            raise ValueError(
                f"--devices must be one, got {devices.value!r}. Only launch.finetune divides its "
                "work."
            )
        choice = ledgers.Choice(
            None if ledger.value is None else pathlib.Path(ledger.value), new_ledger.value
        )
        options: dict[str, Any] = {}
        if choice != ledgers.DEFAULT:
            if not pays:
                raise ValueError(
                    "--ledger and --new_ledger are not for this launcher, which reads "
                    "no private records. Leave them out."
                )
            options["choice"] = choice
        if divides:
            options["mesh"] = None if dry_run.value else _mesh(devices.value)
        if target.value:
            _check_target(target.value, dry_run=dry_run.value, trains=trains)
            options["target"] = target.value
        run(config.value, workdir.value, dry_run=dry_run.value, **options)

    start(program)


def _check_target(target: str, *, dry_run: bool, trains: bool) -> None:
    """Raises ValueError where --target says nothing. This process then computes on its CPU."""
    import jax

    compilers.require(target)
    if not dry_run:
        raise ValueError(
            f"--target={target} only plans. Give --dry_run too, or leave --target out."
        )
    if not trains:
        raise ValueError(
            "--target compiles the private steps of a training, and this launcher has none. Leave "
            "it out."
        )
    # With the compiler of a TPU, JAX would look for a TPU.
    jax.config.update("jax_platforms", "cpu")


def _mesh(devices: str) -> Any:
    """Returns the mesh of --devices, or None for one device. Joins the other processes if there are
    some.
    """
    if devices == "one":
        return None
    import jax

    joined = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", devices)
    if joined:
        address, number, count = joined.groups()
        jax.distributed.initialize(address, int(count), int(number))
    elif devices == "cluster":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                "--devices=cluster finds no SLURM, Open MPI, Kubernetes or TPU pod. Give "
                "--devices=HOST:PORT,I,N."
            ) from error
    elif devices != "local":
        raise ValueError(
            f"--devices must be one, local, cluster or HOST:PORT,I,N, got {devices!r}."
        )
    if jax.process_index():
        os.environ.setdefault("JAXDP_PROGRESS", "0")  # Process 0 shows the bars.
    return jax.make_mesh((jax.device_count(),), ("data",))
