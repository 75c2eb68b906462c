"""The frame of all studies: a config is bound to a workdir, each cell is computed once, results are
written.

A `Study` defines its cells, how one is run, and its tables and figures. `run` does the rest:

    config.json            the study and its config; another config in the same workdir is refused
    cells/<a>/<b>/row.json the row of the finished cell (a, b)
    cells/<a>/<b>/...      files of the cell's run; `scratch` in it is deleted once the row is written
    rows.jsonl             all rows, one per line
    tables.md, tables.tex  the tables
    result.json            the result of the finished study

Several processes may run one study in one workdir. Each takes cells that no other process holds. A
process that dies loses its current cell. The same command then continues, and does not pay again
for a paid release.

With `--devices` the processes of `jax.distributed` compute each cell together
(`jaxdp.release.Hosts`). Process 0 alone writes the files above.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from jaxdp import compilers, memory
from jaxdp.files import (
    read_json,
    read_npz,
    shown,
    shown_lines,
    understood,
    write_durably,
    write_json,
)
from jaxdp.privacy import Account, BudgetExceeded, Ledger, LedgerDamaged
from jaxdp.release import HostFailed, Hosts, digest, locked
from jaxdp.release.identity import processor
from jaxdp.report import Callback, TensorBoardWriter, WandbWriter, check_figures, progress_bar
from jaxdp.version import __version__

from . import catalogue, plans, report, results
from .settings import check_numbers

Row = Mapping[str, Any]
LARGEST_CACHE = 2**31  # bytes of compiled programs that later runs find
_FORMAT = 3  # of workdirs, which had no number in the first releases
_WRITERS: Mapping[str, Callable[[pathlib.Path], Any]] = {
    "tensorboard": lambda folder: TensorBoardWriter(folder / "tensorboard"),
    "wandb": lambda folder: WandbWriter(dir=folder),
}
_REMEDY = "Restore it from a copy, or use a new workdir."
_AGAIN = "Delete it. The command then makes it again from the other files of the workdir, which costs nothing twice."
# The parts of a config by which a launcher is recognised: it is the first one whose parts are all
# there.
_PARTS = {
    "lifecycle": ("budgets",),
    "adapt": ("protocol",),
    "predict": ("prediction",),
    "recalibrate": ("sweep",),
    "recalibrate_server": ("method", "server", "client"),
    "recalibrate_client": ("method", "server", "client"),
    "split": ("ablation",),  # before the parties, whose parts it has too
    "split_server": ("server", "client"),
    "split_client": ("server", "client"),
    "pretrain": ("ascent",),
    "lm": ("generation",),  # before "finetune", whose part it has too
    "finetune": ("private",),
}
_DEVICES = (
    "The devices that share each batch: one, local (all of this process), cluster (all of the "
    "processes that SLURM, Open MPI, Kubernetes or a TPU pod has started), or HOST:PORT,I,N (all "
    "of N processes, of which this is number I and number 0 listens at HOST:PORT)."
)
_TARGET = (
    "With --dry_run: a TPU or GPU that need not be there. The private steps are compiled for it, "
    "and the compiler's estimates of memory and time are shown. One of "
    f"{', '.join(compilers.TARGETS)}."
)
# A user can correct these. The program prints the message without a traceback.
MISTAKES = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
    BudgetExceeded,
    LedgerDamaged,
    HostFailed,
    compilers.NotCompiled,
)


def _nothing(*_: Any) -> Any:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment as data.

    Attributes:
      name: The name of the launcher.
      open: `open(config, root)` reads data and models and refuses a config that cannot work. It
          writes nothing.
      cells: `cells(config)` yields named tuples, in the order in which they are run.
      run: `run(cell, work) -> row`, a JSON-able dict.
      result: `result(rows, work)`, the content of result.json.
      summary: `summary(result)`, the text for the terminal.
      tables: `tables(result, work)`, rows by title. A str among them is a paragraph.
      figures: `figures(result, work)` draws into `work.root`.
      benchmark: Which data the results read without payment to a ledger, and what to use for
        private data instead. A study with this text needs config.public_benchmark.
      grows: `grows(config)` returns the part of the config that determines cells. With it, a
        finished study takes more cells.
      plan: `plan(config, opened)` returns what a dry run tells. `opened()` is what `open` returns.
    """

    name: str
    open: Callable[[Any, pathlib.Path], Any]
    cells: Callable[[Any], Iterable[Any]]
    run: Callable[[Any, "Work"], Row]
    result: Callable[[Sequence[Row], "Work"], Any]
    summary: Callable[[Any], str]
    tables: Callable[[Any, "Work"], Mapping[str, Any]] = _nothing
    figures: Callable[[Any, "Work"], None] = _nothing
    benchmark: str = ""
    grows: Callable[[Any], Any] | None = None
    plan: Callable[[Any, Callable[[], Any]], Iterable[plans.Item]] = lambda config, opened: ()


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a study in a workdir.

    Attributes:
      study: The study.
      config: Its config.
      root: The workdir.
      shared: What `Study.open` returned.
      hosts: The processes that run the study together, by default this one alone.
    """

    study: Study
    config: Any
    root: pathlib.Path
    shared: Any
    hosts: Hosts = dataclasses.field(default_factory=Hosts)

    def folder(self, cell: Any) -> pathlib.Path:
        """Returns the folder of a cell."""
        return self.root.joinpath("cells", *map(file_name, cell))

    def row(self, cell: Any, *, wait: bool = True) -> dict[str, Any]:
        """Returns the row of a cell. Runs the cell first if it is not done.

        Raises:
          BlockingIOError: Another process runs the cell, and `wait` is False.
        """
        folder = self.folder(cell)
        path = folder / "row.json"
        with contextlib.ExitStack() as held:

            def begin() -> bool:
                if not path.exists():
                    held.enter_context(locked(folder.with_name(f"{folder.name}.lock"), wait=wait))
                return path.exists()

            def end() -> dict[str, Any]:
                shutil.rmtree(folder / "scratch", ignore_errors=True)
                return read_json(path, remedy="Delete it. The same command makes it again.")

            if not self.hosts.first(begin):
                row = cell._asdict() | self._run(cell, folder)
                self.hosts.first(lambda: write_json(path, row))
            return self.hosts.first(end)

    def _run(self, cell: Any, folder: pathlib.Path) -> Row:
        folder.mkdir(parents=True, exist_ok=True)
        memory.make_room_for_programs()
        try:
            return self.study.run(cell, self)
        except BudgetExceeded as error:
            error.add_note(
                f"If {folder} was interrupted and another machine or version cannot continue it, "
                "nothing of it was released. Then delete the folder and the ledger that only this "
                "cell uses, and run the cell again."
            )
            raise

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the content of the JSON file `name` in the workdir. One process makes the file if
        it is missing.
        """
        path = self._once(name, lambda path: write_json(path, make()))
        return read_json(path, kind=object)

    def arrays(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Returns the arrays of the .npz file `name` in the workdir, as `kept` does."""

        def write(path: pathlib.Path) -> None:
            arrays = make()
            write_durably(path, lambda file: np.savez(file, **arrays))

        return read_npz(self._once(name, write))

    def _once(self, name: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
        path = self.root / name
        if not path.exists():
            with locked(path.with_name(f"{path.name}.lock"), wait=True):
                if not path.exists():
                    write(path)
        return path


@contextlib.contextmanager
def watching(config: Any, folder: pathlib.Path) -> Iterator[list[Callback]]:
    """Yields the writers that config.watch names, as callbacks of `fit` for a run in a folder."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(_WRITERS[name](folder)) for name in _watch(config)]


def check_watch(config: Any) -> None:
    """Raises ValueError if config.watch names an unknown writer."""
    known("watch", _watch(config), _WRITERS)


def _watch(config: Any) -> list[str]:
    return list(filter(None, config.get("watch", "").split(",")))


def file_name(part: Any) -> str:
    """Returns a coordinate of a cell as the name of a file or folder."""
    text = f"{part:g}" if isinstance(part, float) else str(part)
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)


