"""A run of a study: each cell is computed once, and then the results are written."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jaxdp import memory
from jaxdp.data.protocol import warn_of_not_finite
from jaxdp.files import (
    happened,
    optional,
    read_json,
    read_npz,
    understood,
    write_durably,
    write_json,
)
from jaxdp.privacy import Account, BudgetExceeded
from jaxdp.release import Hosts, locked
from jaxdp.report import check_figures, progress_bar

from .. import plans, results, run_report
from ..settings import check_values
from ..study import Row, Study, nothing
from . import charges, code, fields, ledgers
from .accounts import account
from .workdir import (
    bind,
    cell_folder,
    check_same_config,
    file_name,
    lacking,
    make_once,
    note_released,
    run_of,
)

_AGAIN = (
    "Delete it. The command then makes it again from the other files of the workdir, which costs "
    "nothing twice."
)
_HIDDEN = (
    "lock",
    ".head",
    ".anchor",
    ".sqlite-shm",
    ".sqlite-wal",
)  # ends of files that no user opens


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a study in a workdir.

    Attributes:
      study: The study.
      config: Its config.
      root: The workdir.
      shared: What `Study.open` returned.
      hosts: The processes that run the study together, by default this one alone.
      ledger: The ledger of the private sets, by default ledger.sqlite in the workdir.
      cells: All cells of the run.
    """

    study: Study
    config: Any
    root: pathlib.Path
    shared: Any
    hosts: Hosts = dataclasses.field(default_factory=Hosts)
    ledger: pathlib.Path | None = None
    cells: Sequence[Any] = ()

    def account(self, name: str, *, label: str, **terms: Any) -> AbstractContextManager[Account]:
        """Returns the account of a private set in the ledger of the run, as a context manager.

        Args:
          name, label, **terms: As in `launch.frame.account`. `config.data` says whom to ask.
        """
        path = self.ledger or self.root / ledgers.NAME
        terms |= fields.people(self.config.data)
        return account(path, name, label=label, run=run_of(self.root), **terms)

    def folder(self, cell: Any) -> pathlib.Path:
        """Returns the folder of a cell."""
        return cell_folder(self.root, cell)

    def is_done(self, cell: Any) -> bool:
        """Returns whether a cell has a row."""
        return (self.folder(cell) / "row.json").exists()

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
                return path.exists()  # Another process may have run it while this one waited.

            def end() -> dict[str, Any]:
                shutil.rmtree(folder / "scratch", ignore_errors=True)
                return read_json(path, remedy="Delete it. The same command makes it again.")

            if not self.hosts.first(begin):
                with self._told(cell):
                    row = cell._asdict() | self._run(cell, folder)
                    # Before the row, because a cell with a row is not looked at again.
                    self.hosts.first(lambda: charges.keep(folder))
                    self.hosts.first(lambda: write_json(path, row))
            return self.hosts.first(end)

    @contextlib.contextmanager
    def _told(self, cell: Any) -> Iterator[None]:
        """Tells when a cell starts and ends."""
        coordinates = cell._asdict()
        coordinates.pop("key", None)  # a hash of what a stage of a lifecycle reads
        root = os.path.abspath(self.root)
        fields = {"study": self.study.name, "workdir": root, "cell": coordinates}
        happened("cell", lambda: fields)
        try:
            yield
        except BaseException as error:
            kind = {"kind": type(error).__name__}
            happened("cell_error", lambda: fields | kind)
            raise
        happened("cell_end", lambda: fields)

    @functools.cached_property
    def _codes(self) -> Mapping[Any, code.Code]:
        return code.of(self.study, self.config, self.cells)

    def _run(self, cell: Any, folder: pathlib.Path) -> Row:
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts.first(lambda: code.write(folder, self._codes.get(cell)))
        memory.make_room_for_programs()
        try:
            return self.study.run(cell, self)
        except BudgetExceeded as error:
            if self.ledger is not None and not self.ledger.is_relative_to(self.root):
                error.add_note(
                    f"{self.ledger} counts for all runs about these records. `jaxdp ledger show` "
                    "says which ones have spent."
                )
            else:
                error.add_note(
                    f"If {folder} was interrupted and another machine or version cannot continue "
                    "it, nothing of it was released. Then delete the folder and the ledger that "
                    "only this cell uses, and run the cell again."
                )
            raise

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the content of the JSON file `name` in the workdir. One process makes the file if
        it is missing.
        """
        path = self.root / name
        make_once(path, lambda: write_json(path, make()))
        return read_json(path, kind=object)

    def arrays(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Returns the arrays of the .npz file `name` in the workdir, as `kept` does."""
        path = self.root / name

        def write() -> None:
            arrays = make()
            write_durably(path, lambda file: np.savez(file, **arrays))

        make_once(path, write)
        return read_npz(path)

    def publish(self, rows: Sequence[Row]) -> Any:
        """Writes rows, tables, figures and result.json. Returns the result."""
        with locked(self.root / "summary.lock", wait=True):
            result = self.study.result(rows, self)
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            write_durably(self.root / "rows.jsonl", lines.encode())
            tables = dict(self.study.tables(result, self))
            if note := code.told(self.root, self._codes):
                tables["code"] = note
            results.write_tables(self.root, tables)
            self.study.figures(result, self)
            if self.cells and self.study.report and self.study.report.released:
                # The first cell of a study makes its network.
                row = self.folder(self.cells[0]) / "row.json"
                note_released(self.root, self.study.report.released, row)
            # It comes last, since a workdir with this file is taken for finished.
            write_json(self.root / "result.json", result)
        return result


