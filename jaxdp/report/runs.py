"""The report of a run of `jaxdp.finetune.fit`, or of a ledger alone."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxdp.files import read_json, shown, understood, write_durably, write_json
from jaxdp.privacy import Ledger
from jaxdp.report.books import Books, accounts_of, check, checked
from jaxdp.report.document import page
from jaxdp.report.intervals import interval
from jaxdp.report.metrics import read_metrics
from jaxdp.report.past import Past

_TEMPLATE = pathlib.Path(__file__).parent / "pages" / "fit.html.jinja"
_RUN = "run.json"
_REMEDY = "Restore it from a copy, or call `fit` with this workdir again, which pays nothing twice."
_SHAPE = {
    "ledger": (str, type(None)),
    "dataset": str,
    "runs": [str],
    "settings": dict,
    "versions": {str: str},
}
_SAID = {"measured": [[str]], "told": [[str]]}  # the types of report.json
_NOT_SHOWN = {"step", "time", "seconds"}  # how long a step takes tells about its batch


def write(
    workdir: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    metrics: Mapping[str, float | tuple[float, int]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes the privacy report of a run of `jaxdp.finetune.fit`, one HTML file without scripts.

        jaxdp.report.write("run", metrics={"test accuracy": (0.96, 114)})

    `jaxdp report RUN` writes the same again, and the reports of launchers.

    Args:
      workdir: The workdir of `fit`, or the file of a ledger, whose data sets are then all shown.
      output: The HTML file, by default report.html in the workdir or beside the ledger. An older
        one is replaced.
      ledger: The ledger, if it is in memory or is not where the run left it.
      metrics: Numbers that were measured on public or held-out data, by name. A pair of a share and
        the number of cases, such as (0.96, 114), gets its 95 % interval. They are shown as they
        are, because a page cannot know from which data they come.
      facts: What else the page shall say, as text by name. Never put private data in it. Metrics
        and facts are kept in report.json in the workdir, or beside the ledger with its name, so
        that `jaxdp report --verify PAGE` can compare the page. None takes those that were kept, and
        {} takes none.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: There is no such workdir or ledger, or the ledger of the run is gone and
        left no copy.
      ValueError: The workdir is of a launcher, or a file is damaged.
    """
    root = pathlib.Path(workdir)
    books, run = _accounts(root, ledger, None)
    said = _said(root)
    if metrics is not None:
        said["measured"] = _rows({name: _measured(value) for name, value in metrics.items()})
    if facts is not None:
        said["told"] = _rows(facts)
    if any(said.values()) or _place(root).exists():
        write_json(_place(root), said)
    return _write(root, output, books, run, said)


def rewrite(
    workdir: str | os.PathLike[str], output: str | os.PathLike[str], past: Past
) -> pathlib.Path:
    """Writes the page again as it was, with the metrics and facts of the last `write`.

    Args:
      workdir: The workdir of `fit`, or the file of a ledger.
      output: The HTML file.
      past: The ledger as it was then.

    Raises:
      As `write` and `Past.report`.
    """
    root = pathlib.Path(workdir)
    books, run = _accounts(root, None, past)
    return _write(root, output, books, run, _said(root))


def _place(root: pathlib.Path) -> pathlib.Path:
    """Returns the file that keeps the metrics and facts of the last page."""
    return pathlib.Path(f"{root}.report.json") if root.is_file() else root / "report.json"


def _said(root: pathlib.Path) -> dict[str, Any]:
    """Returns the metrics and facts of the last page as rows."""
    place = _place(root)
    said: dict[str, Any] = {"measured": [], "told": []}
    if place.exists():
        remedy = "Restore it from a copy, or delete it and give metrics and facts again."
        said = checked(place, _SAID, "report", remedy=remedy)
    return {name: said[name] for name in _SAID}


def _accounts(
    root: pathlib.Path, ledger: Ledger | str | os.PathLike[str] | None, past: Past | None
) -> tuple[Books, dict[str, Any]]:
    """Returns the accounts of a workdir or ledger, and run.json, {} for a ledger."""
    if not root.exists():
        raise FileNotFoundError(f"workdir {shown(root)} does not exist. Give that of a run.")
    if root.is_file():
        return Books(accounts_of({"": root}, past=past)), {}
    path = root / _RUN
    if not path.exists():
        raise _not_a_run(root)
    run: dict[str, Any] = read_json(path, remedy=_REMEDY)
    with understood(path, _REMEDY):
        check(run, _SHAPE, "run")
    return _books(root, run, ledger, past), run


def _not_a_run(root: pathlib.Path) -> Exception:
    if (root / "config.json").exists():
        return ValueError(
            f"workdir {shown(root)} is of a launcher, whose report `jaxdp report {shown(root)}` "
            "writes."
        )
    return FileNotFoundError(
        f"{shown(root / _RUN)} does not exist. Give the workdir of `fit`, which writes it, or the "
        "file of a ledger."
    )


def _books(
    root: pathlib.Path,
    run: Mapping[str, Any],
    ledger: Ledger | str | os.PathLike[str] | None,
    past: Past | None,
) -> Books:
    """Returns the account of a run. Its ledger may be gone if ledger.json has a copy."""
    names = [run["dataset"]]
    if isinstance(ledger, Ledger):
        content = accounts_of({"": ledger}, names)
        return Books(content | {"shared": ledger.path, "runs": run["runs"]})
    place = ledger
    if place is None and run["ledger"] is not None:
        place = os.path.normpath(root / run["ledger"])
    ledgers = {} if place is None else {"": pathlib.Path(place)}
    is_there = any(path.exists() for path in ledgers.values())
    if past is None and not is_there and not (root / "ledger.json").exists():
        raise FileNotFoundError(
            f"the ledger of the run, {shown(place or 'in memory')}, is gone. Name it with ledger= "
            "or --ledger, or restore it from a copy."
        )
    return Books.read(root, ledgers, remedy=_REMEDY, names=names, runs=run["runs"], past=past)


def _write(
    root: pathlib.Path,
    output: str | os.PathLike[str] | None,
    books: Books,
    run: Mapping[str, Any],
    said: Mapping[str, list[list[str]]],
) -> pathlib.Path:
    settings = run.get("settings", {})
    rows = _history(root) if run else []
    headings: dict[str, None] = {}
    for row in rows:
        headings |= dict.fromkeys(row)
    title = "Privacy report: private training" if run else "Privacy report of a ledger"
    shown_facts: dict[str, Any] = {}
    shown_facts["title"] = title
    shown_facts["nothing"] = "No data set was charged."
    shown_facts["settings"] = _rows(settings)
    shown_facts["history"] = rows
    shown_facts["headings"] = list(headings)
    shown_facts |= said
    versions = run.get("versions", {})
    content = page(
        _TEMPLATE, books=books, released=[], config=settings, versions=versions, **shown_facts
    )
    folder = root.parent if root.is_file() else root
    path = folder / "report.html" if output is None else pathlib.Path(output)
    write_durably(path, content)
    return path


def _history(root: pathlib.Path) -> list[dict[str, str]]:
    """Returns the metrics of the last step of each chunk, which has a checkpoint."""
    path = root / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for row in read_metrics(path):
        if "epsilon" not in row:
            continue
        numbers = {name: _text(row[name]) for name in row if name not in _NOT_SHOWN}
        rows.append({"step": str(row["step"]), **numbers})
    return rows


def _rows(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, _text(value)] for name, value in values.items()]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _measured(value: Any) -> str:
    if not isinstance(value, tuple | list):
        return _text(value)
    share, cases = value
    return f"{interval(share, cases)}, {cases} cases"
