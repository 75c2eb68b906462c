"""The frame of all studies: a config is bound to a workdir, each cell is computed once, results are written.

A `Study` defines its cells, how one is run, and its tables and figures. `run` does the rest:

    config.json            the study and its config; another config in the same workdir is refused
    cells/<a>/<b>/row.json the row of the finished cell (a, b)
    cells/<a>/<b>/...      files of the cell's run; `scratch` in it is deleted once the row is written
    rows.jsonl             all rows, one per line
    tables.md, tables.tex  the tables
    result.json            the result of the finished study

Several processes may run one study in one workdir. Each takes cells that no other process holds. A process that dies
loses its current cell. The same command then continues, and does not pay again for a paid release.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags
from tqdm import tqdm

from jaxdp.files import read_json, read_npz, understood, write_durably, write_json
from jaxdp.privacy import Account, BudgetExceeded, Ledger, LedgerDamaged
from jaxdp.release import locked

from . import results
from .settings import check_numbers

Row = Mapping[str, Any]
_FORMAT = 2  # of workdirs, which had no number in the first releases
_REMEDY = "Restore it from a copy, or use a new workdir."
_AGAIN = "Delete it. The command then makes it again from the other files of the workdir, which costs nothing twice."
# A user can correct these. The program prints the message without a traceback.
MISTAKES = (ValueError, TypeError, OSError, ImportError, BudgetExceeded, LedgerDamaged)


def _nothing(*_: Any) -> Any:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment as data.

    Attributes:
      name: The name of the launcher.
      open: `open(config, root)` reads data and models and refuses a config that cannot work. It writes nothing.
      cells: `cells(config)` yields named tuples, in the order in which they are run.
      run: `run(cell, work) -> row`, a JSON-able dict.
      result: `result(rows, work)`, the content of result.json.
      summary: `summary(result)`, the text for the terminal.
      tables: `tables(result, work)`, rows by title. A str among them is a paragraph.
      figures: `figures(result, work)` draws into `work.root`.
      benchmark: Which data the results read without payment to a ledger, and what to use for private data instead. A
        study with this text needs config.public_benchmark.
      grows: `grows(config)` returns the part of the config that determines cells. With it, a finished study takes more
        cells.
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


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a study in a workdir.

    Attributes:
      study: The study.
      config: Its config.
      root: The workdir.
      shared: What `Study.open` returned.
    """

    study: Study
    config: Any
    root: pathlib.Path
    shared: Any

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
        if not path.exists():
            with locked(folder.with_name(f"{folder.name}.lock"), wait=wait):
                if not path.exists():
                    write_json(path, cell._asdict() | self._run(cell, folder))
                shutil.rmtree(folder / "scratch", ignore_errors=True)
        return read_json(path, remedy="Delete it. The same command makes it again.")

    def _run(self, cell: Any, folder: pathlib.Path) -> Row:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return self.study.run(cell, self)
        except BudgetExceeded as error:
            error.add_note(
                f"If {folder} was interrupted and another machine or version cannot continue it, nothing of it was "
                "released. Then delete the folder and the ledger that only this cell uses, and run the cell again."
            )
            raise

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the content of the JSON file `name` in the workdir. One process makes the file if it is missing."""
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


def file_name(part: Any) -> str:
    """Returns a coordinate of a cell as the name of a file or folder."""
    text = f"{part:g}" if isinstance(part, float) else str(part)
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)


# --- A run ------------------------------------------------------------------------------------------------------------


def run(study: Study, config: Any, workdir: Any) -> Any:
    """Runs the unfinished part of a study, prints its summary and returns its result.

    Raises:
      ValueError: The config is inconsistent, the workdir belongs to another config, study or release, or the data is
        not declared a public benchmark. Nothing is written.
      FileNotFoundError: Data or a checkpoint is missing. The message says how to get it.
      BudgetExceeded: A ledger has no room for what a cell would spend.
    """
    root = pathlib.Path(workdir)
    done = (root / "result.json").exists() and study.grows is None
    result = compute(study, config, root)
    if done:
        print(f"{root} holds a finished run. There is nothing to do.\n\n{study.summary(result)}")
        return result
    hidden = (".lock", ".head")
    names = sorted(path.name for path in root.iterdir() if path.suffix not in hidden)
    print(f"\n{study.summary(result)}\n\nIn {root}: {', '.join(names)}.")
    return result


def compute(study: Study, config: Any, root: pathlib.Path) -> Any:
    """Returns the result of a study, as `run` does, without its summary."""
    if study.benchmark and not config.public_benchmark:
        raise ValueError(f"config.public_benchmark must be True for this study. {study.benchmark}")
    bound = study.grows(config) if study.grows else config
    check_numbers(config)
    check_same_config(study.name, bound, root)
    finished = root / "result.json"
    if finished.exists() and study.grows is None:
        result = read_json(finished, remedy=_AGAIN, kind=object)
        with understood(finished, _AGAIN):
            study.summary(result)
        return result
    cells = distinct(study.cells(config))
    work = Work(study, config, root, study.open(config, root))
    with bind(study.name, bound, root):
        rows = _rows(work, cells)
        with locked(root / "summary.lock", wait=True):
            result = study.result(rows, work)
            write_durably(root / "rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
            results.write_tables(root, study.tables(result, work))
            study.figures(result, work)
            write_json(finished, result)
    return result


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
                f"config has two cells with the same folder name: {tuple(first)} and {tuple(cell)}. Rename one."
            )
    return list(found.values())


def _rows(work: Work, cells: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the rows of all cells. Cells of other processes come last, since they are probably done by then."""
    missing = [cell for cell in cells if not (work.folder(cell) / "row.json").exists()]
    if missing != cells:
        print(f"{len(cells)} cells, {len(cells) - len(missing)} of them are done already.", flush=True)
    with tqdm(total=len(missing), desc=work.study.name, unit="cell", disable=len(missing) < 2) as bar:
        for wait in (False, True):
            for cell in missing:
                if not (work.folder(cell) / "row.json").exists():
                    with contextlib.suppress(BlockingIOError):
                        work.row(cell, wait=wait)
                bar.update(sum((work.folder(cell) / "row.json").exists() for cell in missing) - bar.n)
    return [work.row(cell) for cell in cells]