# --- A run --------------------------------------------------------------------------------------


def run(
    study: Study,
    config: Any,
    workdir: Any,
    *,
    dry_run: bool = False,
    target: str = "",
    hosts: Hosts | None = None,
) -> Any:
    """Runs the unfinished part of a study, prints its summary and returns its result.

    With `dry_run` it prints what the study would charge, take and need, and writes nothing. Then
    workdir may be None. With `target`, an accelerator of `jaxdp.compilers`, it says so for that.
    `hosts` are the processes that run it together, by default this one alone. Process 0 prints.

    Raises:
      ValueError: The config is inconsistent, the workdir belongs to another config, study or
        release, or the data is not declared a public benchmark. Nothing is written.
      FileNotFoundError: Data or a checkpoint is missing. The message says how to get it.
      BudgetExceeded: A ledger has no room for what a cell would spend.
    """
    if dry_run:
        return _dry_run(study, config, None if workdir is None else pathlib.Path(workdir), target)
    root, hosts = pathlib.Path(workdir), hosts or Hosts()
    if not hosts.leads:
        with contextlib.redirect_stdout(io.StringIO()):
            return compute(study, config, root, hosts)
    done = (root / "result.json").exists() and study.grows is None
    result = compute(study, config, root, hosts)
    if done:
        print(f"{root} holds a finished run. There is nothing to do.\n\n{study.summary(result)}")
        return result
    report.write(root)
    hidden = (".lock", ".head", ".sqlite-shm", ".sqlite-wal")
    names = sorted(path.name for path in root.iterdir() if path.suffix not in hidden)
    print(f"\n{study.summary(result)}\n\nIn {root}: {', '.join(names)}.")
    return result