def run(
    study: Study,
    config: Any,
    workdir: Any,
    *,
    dry_run: bool = False,
    target: str = "",
    hosts: Hosts | None = None,
    choice: ledgers.Choice = ledgers.DEFAULT,
    stale: str = "",
) -> Any:
    """Runs the unfinished cells of a study, prints its summary and returns its result.

    With `dry_run` it prints what the study would charge, take and need, and writes nothing. Then
    workdir may be None. With `target`, an accelerator of `jaxdp.compilers`, it says so for that.
    `hosts` are the processes that run it together, by default this one alone. Process 0 prints.
    `choice` is what the user says about the ledger of the private sets. `stale` is what to do with
    cells whose code was edited: "keep", "redo", "redo_all" (`launch.frame.code`), or "" to refuse.

    Raises:
      ValueError: The config is inconsistent, the workdir belongs to another config, study or
        release, or the data is not declared a public benchmark. Or another ledger counts the
        same records. Or the code of finished cells was edited. Nothing is written.
      FileNotFoundError: Data or a checkpoint is missing. The message says how to get it.
      BudgetExceeded: A ledger has no room for what a cell would spend. Or it has no room for what
          the workdir notes and it lacks, as a restored copy does.
    """
    if dry_run:
        root = None if workdir is None else pathlib.Path(workdir)
        _dry_run(study, config, root, target, choice, stale)
        return None
    root = pathlib.Path(workdir)
    hosts = hosts or Hosts()
    if not hosts.leads:
        with contextlib.redirect_stdout(io.StringIO()):
            return compute(study, config, root, hosts, choice, stale)
    before = _stamp(root)
    result = compute(study, config, root, hosts, choice, stale)
    if study.grows is None and before is not None and before == _stamp(root):
        todo = lacking(root) or "There is nothing to do."
        print(f"{root} holds a finished run. {todo}\n\n{study.summary(result)}")
        return result
    run_report.write(root, report=study.report)
    names = sorted(path.name for path in root.iterdir() if not path.name.endswith(_HIDDEN))
    print(f"\n{study.summary(result)}\n\nIn {root}: {', '.join(names)}.")
    return result


def compute(
    study: Study,
    config: Any,
    root: pathlib.Path,
    hosts: Hosts | None = None,
    choice: ledgers.Choice = ledgers.DEFAULT,
    stale: str | None = None,
) -> Any:
    """Returns the result of a study, as `run` does, without its summary.

    A ledger that lacks noted charges of the workdir is charged first, also where all is finished.
    Without `stale` the code of finished cells is not compared.
    """
    hosts = hosts or Hosts()
    bound = hosts.together(lambda: _checked(study, config, root, choice, stale or ""))
    hosts.agree(lambda: {"config": config.to_json()})
    # Before data is read. The ledger is a file of process 0.
    named = hosts.first(lambda: os.fspath(ledgers.chosen(choice, config, root) or ""))
    cells = distinct(study.cells(config))
    if stale is not None:
        hosts.first(lambda: _settle(study, config, root, cells, stale))

    def finished() -> Any:
        result = _finished(study, root)
        if result is not None and stale == "keep":
            _note(root, code.of(study, config, cells))
        return result

    def is_paid() -> bool:
        ledger = pathlib.Path(named) if named else None
        return study.account is None or not charges.lacking(root, ledger)

    # To charge a ledger takes the terms of the study, which follow from its data.
    owes = not hosts.first(is_paid)
    result = None if owes else hosts.first(finished)
    if result is not None:
        return result
    hosts.together(lambda: check_extras(study))  # before anything is computed or paid
    shared = hosts.together(lambda: study.open(config, root))
    path = hosts.first(lambda: _ledger(study, config, root, shared, choice))
    ledger = pathlib.Path(path) if path else None
    work = Work(study, config, root, shared, hosts, ledger, cells)
    with contextlib.ExitStack() as opened:
        hosts.first(lambda: opened.enter_context(bind(study.name, bound, root, ledger)))
        if owes:
            hosts.first(lambda: charges.settle_cells(work))
            result = hosts.first(finished)
            if result is not None:
                return result
        rows = (study.rows or _rows)(work, cells)
        return hosts.first(lambda: work.publish(rows))


def check_extras(study: Study) -> None:
    """Raises ImportError if a library is missing that the study needs at its end. The message names
    the extra.
    """
    if study.figures is not nothing:
        check_figures()
    optional("jinja2", "report")


