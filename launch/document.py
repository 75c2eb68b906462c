"""The parts of every report: checked files, accounts and their verdicts, released files, and the
page.

A report is one HTML file without scripts or requests. It is made from a workdir alone, and the same
workdir gives the same bytes. It shows nothing that is computed from private records without a
charge to the ledger.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.files import read_json, shown, understood, write_durably, write_json
from jaxdp.privacy import Ledger, SelfComposedDpEvent, epsilon
from jaxdp.privacy.events import from_json
from jaxdp.report import Chart, render_page, round_up, verdict

from . import results

PAGES = pathlib.Path(__file__).parent / "pages"
_NUMBER = (float, type(None))
_TEXT = (str, type(None))
_RUN = dict.fromkeys(("who", "host", "run", "version", "first_at", "last_at"), _TEXT)
_SPEND = {
    "event": object,
    "spends": int,
    "description": str,
    "first_at": str,
    "open": (int, type(None)),
    **dict.fromkeys(("first_label", "last_label"), _TEXT),
}
_ACCOUNT = {
    **dict.fromkeys(("name", "adjacency", "unit", "headline"), str),
    "delta": float,
    "rows": int,
    "records": (int, type(None)),
    **dict.fromkeys(("budget", "proven_epsilon", "remaining"), _NUMBER),
    "open": list,
    "runs": [_RUN],
    "spends": [_SPEND],
}
_ACCOUNTS = {"head": (dict, type(None)), "datasets": [_ACCOUNT]}


def checked(
    path: pathlib.Path, shape: Any, name: str, *, remedy: str, keys: Sequence[str] = ()
) -> Any:
    """Returns the content of a JSON file after `check`.

    Raises:
      ValueError: The file is damaged. The message names it and the remedy.
    """
    content = read_json(path, remedy=remedy, kind=type(shape), keys=keys)
    with understood(path, remedy):
        check(content, shape, name)
    return content


def check(value: Any, shape: Any, name: str) -> None:
    """Raises TypeError for a value that is not of a shape. Fields that the shape does not name are
    ignored.

    Args:
      shape: A type, a tuple of types for a choice, [shape] for any number of values, a dict of
        shapes by field, or {str: shape} for any names.
      name: The name of the value in the message.
    """
    if isinstance(shape, dict):
        check(value, dict, name)
        for field, inner in shape.items():
            for key in value if field is str else (field,):
                if key not in value:
                    raise TypeError(f"{name} lacks {key!r}")
                check(value[key], inner, f"{name}.{key}")
    elif isinstance(shape, list):
        check(value, list, name)
        for item in value:
            check(item, shape[0], f"an entry of {name}")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        if not _is_one_of(value, kinds):
            raise TypeError(f"{name} is a {type(value).__name__}, not a {kinds[0].__name__}")


def _is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Returns whether a value of JSON has one of some types."""
    if isinstance(value, bool):  # In Python a bool is an int, and here it is no number.
        return bool in kinds or object in kinds
    if isinstance(value, int) and float in kinds:  # JSON writes 1.0 as 1.
        return True
    return isinstance(value, kinds)


# --- Accounts -----------------------------------------------------------------------------------