def compute(study: Study, config: Any, root: pathlib.Path, hosts: Hosts | None = None) -> Any:
    """Returns the result of a study, as `run` does, without its summary."""
    hosts = hosts or Hosts()
    bound = hosts.together(lambda: _checked(study, config, root))
    hosts.agree(lambda: {"config": config.to_json()})
    finished = root / "result.json"

    def read() -> Any:
        if not finished.exists() or study.grows is not None:
            return None
        result = read_json(finished, remedy=_AGAIN, kind=object)
        with understood(finished, _AGAIN):
            study.summary(result)
        return result

    if (result := hosts.first(read)) is not None:
        return result
    if study.figures is not _nothing:
        hosts.together(check_figures)  # before anything is computed or paid
    cells = distinct(study.cells(config))
    work = Work(study, config, root, hosts.together(lambda: study.open(config, root)), hosts)
    with contextlib.ExitStack() as opened:
        hosts.first(lambda: opened.enter_context(bind(study.name, bound, root)))
        rows = _rows(work, cells)

        def conclude() -> Any:
            with locked(root / "summary.lock", wait=True):
                result = study.result(rows, work)
                write_durably(
                    root / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode()
                )
                results.write_tables(root, study.tables(result, work))
                study.figures(result, work)
                write_json(finished, result)
            return result

        return hosts.first(conclude)


def _checked(study: Study, config: Any, root: pathlib.Path | None) -> Any:
    """Returns the part of a config to which a workdir is bound. Raises ValueError for a mistake in
    it.
    """
    if study.benchmark and not config.public_benchmark:
        raise ValueError(f"config.public_benchmark must be True for this study. {study.benchmark}")
    bound = study.grows(config) if study.grows else config
    check_numbers(config)
    check_watch(config)
    if root is not None:
        check_same_config(study.name, bound, root)
    return bound


def _dry_run(study: Study, config: Any, root: pathlib.Path | None, target: str) -> None:
    _checked(study, config, root)
    distinct(study.cells(config))
    with tempfile.TemporaryDirectory() as nowhere:
        opened = functools.cache(lambda: study.open(config, pathlib.Path(nowhere)))
        plans.show(study.plan(config, opened), root, target)
    if study.benchmark:
        print(f"\n{study.benchmark}")