# --- The workdir ------------------------------------------------------------------------------------------------------


def check_same_config(study: str, config: Any, root: pathlib.Path) -> None:
    """Refuses to mix two experiments in one workdir.

    Raises:
      ValueError: The workdir is of another study, config or release, which the message names. Or its config.json is
        damaged.
    """
    path = root / "config.json"
    if not path.exists():
        return
    stored = read_json(path, remedy=_REMEDY)
    if stored.get("format") != _FORMAT:
        raise ValueError(f"{root} was made by another release of jaxdp with another layout. Use a new workdir.")
    if stored["study"] != study:
        raise ValueError(f"{root} belongs to the study {stored['study']!r}, not to {study!r}. Use a new workdir.")
    before, given = _flat(stored["config"]), _flat(json.loads(config.to_json()))
    if before != given:
        names = sorted(name for name in {*before, *given} if before.get(name) != given.get(name))
        raise ValueError(f"{root} belongs to an experiment with another {', '.join(names)}. Use a new workdir.")


@contextlib.contextmanager
def bind(study: str, config: Any, root: pathlib.Path) -> Iterator[None]:
    """Binds a workdir to a config for the body. Unbinds it if the body fails before it makes a file.

    So after a late error, such as a model that does not fit the images, a corrected config can use the same workdir.
    """
    path = root / "config.json"
    fresh = not path.exists()
    write_json(path, {"study": study, "format": _FORMAT, "config": json.loads(config.to_json())})
    try:
        yield
    except BaseException:
        made = (other for other in root.rglob("*") if other.is_file() and not other.name.endswith("lock"))
        if fresh and not any(other != path for other in made):
            path.unlink()
        raise


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}


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


def known(field: str, names: Iterable[Any], choices: Iterable[Any]) -> None:
    """Raises ValueError for a name in config.`field` that is not one of the choices."""
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise ValueError(f"config.{field} has {name!r}, which is not one of {', '.join(map(str, choices))}.")


def some(field: str, given: Any) -> Any:
    """Returns the entries of config.`field`. Raises ValueError if there are none."""
    if not len(given):
        raise ValueError(f"config.{field} must have at least one entry, got none.")
    return given


# --- The program ------------------------------------------------------------------------------------------------------


def main(experiment: Callable[[Any, str], Any] | Study) -> None:
    """Runs a study, or `experiment(config, workdir)`, with the flags of the command line.

    After a user's mistake the program prints a message and exits with 1. With --verbosity=1 it also prints the
    traceback. After Ctrl-C it exits with 130.
    """
    _find_configs()
    config = config_flags.DEFINE_config_file(
        "config", help_string="The experiment. Override fields with --config.x.y=..."
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "Directory of the run. An interrupted run in it is resumed.", required=True
    )
    flags.mark_flag_as_required("config")
    for name in ("config", "workdir"):  # --help lists the flags of the program itself
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    chosen = functools.partial(run, experiment) if isinstance(experiment, Study) else experiment
    try:
        app.run(functools.partial(_program, chosen, config, workdir))
    except KeyboardInterrupt as error:
        print(f"\n{error}" if str(error) else "\nInterrupted. The same command goes on from here.", file=sys.stderr)
        sys.exit(130)


def limits(given: Sequence[str]) -> Any:
    """Returns the `jaxdp.files.Limits` of the NAME=NUMBER pairs of a flag."""
    from jaxdp.files import Limits

    try:
        return Limits(**{name: int(number) for name, _, number in (pair.partition("=") for pair in given)})
    except (TypeError, ValueError) as error:
        raise app.UsageError(f"--limits must be NAME=NUMBER pairs, for example bytes=17179869184. {error}") from error


def _find_configs() -> None:
    """Makes an installed package find its config files by the names that they have in the checkout."""
    if __package__ == "launch":
        return
    package = importlib.import_module("jaxdp.configs")
    sys.modules.setdefault("configs", package)  # config files import each other by this name
    folder = pathlib.Path(next(iter(package.__path__))).parent
    for place, argument in enumerate(sys.argv):
        flag, equals, value = argument.rpartition("=")
        name = value.partition(":")[0]
        if name.startswith("configs/") and not pathlib.Path(name).exists() and (folder / name).exists():
            sys.argv[place] = f"{flag}{equals}{folder / value}"


def _program(experiment: Callable[[Any, str], Any], config: Any, workdir: Any, argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}. Set config fields with --config.x.y=value.")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax prints a dozen lines for every checkpoint
    tell(experiment, config.value, workdir.value)


def tell(experiment: Callable[[Any, str], Any], config: Any, workdir: str) -> None:
    """Runs `experiment(config, workdir)`. After a user's mistake, exits with a message."""
    try:
        experiment(config, workdir)
    except MISTAKES as error:
        logging.debug("The error was raised here:", exc_info=True)
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        sys.exit(
            f"{type(error).__name__}: {error}{notes}\nFinished work is kept, and the ledger counts all reservations. "
            "Correct this and run the same command: it continues and pays nothing twice. (--verbosity=1 prints the "
            "traceback.)"
        )