class Books:
    """The accounts of a report, from ledgers or from the copy that the last report kept.

    Attributes:
      entries: The accounts, as `Ledger.report` has them.
      head: The number and link of the last spend, if there is one ledger.
      shared: The path of a ledger outside of the workdir, or "".
      run: The word for the runs of this workdir in that ledger.
    """

    def __init__(
        self,
        root: pathlib.Path,
        ledgers: Mapping[str, pathlib.Path],
        *,
        remedy: str,
        names: Sequence[str] | None = None,
        run: str = "",
    ):
        """Reads the accounts of ledgers, and keeps them in ledger.json. Without a ledger it reads
        that copy.

        Args:
          root: The workdir.
          ledgers: The ledgers by the words that their accounts' names begin with.
          remedy: What to do about a damaged copy.
          names: The accounts to read, by default all.
          run: The word for the runs of this workdir in a ledger that other workdirs share. Of such
            a ledger only the accounts are read from which this workdir spent.

        Raises:
          ValueError: A ledger lacks an account, or the copy is damaged.
        """
        outside = [path for path in ledgers.values() if not path.is_relative_to(root)]
        self.shared = str(outside[0]) if outside else ""
        self.run = run
        copy = root / "ledger.json"
        heads = []
        entries: list[dict[str, Any]] = []
        for prefix, path in ledgers.items():
            if path.exists():
                report = _report(path, names)
                if run:
                    report["datasets"] = [entry for entry in report["datasets"] if _has(entry, run)]
                heads.append(report["head"])
                for entry in report["datasets"]:
                    entries.append(entry | {"name": prefix + entry["name"]})
        self.head = heads[0] if len(heads) == 1 else None
        self.entries = entries
        if heads:
            write_json(copy, {"head": self.head, "datasets": entries})
        if copy.exists():  # It is read in any case, so that both ways give the same page.
            content = checked(copy, _ACCOUNTS, "ledger", remedy=remedy)
            self.head = content["head"]
            self.entries = content["datasets"]
        with understood(copy, remedy):
            self._check()

    def _check(self) -> None:
        """Raises an error for accounts that a page cannot show."""
        if self.head is not None:
            check(self.head, {"spend": int, "link": str}, "ledger.head")
        for entry in self.entries:
            verdict(entry)
            for row in entry["spends"]:
                from_json(json.dumps(row["event"]))

    @property
    def groups(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """The names and entries of the data sets. Equal accounts, for example of hospitals, form
        one group.
        """
        groups: dict[str, list[dict[str, Any]]] = {}
        for entry in self.entries:
            spends = [_picked(row, ("event", "spends", "open")) for row in entry["spends"]]
            account = json.dumps([_picked(entry, _ALIKE), spends])
            groups.setdefault(account, []).append(entry)
        return [(_together([entry["name"] for entry in group]), group) for group in groups.values()]

    @property
    def others(self) -> int:
        """The number of other runs that spent on the same data sets."""
        runs = {run["run"] for run in self._runs}
        return len(runs - {self.run})

    @property
    def who(self) -> list[str]:
        """Who spent on these data sets, on which machine."""
        return list(dict.fromkeys(f"{run['who']} on {run['host']}" for run in self._runs))

    @property
    def when(self) -> str:
        """The time of the first and the last spend."""
        if not self._runs:
            return ""
        first = _minute(min(run["first_at"] for run in self._runs))
        last = _minute(max(run["last_at"] for run in self._runs))
        return f"{first} UTC" if first == last else f"{first} to {last} UTC"

    @property
    def _runs(self) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = []
        for entry in self.entries:
            runs += entry["runs"]
        return runs


def _has(entry: Mapping[str, Any], run: str) -> bool:
    """Returns whether a run spent from an account."""
    return any(row["run"] == run for row in entry["runs"])


# Accounts with equal fields are shown as one.
_ALIKE = ("adjacency", "unit", "records", "budget", "delta", "headline")


def _picked(row: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    return [row[key] for key in keys]


def _report(ledger: pathlib.Path, names: Sequence[str] | None) -> dict[str, Any]:
    with Ledger(ledger, read_only=True) as opened:
        report = opened.report()
    entries = {entry["name"]: entry for entry in report["datasets"]}
    names = list(entries) if names is None else names
    if missing := [name for name in names if name not in entries]:
        raise ValueError(
            f"{shown(ledger)} has no {', '.join(map(repr, missing))}. It is not the ledger of "
            "this run."
        )
    return report | {"datasets": [entries[name] for name in names]}


def _together(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names) + (", each" if len(names) > 1 else "")
    return f"{names[0]} … {names[-1]} ({len(names)} alike), each"


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _spends(names: str, group: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a row for each kind of release. The labels are those of all accounts of the group."""
    first = group[0]
    for rows in zip(*(entry["spends"] for entry in group), strict=True):
        row = rows[0]
        event = SelfComposedDpEvent(from_json(json.dumps(row["event"])), row["spends"])
        alone = epsilon(event, delta=first["delta"], adjacency=first["adjacency"])
        yield [
            names,
            _labels(rows),
            f"{row['spends']} × {row['description']}",
            round_up(alone),
            f"{_minute(row['first_at'])} UTC",
            str(row["open"] or "none"),
        ]


def _labels(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first and the last label of some spends: "epoch 1 … epoch 9"."""
    labels: list[str] = []
    for row in rows:
        labels += filter(None, (row["first_label"], row["last_label"]))
    return " … ".join(dict.fromkeys((labels[0], labels[-1]))) if labels else ""


# --- The page -----------------------------------------------------------------------------------


def write(
    root: pathlib.Path,
    template: str,
    *,
    books: Books,
    released: Mapping[pathlib.Path, str],
    config: Any,
    versions: Mapping[str, str],
    audits: Sequence[Mapping[str, Any]] = (),
    **facts: Any,
) -> pathlib.Path:
    """Writes report.html from a template that extends report.html.jinja.

    Args:
      root: The workdir.
      template: The file in `PAGES`.
      books: The accounts.
      released: What each released file is, by its path.
      config: The settings of the run.
      versions: The versions of the libraries that ran last.
      audits: The attacks on releases, as the lifecycle keeps them.
      **facts: What the template shows besides.
    """
    accounts = []
    spends: list[list[str]] = []
    for names, group in books.groups:
        entry = group[0]
        account = {
            "names": names,
            "entry": entry,
            "verdict": verdict(entry),
            "audited": audited(audits, entry["name"]),
        }
        accounts.append(account)
        spends += _spends(names, group)
    units = {entry["unit"] for entry in books.entries}
    page = render_page(
        PAGES / template,
        **facts,
        books=books,
        accounts=accounts,
        audits=audits,
        spends=spends,
        unfinished=sum(len(entry["open"]) for entry in books.entries),
        unit=units.pop() if len(units) == 1 else "record",
        released=[_file(root, path, what) for path, what in released.items() if path.exists()],
        config=json.dumps(config, indent=1),
        versions=[f"{name} {version}" for name, version in versions.items()],
        interval=_interval,
        chance=_chance,
        Chart=Chart,
    )
    path = root / "report.html"
    write_durably(path, page)
    return path


def audited(audits: Sequence[Mapping[str, Any]], account: str) -> str:
    """Returns the worst verdict on a release about a data set. Bounds of several releases are not
    compared.
    """
    verdicts = {audit["verdict"] for audit in audits if account in audit["accounts"]}
    for word in ("VIOLATED", "cannot tell", "consistent"):
        if word in verdicts:
            return word
    return "none"


def _file(root: pathlib.Path, path: pathlib.Path, what: str) -> list[str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return [str(path.relative_to(root)), what, digest]


def _interval(share: float, count: int) -> str:
    """Returns an accuracy with its 95 % interval."""
    low, high = results.wilson(share, count)
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _chance(changes: Mapping[str, Any]) -> str:
    """Returns what the change of an accuracy on the same inputs means."""
    gained, lost = changes["gained"], changes["lost"]
    p = results.mcnemar(gained, lost)
    counts = f"{gained} answers became right and {lost} became wrong"
    if p >= 0.05:
        return (
            f"This change is inside the noise: {counts}, which chance alone explains (McNemar's "
            f"exact p = {p:.2g})."
        )
    better = "improvement" if gained > lost else "loss"
    return f"This {better} is larger than chance explains: {counts} (McNemar's exact p = {p:.1g})."
