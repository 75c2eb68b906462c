"""The flags of all launchers."""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp import compilers

from .. import usage
from ..settings import check_values
from ..study import Study
from . import guide, ledgers, running
from .program import start


def main(
    experiment: Callable[..., Any] | Study,
    *,
    divides: bool = False,
    trains: bool = False,
    pays: bool = False,
    has_cells: bool = False,
    tunes: Callable[[Any, str], Any] | None = None,
) -> None:
    """Runs a study, or `experiment(config, workdir, dry_run=)`, with the flags of the command line.
    See `start`.

    An experiment that `divides` its work among devices also takes `mesh=`, the mesh of --devices or
    None. One that `trains` takes `target=`, the name of --target or "". One that `pays` takes
    `choice=`, what the user says about its ledger. One that `has_cells` takes `stale=`, what to do
    with cells of edited code. A study does all three. `tunes(config, text)` returns the config of a
    search, for the text of --tune.
    """
    if isinstance(experiment, Study):
        run: Callable[..., Any] = functools.partial(running.run, experiment)
        trains = pays = has_cells = True
    else:
        run = experiment
    command = usage.define()

    def program(argv: Sequence[str]) -> None:
        _check_flags(command, argv, divides=divides)
        config = command.config.value
        if command.tune.value:
            if tunes is None:
                raise ValueError(
                    "--tune is for launch.finetune and launch.lm, where each training pays. Leave "
                    "it out."
                )
            config = tunes(config, command.tune.value)
        ledger = command.ledger.value
        choice = ledgers.Choice(
            None if ledger is None else pathlib.Path(ledger), command.new_ledger.value
        )
        options: dict[str, Any] = {}
        if choice != ledgers.DEFAULT:
            if not pays:
                raise ValueError(
                    "--ledger and --new_ledger are not for this launcher, which reads "
                    "no private records. Leave them out."
                )
            options["choice"] = choice
        if command.stale.value:
            if not has_cells:
                raise ValueError("--stale is for studies with cells. Leave it out.")
            options["stale"] = command.stale.value
        if divides:
            options["mesh"] = None if command.dry_run.value else _mesh(command.devices.value)
        if command.target.value:
            _check_target(command.target.value, dry_run=command.dry_run.value, trains=trains)
            options["target"] = command.target.value
        run(config, command.workdir.value, dry_run=command.dry_run.value, **options)

    start(program)


def _check_flags(command: Any, argv: Sequence[str], *, divides: bool) -> None:
    """Refuses flags of which nothing could be run."""
    if len(argv) > 1:
        raise ValueError(
            f"unexpected arguments {argv[1:]}. Set config fields with --config.x.y=value."
        )
    if command.config.value is None:
        raise ValueError("--config must be given. --help lists the configs.")
    if command.workdir.value is None and not command.dry_run.value:
        raise ValueError("--workdir must be given: the directory of the run. Or give --dry_run.")
    _check_paths(command)
    guide.check_launcher(command.config.value)
    if command.devices.value != "one" and not divides:
        raise ValueError(
            f"--devices must be one, got {command.devices.value!r}. Only launch.finetune "
            "divides its work."
        )
    # The study checks its own part of the config again, where it is called without flags.
    check_values(command.config.value)


def _check_paths(command: Any) -> None:
    """Refuses a path that no file or folder can have. An empty one would be this folder."""
    for flag in (command.workdir, command.ledger):
        if flag.value == "":
            raise ValueError(f"--{flag.name} must be a path, got ''. Leave it out, or give one.")
    workdir, ledger = command.workdir.value, command.ledger.value
    if workdir is not None and os.path.exists(workdir) and not os.path.isdir(workdir):
        raise NotADirectoryError(f"--workdir must be a folder, got the file {workdir!r}.")
    if ledger is not None and os.path.isdir(ledger):
        raise IsADirectoryError(f"--ledger must be a file, got the folder {ledger!r}.")


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
        if int(number) >= int(count):
            raise ValueError(
                f"--devices=HOST:PORT,I,N must have I in 0..N-1, got I={number} and N={count}."
            )
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
