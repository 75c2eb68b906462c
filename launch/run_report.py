"""The report of one run, from its workdir alone."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxdp.files import read_json, understood
from jaxdp.report.past import Past

from . import document, studies
from .study import Report

_REMEDY = (
    "Restore it from a copy, or delete it and run the same command again. Paid releases are not "
    "paid again."
)
_BOUND = {"study": str, "config": dict, "versions": {str: str}}  # the types of config.json


def write(
    workdir: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    ledger: str | os.PathLike[str] | None = None,
    report: Report | None = None,
    past: Past | None = None,
) -> pathlib.Path:
    """Writes the report of a finished run.

    Args:
      workdir: The workdir.
      output: The HTML file, by default report.html in the workdir.
      ledger: The ledger, if the run was told to use another one than its workdir's.
      report: What the report tells about runs of this study. By default it is that of the study
          which config.json names.
      past: The ledger as it was when a page was written, for `launch.report.verify`.

    Raises:
      FileNotFoundError: The workdir has no run that is finished.
      ValueError: A file is damaged.
    """
    root = pathlib.Path(workdir)
    for name in ("config.json", "result.json"):
        if not (root / name).exists():
            raise FileNotFoundError(
                f"{root / name} does not exist. Give the workdir of a lifecycle, or of a run that "
                "is finished."
            )
    bound = document.checked(root / "config.json", _BOUND, "config", remedy=_REMEDY)
    report = report or _report(bound["study"])
    place = None if output is None else pathlib.Path(output)
    if report.write is not None:
        return report.write(root, place, past)
    config = bound["config"]
    with understood(root, _REMEDY):
        result = {}
        if report.shape:
            path = root / "result.json"
            result = document.checked(path, dict(report.shape), "result", remedy=_REMEDY)
        return document.write(
            root,
            report.page,
            output=place,
            title=f"Privacy report: {report.title}",
            books=_books(root, report, ledger or bound.get("ledger"), bound, past),
            released=_released(root, report),
            config=config,
            versions=bound["versions"],
            nothing=report.no_account,
            found=result,
            tables=_tables(root) if report.page == Report.page else {},
            benchmark=bool(config.get("public_benchmark")),
            references=report.references and bool(config.get("references")),
            noise=report.noise(config),
        )


def books(root: pathlib.Path) -> document.Books:
    """Returns the accounts of a finished run of a launcher.

    Raises:
      ValueError: A file is damaged.
    """
    bound = document.checked(root / "config.json", _BOUND, "config", remedy=_REMEDY)
    return _books(root, _report(bound["study"]), bound.get("ledger"), bound, None)


def _report(name: str) -> Report:
    study = studies.named(name)
    if study is None or study.report is None:
        return Report(title=name)
    return study.report


def _released(root: pathlib.Path, report: Report) -> dict[pathlib.Path, str]:
    """Returns what each released file is, by its path."""
    files: dict[pathlib.Path, str] = {}
    for pattern, what in report.released.items():
        files |= dict.fromkeys(sorted(root.glob(pattern)), what)
    return files


def _books(
    root: pathlib.Path,
    report: Report,
    ledger: str | os.PathLike[str] | None,
    bound: Mapping[str, Any],
    past: Past | None,
) -> document.Books:
    """Returns the accounts of a workdir.

    Args:
      ledger: The ledger outside of the workdir that pays, or None.
      bound: The content of config.json, with the word for the runs of this workdir in that ledger.
    """
    if ledger is None:
        paths = _ledgers(root, report)
        return document.Books.read(root, paths, remedy=_REMEDY, past=past)
    runs = [bound["run"]] if bound.get("run") else []
    paths = {"": pathlib.Path(ledger)}
    return document.Books.read(root, paths, remedy=_REMEDY, runs=runs, past=past)


def _ledgers(root: pathlib.Path, report: Report) -> dict[str, pathlib.Path]:
    """Returns the ledgers by the words that the names of their accounts begin with.

    The ledger cells/0.5/1/ledger.sqlite gives "0.5/1: ".
    """
    paths: list[pathlib.Path] = []
    for pattern in report.ledgers:
        paths += sorted(root.glob(pattern))
    if paths == [root / "ledger.sqlite"]:
        return {"": paths[0]}
    return {f"{'/'.join(path.parent.relative_to(root).parts[1:])}: ": path for path in paths}


def _tables(root: pathlib.Path) -> dict[str, Any]:
    """Returns the tables of a study as (headings, rows) of texts, or as a paragraph, by their
    titles.
    """
    path = root / "tables.json"
    if not path.exists():
        return {}
    tables: dict[str, Any] = {}
    for title, rows in read_json(path, remedy=_REMEDY).items():
        if isinstance(rows, str):
            tables[title] = rows
            continue
        document.check(rows, [{str: object}], "a table")
        headings = _headings(rows)
        tables[title] = headings, [[_cell(row.get(key)) for key in headings] for row in rows]
    return tables


def _headings(rows: list[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of all rows, each once, in the order of their appearance."""
    headings: dict[str, None] = {}
    for row in rows:
        headings |= dict.fromkeys(row)
    return list(headings)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