def distinct(cells: Iterable[Any]) -> list[Any]:
    """Returns the cells, each once.

    Raises:
      ValueError: Two different cells would have the same folder.
    """
    found = dict[tuple[str, ...], Any]()
    for cell in cells:
        first = found.setdefault(tuple(map(file_name, cell)), cell)
        if first != cell:
            raise ValueError(
                f"config has two cells with the same folder name: {tuple(first)} and "
                f"{tuple(cell)}. Rename one."
            )
    return list(found.values())


def _rows(work: Work, cells: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the rows of all cells. Cells of other processes come last, since they are probably
    done by then.
    """
    missing = [cell for cell in cells if not (work.folder(cell) / "row.json").exists()]
    if missing != cells and work.hosts.leads:
        print(
            f"{len(cells)} cells, {len(cells) - len(missing)} of them are done already.", flush=True
        )
    if work.hosts.count > 1:  # They go through the cells in one order.
        return [work.row(cell) for cell in cells]
    with progress_bar(
        total=len(missing), label=work.study.name, unit="cell", show=len(missing) > 1
    ) as bar:
        for wait in (False, True):
            for cell in missing:
                if not (work.folder(cell) / "row.json").exists():
                    with contextlib.suppress(BlockingIOError):
                        work.row(cell, wait=wait)
                bar.update(
                    sum((work.folder(cell) / "row.json").exists() for cell in missing) - bar.n
                )
    return [work.row(cell) for cell in cells]


# --- The workdir --------------------------------------------------------------------------------


def check_same_config(study: str, config: Any, root: pathlib.Path) -> None:
    """Refuses to mix two experiments in one workdir.

    Raises:
      ValueError: The workdir is of another study, config or release, which the message names. Or
        its config.json is damaged.
    """
    path = root / "config.json"
    if not path.exists():
        return
    stored = read_json(path, remedy=_REMEDY)
    if stored.get("format") != _FORMAT:
        raise ValueError(
            f"{shown(root)} was made by another release of jaxdp with another layout. Use a new "
            "workdir."
        )
    if stored["study"] != study:
        raise ValueError(
            f"{shown(root)} belongs to the study {stored['study']!r}, not to {study!r}. Use a new "
            "workdir."
        )
    before, given = _flat(stored["config"]), _flat(json.loads(config.to_json()))
    for fields in (before, given):
        fields.pop("watch", None)  # It changes how a run is shown, and nothing in its results.
    if before != given:
        names = sorted(name for name in {*before, *given} if before.get(name) != given.get(name))
        listed = ", ".join(map(shown, names))
        raise ValueError(
            f"{shown(root)} belongs to an experiment with another {listed}. Use a new workdir."
        )


@contextlib.contextmanager
def bind(study: str, config: Any, root: pathlib.Path) -> Iterator[None]:
    """Binds a workdir to a config for the body. Unbinds it if the body fails before it makes a
    file.

    So after a late error, such as a model that does not fit the images, a corrected config can use
    the same workdir.
    """
    path = root / "config.json"
    fresh = not path.exists()
    config = json.loads(config.to_json())
    write_json(path, {"study": study, "format": _FORMAT, "versions": versions(), "config": config})
    try:
        yield
    except BaseException:
        made = (
            other
            for other in root.rglob("*")
            if other.is_file() and not other.name.endswith("lock")
        )
        if fresh and not any(other != path for other in made):
            path.unlink()
        raise


def versions() -> dict[str, str]:
    """Returns the versions of Python, this library, and those that it computes with."""
    named = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "numpy")}
    return {"jaxdp": __version__, "python": platform.python_version(), **named}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        k: v
        for name, sub in tree.items()
        for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()
    }


@contextlib.contextmanager
def account(
    path: pathlib.Path,
    name: str,
    *,
    label: str = "",
    adjacency: Any = "add_remove",
    unit: str = "example",
    **terms: Any,
) -> Iterator[Account]:
    """Yields the account of a data set in the ledger at `path`. Makes both if they are missing.

    Args:
      path: The path of the ledger.
      name: The name of the data set.
      label: The label of the spends.
      adjacency, unit, **terms: As in `Ledger.register`. `launch.data.terms` has those of a config.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with Ledger(path) as ledger:
        ledger.register(name, adjacency=adjacency, unit=unit, **terms)
        yield ledger.account(name, label=label)


def own_account(ledger: Ledger, dataset: str, **terms: Any) -> Account:
    """Returns the account of a data set. Registers it, with terms as in `Ledger.register`, unless
    its owner has.
    """
    try:
        return ledger.account(dataset)
    except ValueError:
        ledger.register(dataset, **terms)
        return ledger.account(dataset)


def known(field: str, names: Iterable[Any], choices: Iterable[Any]) -> None:
    """Raises ValueError for a name in config.`field` that is not one of the choices."""
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise ValueError(
                f"config.{field} has {name!r}, which is not one of {', '.join(map(str, choices))}."
            )


def some(field: str, given: Any) -> Any:
    """Returns the entries of config.`field`. Raises ValueError if there are none."""
    if not len(given):
        raise ValueError(f"config.{field} must have at least one entry, got none.")
    return given


# --- The program --------------------------------------------------------------------------------


def main(
    experiment: Callable[..., Any] | Study, *, divides: bool = False, trains: bool = False
) -> None:
    """Runs a study, or `experiment(config, workdir, dry_run=)`, with the flags of the command line.
    See `start`.

    An experiment that `divides` its work among devices also takes `mesh=`, the mesh of --devices or
    None. One that `trains` takes `target=`, the name of --target or "". A study does.
    """
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
    devices = flags.DEFINE_string("devices", "one", _DEVICES)
    target = flags.DEFINE_string("target", "", _TARGET)
    for flag in (
        config,
        workdir,
        dry_run,
        devices,
        target,
    ):  # --help lists the flags of the program itself
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])
    chosen = functools.partial(run, experiment) if isinstance(experiment, Study) else experiment

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
        _check_launcher(config.value)
        if devices.value != "one" and not divides:
            raise ValueError(
                f"--devices must be one, got {devices.value!r}. Only launch.finetune divides its "
                "work."
            )
        how: dict[str, Any] = (
            {"mesh": None if dry_run.value else _mesh(devices.value)} if divides else {}
        )
        if target.value:
            _check_target(
                target.value, dry_run=dry_run.value, trains=trains or isinstance(experiment, Study)
            )
            how["target"] = target.value
        chosen(config.value, workdir.value, dry_run=dry_run.value, **how)

    start(program)


