"""The report of a run of `jaxdp.finetune.fit`, or of a ledger alone."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import read_json, shown, understood, write_durably, write_json
from jaxdp.files.text import up
from jaxdp.privacy import Ledger
from jaxdp.report.books import Books, accounts_of, check, checked
from jaxdp.report.document import page
from jaxdp.report.exactness import noise_of
from jaxdp.report.intervals import measured
from jaxdp.report.metrics import read_metrics
from jaxdp.report.past import Past

_TEMPLATE = pathlib.Path(__file__).parent / "pages" / "fit.html.jinja"
FILE = "run.json"  # what `fit` writes of its run
_KIND = "fit"  # public pre-training has a file of this name too
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
    public: bool = False,
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
      public: Whether the page leaves out who spent, when, on which machine, and where the ledger
        is. The accounts are the same.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: There is no such workdir or ledger, or the ledger of the run is gone and
        left no copy.
      ValueError: The workdir is of a launcher, or a file is damaged.
    """
    root = pathlib.Path(workdir)
    books, run = opened(root, ledger)
    if public:
        books = books.anonymous()
    said = _said(root) | statements(metrics, facts)
    if any(said.values()) or _place(root).exists():
        write_json(_place(root), said)
    folder = root.parent if root.is_file() else root
    path = folder / "report.html" if output is None else pathlib.Path(output)
    write_page(path, root, books, run, said)
    return path


def statements(
    metrics: Mapping[str, Any] | None, facts: Mapping[str, Any] | None = None
) -> dict[str, list[list[str]]]:
    """Returns the rows of a page for the arguments of `write`, without those that are None."""
    rows = {}
    if metrics is not None:
        rows["measured"] = _rows({name: measured(value) for name, value in metrics.items()})
    if facts is not None:
        rows["told"] = _rows(facts)
    return rows


def rewrite(
    workdir: str | os.PathLike[str],
    output: pathlib.Path,
    past: Past,
    said: Mapping[str, list[list[str]]] | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Writes the page again as it was.

    Args:
      workdir: The workdir of `fit`, or the file of a ledger.
      output: The HTML file.
      past: The ledger as it was then.
      said: Its metrics and facts, as `statements` returns them. By default those of the last
        `write`.
      names: The data sets of a ledger that the page shows, by default all.

    Raises:
      As `write` and `Past.report`.
    """
    root = pathlib.Path(workdir)
    books, run = opened(root, past=past, names=names)
    if past.public:
        books = books.anonymous()
    write_page(output, root, books, run, _said(root) if said is None else said)


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


def opened(
    workdir: str | os.PathLike[str],
    ledger: Ledger | str | os.PathLike[str] | None = None,
    past: Past | None = None,
    names: Sequence[str] | None = None,
) -> tuple[Books, dict[str, Any]]:
    """Returns the accounts and the facts of a run. A ledger alone has no facts, and `names` of its
    data sets, by default all.

    Raises:
      FileNotFoundError, ValueError: As in `write`.
    """
    root = pathlib.Path(workdir)
    if not root.exists():
        raise FileNotFoundError(f"workdir {shown(root)} does not exist. Give that of a run.")
    if root.is_file():
        return Books(accounts_of({"": root}, names, past=past)), {}
    path = root / FILE
    if not path.exists():
        raise _not_a_run(root)
    run: dict[str, Any] = read_json(path, remedy=_REMEDY)
    if run.get("kind") != _KIND:
        raise ValueError(
            f"{shown(path)} is not of jaxdp.finetune.fit. Give the workdir of a private training."
        )
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
        f"{shown(root / FILE)} does not exist. Give the workdir of `fit`, which writes it, or the "
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


def write_page(
    path: pathlib.Path,
    root: pathlib.Path,
    books: Books,
    run: Mapping[str, Any],
    said: Mapping[str, list[list[str]]],
) -> None:
    """Writes the page at `path`, from what `opened` and `statements` return."""
    settings = run.get("settings", {})
    rows = _history(root) if run else []
    headings: dict[str, None] = {}
    for row in rows:
        headings |= dict.fromkeys(row)
    title = "Privacy report of a ledger" if books.entries else "Privacy report"
    if run:
        title = "Privacy report: private training"
    shown_facts: dict[str, Any] = {
        "title": title,
        "nothing": "No data set was charged.",
        "settings": _rows(settings),
        "history": rows,
        "headings": list(headings),
        "measured": said.get("measured", []),
        "told": said.get("told", []),
    }
    versions = run.get("versions", {})
    if "exact" in run:  # not in the files of earlier versions
        shown_facts["noise"] = noise_of(run["exact"])
    content = page(
        _TEMPLATE, books=books, released=[], config=settings, versions=versions, **shown_facts
    )
    write_durably(path, content)


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
        if isinstance(row["epsilon"], float):
            numbers["epsilon"] = up(row["epsilon"])
        rows.append({"step": str(row["step"]), **numbers})
    return rows


def _rows(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, _text(value)] for name, value in values.items()]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