def _stamp(root: pathlib.Path) -> tuple[int, int] | None:
    """Returns what tells whether result.json was written again, or None if there is none."""
    path = root / "result.json"
    if not path.exists():
        return None
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def _settle(
    study: Study,
    config: Any,
    root: pathlib.Path,
    cells: Sequence[Any],
    stale: str,
    *,
    dry: bool = False,
) -> None:
    if study.rows is None:  # Otherwise the study knows what its cells build on.
        code.settle(study, config, root, cells, stale, dry=dry)


def _note(root: pathlib.Path, codes: Mapping[Any, code.Code]) -> None:
    """Says in the tables of a finished run whether they are of other code."""
    path = root / "tables.json"
    if not path.exists():
        return
    tables = read_json(path, remedy=_AGAIN)
    note = code.told(root, codes)
    if note != tables.pop("code", ""):
        results.write_tables(root, tables | ({"code": note} if note else {}))


def _finished(study: Study, root: pathlib.Path) -> Any:
    """Returns the result of a finished study, or None if there may be more to run."""
    path = root / "result.json"
    if not path.exists() or study.grows is not None:
        return None
    result = read_json(path, remedy=_AGAIN, kind=object)
    with understood(path, _AGAIN):
        study.summary(result)
    return result


def _ledger(
    study: Study, config: Any, root: pathlib.Path, shared: Any, choice: ledgers.Choice
) -> str:
    """Returns the path of the ledger of a study's private sets, or "" if each cell has its own."""
    if study.private is None:
        return ""
    return os.fspath(ledgers.settled(choice, config, root, study.private(shared)))


def _checked(
    study: Study,
    config: Any,
    root: pathlib.Path | None,
    choice: ledgers.Choice,
    stale: str = "",
) -> Any:
    """Returns the part of a config to which a workdir is bound. Raises ValueError for a mistake in
    the config.
    """
    if study.benchmark and not config.public_benchmark:
        raise ValueError(f"config.public_benchmark must be True for this study. {study.benchmark}")
    check_values(config)
    bound = study.grows(config) if study.grows else config
    fields.check_watch(config)
    fields.people(config.get("data", {}))
    if study.private is None and choice != ledgers.DEFAULT:
        raise ValueError(
            f"--ledger and --new_ledger name the one ledger of a private set, and study "
            f"{study.name!r} has ledgers of its own in the workdir. Leave them out."
        )
    if stale and stale not in code.STALE:
        raise ValueError(f"--stale must be one of {', '.join(code.STALE)}, got {stale!r}.")
    if stale and study.rows is not None:
        raise ValueError(
            f"--stale is for studies with cells of their own, and those of study {study.name!r} "
            "build on each other. Leave it out, or use a new workdir."
        )
    if root is not None:
        check_same_config(study.name, bound, root)
    return bound


def _dry_run(
    study: Study,
    config: Any,
    root: pathlib.Path | None,
    target: str,
    choice: ledgers.Choice,
    stale: str,
) -> None:
    _checked(study, config, root, choice, stale)
    cells = distinct(study.cells(config))
    check_extras(study)
    if root is not None:
        _settle(study, config, root, cells, stale, dry=True)
    with tempfile.TemporaryDirectory() as nowhere:
        opened = functools.cache(lambda: study.open(config, pathlib.Path(nowhere)))
        items = list(study.plan(config, opened))
        ledger = ledgers.chosen(choice, config, root) if study.private else None
        if study.private and opened.cache_info().currsize:
            # A plan that has not opened the records, which may take long, says nothing of others.
            private = study.private(opened())
            ledger = ledgers.asked(choice, config, root, private)
            for name, records, _ in private:
                warn_of_not_finite(records, name)
        plans.show(items, root, target, ledger=ledger)
    if study.benchmark:
        print(f"\n{study.benchmark}")


def distinct(cells: Iterable[Any]) -> list[Any]:
    """Returns the cells, each once.

    Raises:
      ValueError: Two different cells would have the same folder.
    """
    by_folder: dict[tuple[str, ...], Any] = {}
    for cell in cells:
        first = by_folder.setdefault(tuple(map(file_name, cell)), cell)
        if first != cell:
            raise ValueError(
                f"config has two cells with the same folder name: {tuple(first)} and "
                f"{tuple(cell)}. Rename one."
            )
    return list(by_folder.values())


def _rows(work: Work, cells: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the rows of all cells. Each cell is run on its own."""
    missing = [cell for cell in cells if not work.is_done(cell)]
    if missing != cells and work.hosts.leads:
        done = len(cells) - len(missing)
        print(f"{len(cells)} cells, {done} of them are done already.", flush=True)
    if work.hosts.count == 1:  # Hosts that share a cell go through all cells in one order.
        _run_missing(work, missing)
    return [work.row(cell) for cell in cells]


def _run_missing(work: Work, missing: Sequence[Any]) -> None:
    bar = progress_bar(
        total=len(missing), label=work.study.name, unit="cell", show=len(missing) > 1
    )
    with bar:
        # Cells that another process holds come last: by then it has probably run them.
        for wait in (False, True):
            for cell in missing:
                if not work.is_done(cell):
                    with contextlib.suppress(BlockingIOError):
                        work.row(cell, wait=wait)
                bar.update(sum(map(work.is_done, missing)) - bar.n)