def _check_target(target: str, *, dry_run: bool, trains: bool) -> None:
    """Raises ValueError where --target says nothing. This process then computes on its
    processor.
    """
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
    jax.config.update(
        "jax_platforms", "cpu"
    )  # with the compiler of a TPU, JAX would look for a TPU


def _mesh(devices: str) -> Any:
    """Returns the mesh of --devices, or None for one device. Joins the other processes if there are
    some.
    """
    if devices == "one":
        return None
    import jax

    joined = re.fullmatch(r"(.+:\d+),(\d+),(\d+)", devices)
    if joined:
        jax.distributed.initialize(joined[1], int(joined[3]), int(joined[2]))
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


def start(program: Callable[[Sequence[str]], None]) -> None:
    """Parses the flags and runs `program(argv)`, as `absl.app.run` does.

    After a user's mistake the program prints it as a sentence on stderr and exits with 2. With
    --verbosity=1 it also prints the traceback. After Ctrl-C it exits with 130. --help exits with 0.
    """

    def parse(argv: list[str]) -> list[str]:
        arguments = argv[1:]
        try:
            catalogue.importable()
            if {"--help", "-help", "-h", "--helpfull", "--helpshort"} & {*arguments}:
                print(_help(arguments))
                sys.exit(0)
            return flags.FLAGS([argv[0], *catalogue.resolve(arguments)])
        except (*MISTAKES, flags.Error, AttributeError, KeyError) as error:
            _stop(error)

    def run_program(argv: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(
                logging.WARNING
            )  # Orbax prints a dozen lines for every checkpoint
        warnings.formatwarning = lambda message, *_: f"Warning: {shown_lines(str(message))}\n"
        keep_compiled()
        tell(program, argv)

    memory.keep_freed_memory()
    try:
        app.run(run_program, flags_parser=parse)
    except KeyboardInterrupt as error:
        print(
            f"\n{shown_lines(str(error))}"
            if str(error)
            else "\nInterrupted. The same command goes on from here.",
            file=sys.stderr,
        )
        sys.exit(130)


def keep_compiled() -> None:
    """Lets the next run load what this one compiles, unless JAX_COMPILATION_CACHE_DIR names another
    folder.

    A compiled program contains the arrays that its function closes over. So the programs of this
    package get records and keys as arguments. Machines that share the user's folder may have
    different processors, so each kind has its own. A folder that cannot be used, or a damaged file
    in it, costs time and nothing else.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folder = cache / "jaxdp" / digest([str(fact) for fact in processor()])[:16]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return
    with contextlib.suppress(OSError):  # another process may delete the same files
        kept = 0
        for entry in sorted(
            os.scandir(folder), key=lambda entry: entry.stat().st_mtime, reverse=True
        ):
            kept += entry.stat().st_size
            if kept > LARGEST_CACHE:
                os.unlink(entry)
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def tell(program: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Runs a program. After a user's mistake, prints it on stderr and exits with 2."""
    try:
        program(*arguments, **options)
    except MISTAKES as error:
        _stop(error)


def limits(given: Sequence[str]) -> Any:
    """Returns the `jaxdp.files.Limits` of the NAME=NUMBER pairs of a flag."""
    from jaxdp.files import Limits

    try:
        return Limits(
            **{name: int(number) for name, _, number in (pair.partition("=") for pair in given)}
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--limits must be NAME=NUMBER pairs, for example bytes=17179869184. {error}"
        ) from error


def _stop(error: Exception) -> NoReturn:
    logging.debug("The error was raised here:", exc_info=error)
    for text in (error, *getattr(error, "__notes__", ())):
        print(shown_lines(text), file=sys.stderr)
    sys.exit(2)


def _launcher() -> str:
    """Returns the name of the running launcher, or "" if no launcher runs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package, _, name = (spec.name if spec else "").removesuffix(".__main__").rpartition(".")
    return name if package == __package__ else ""


def _check_launcher(config: Any) -> None:
    """Raises ValueError for a config of another launcher. Its parts tell, so that a user's own
    config is recognised.
    """
    mine = _launcher()
    found = next(
        (name for name, parts in _PARTS.items() if all(part in config for part in parts)), None
    )
    if mine not in _PARTS or (found and _PARTS[found] == _PARTS[mine]):
        return
    if found:
        given = catalogue.given(sys.argv)
        raise ValueError(
            f"this is a config of launch.{found}, not of launch.{mine}. Run: {_command(found)} "
            f"--config {given} --workdir ..."
        )
    missing = ", ".join(part for part in _PARTS[mine] if part not in config)
    raise ValueError(
        f"config.{missing} is missing, so this is no config of launch.{mine}. --help lists its "
        "configs."
    )


def _command(launcher: str) -> str:
    return f"python -m launch.{launcher}" if __package__ == "launch" else f"jaxdp {launcher}"


def _help(arguments: Sequence[str]) -> str:
    """Returns the help of a launcher: its flags, its configs, and the fields of one of them with
    their defaults.
    """
    main, launcher = sys.modules["__main__"], _launcher()
    text = [(main.__doc__ or "").strip(), flags.FLAGS.main_module_help().strip()]
    if configs := catalogue.known(launcher):
        width = max(len(config.name) for config in configs)
        text.append(
            "\n".join(
                ["Configs:", *(f"  {config.name:{width}}  {config.about}" for config in configs)]
            )
        )
        chosen = (
            catalogue.given(arguments)
            or min(configs, key=lambda config: "digits" not in config.name).name
        )
        fields = _flat(json.loads(catalogue.load(chosen).to_json()))
        text.append(
            "\n".join(
                [f"Fields of {chosen}:", *(f"  --config.{k}={v!r}" for k, v in fields.items())]
            )
        )
    return "\n\n".join(text)
