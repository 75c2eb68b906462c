"""The accounts of a report: those of ledgers, or the copy of them that the last report kept."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.files import read_json, shown, understood, write_json
from jaxdp.privacy import Ledger, SelfComposedDpEvent, epsilon
from jaxdp.privacy.contacts import FIELDS
from jaxdp.privacy.events import from_json
from jaxdp.privacy.explanations import marginals_of
from jaxdp.report.html import round_up
from jaxdp.report.past import Past, state_of
from jaxdp.report.verdicts import verdict
from jaxdp.version import __version__

_NUMBER = (float, type(None))
_TEXT = (str, type(None))
_RUN = {
    "who": _TEXT,
    "host": _TEXT,
    "run": _TEXT,
    "version": _TEXT,
    "first_at": str,
    "last_at": str,
}
_SPEND = {
    "first_label": _TEXT,
    "last_label": _TEXT,
    "event": object,
    "spends": int,
    "description": str,
    "first_at": str,
    "open": (int, type(None)),
}
_ACCOUNT = {
    "name": str,
    "adjacency": str,
    "unit": str,
    "headline": str,
    "delta": float,
    "rows": int,
    "records": (int, type(None)),
    "budget": _NUMBER,
    "proven_epsilon": _NUMBER,
    "remaining": _NUMBER,
    "open": list,
    "runs": [_RUN],
    "spends": [_SPEND],
}
_CONTENT = {"head": (dict, type(None)), "datasets": [_ACCOUNT]}
_STATE = {
    "ledger": str,
    "link": str,
    "spend": int,
    "contacts": int,
    "records": {str: (int, type(None))},
    "unfinished": [int],
}
STATES = [_STATE]


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
    """The accounts of a report.

    Attributes:
      entries: The accounts, as `Ledger.report` has them.
      head: The ledger, number and link of the last spend, if there is one ledger.
      shared: The path of a ledger outside of the workdir, or "".
      runs: The words for the runs of this workdir in that ledger.
      states: What `jaxdp.report.past.state_of` returns for each ledger. None, if an earlier release
        made the copy of the accounts.
      public: Whether the page leaves out who spent, when and where.
    """

    def __init__(self, content: Mapping[str, Any]):
        """Takes accounts from plain data, as `accounts_of` returns them.

        Raises:
          TypeError, ValueError: The data is damaged.
        """
        check(content, _CONTENT, "ledger")
        self.head = content["head"]
        self.shared = content.get("shared", "")
        self.runs = content.get("runs", [])
        self.states = content.get("states")
        self.public = bool(content.get("public", False))
        if self.states is not None:
            check(self.states, STATES, "ledger.states")
        if self.head is not None:
            check(self.head, {"spend": int, "link": str}, "ledger.head")
        self.entries: list[dict[str, Any]] = []
        for entry in content["datasets"]:
            # Copies of earlier releases name nobody.
            people = {field: str(entry.get(field) or "") for field in FIELDS}
            self.entries.append(entry | people)
            verdict(entry)
            for row in entry["spends"]:
                from_json(json.dumps(row["event"]))

    @classmethod
    def read(
        cls,
        root: pathlib.Path,
        ledgers: Mapping[str, pathlib.Path],
        *,
        remedy: str,
        names: Sequence[str] | None = None,
        runs: Sequence[str] = (),
        past: Past | None = None,
    ) -> "Books":
        """Reads the accounts of ledgers, and keeps them in ledger.json. Without a ledger it reads
        that copy.

        Args:
          root: The workdir.
          ledgers: The ledgers by the words that their accounts' names begin with.
          remedy: What to do about a damaged copy.
          names: The accounts to read, by default all.
          runs: The words for the runs of this workdir in a ledger that other workdirs share. Of
            such a ledger only the accounts are read from which this workdir spent.
          past: The accounts as they were when a page was written. Nothing is written then.

        Raises:
          ValueError: A ledger lacks an account, or the copy is damaged.
        """
        content = accounts_of(ledgers, names, runs, past)
        if past is not None:
            copied = json.loads(json.dumps(content))
            return cls(copied | {"shared": past.shared, "runs": list(runs)})
        copy = root / "ledger.json"
        if any(path.exists() for path in ledgers.values()):
            write_json(copy, content)
        if copy.exists():  # It is read in any case, so that both ways give the same page.
            content = checked(copy, _CONTENT, "ledger", remedy=remedy)
        outside = [path for path in ledgers.values() if not path.is_relative_to(root)]
        shared = os.fspath(outside[0]) if outside else ""
        with understood(copy, remedy):
            return cls(content | {"shared": shared, "runs": list(runs)})

    @classmethod
    def empty(cls) -> "Books":
        """Returns the accounts of a model whose data is all public."""
        return cls({"head": None, "datasets": [], "states": [], "public": True})

    def anonymous(self) -> "Books":
        """Returns the same accounts without who spent, when and where, without the approver, and
        without paths.
        """
        entries = []
        for entry in self.entries:
            spends = [row | {"first_at": "", "last_at": ""} for row in entry["spends"]]
            # A person approves. Owner and contact may be an office, whom readers must know to ask.
            entries.append(entry | {"runs": [], "spends": spends, "approver": ""})
        content = {"head": self.head, "datasets": entries, "states": self.states, "public": True}
        return Books(content)

    def only(self, names: Sequence[str]) -> "Books":
        """Returns the accounts of some data sets."""
        entries = [entry for entry in self.entries if entry["name"] in names]
        payments = {payment["id"] for entry in entries for payment in entry["open"]}
        states = []
        for state in self.states or []:
            records = {name: state["records"][name] for name in names if name in state["records"]}
            unfinished = [number for number in state["unfinished"] if number in payments]
            states.append({**state, "records": records, "unfinished": unfinished})
        content = {"head": self.head, "datasets": entries}
        content["states"] = None if self.states is None else states
        return Books(content | {"shared": self.shared, "runs": self.runs, "public": self.public})

    @property
    def origin(self) -> str:
        """What a page says about itself, and a digest of it, in JSON.

        `jaxdp report --verify PAGE` reads it. The digest shows damage, not intent.
        """
        fields = {"jaxdp": __version__, "ledgers": self.states, "shared": self.shared}
        fields["public"] = self.public
        return json.dumps([fields, digest_of(fields)])

    @property
    def shown_fields(self) -> list[str]:
        """The fields that say whom to ask. A public page names no approver."""
        return [field for field in FIELDS if field != "approver" or not self.public]

    @property
    def people(self) -> list[list[str]]:
        """A row for each data set with one of the `shown_fields`."""
        rows = []
        for entry in self.entries:
            fields = [entry[field] for field in self.shown_fields]
            if any(fields):
                rows.append([entry["name"], *(field or "not recorded" for field in fields)])
        return rows

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
        return len(runs - set(self.runs))

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


# Accounts with equal fields are shown as one.
_ALIKE = ("adjacency", "unit", "records", "budget", "delta", "headline", *FIELDS)


def digest_of(fields: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _picked(row: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    return [row[key] for key in keys]


def accounts_of(
    ledgers: Mapping[str, pathlib.Path | Ledger],
    names: Sequence[str] | None = None,
    runs: Sequence[str] = (),
    past: Past | None = None,
) -> dict[str, Any]:
    """Returns the accounts of ledgers as plain data, with the arguments of `Books.read`.

    A ledger that does not exist has none.
    """
    heads: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    datasets: list[dict[str, Any]] = []
    for prefix, ledger in ledgers.items():
        if isinstance(ledger, Ledger):
            report = ledger.report()
        elif past is not None:
            report = past.report(ledger)
        elif ledger.exists():
            with Ledger(ledger, read_only=True) as opened:
                report = opened.report()
        else:
            continue
        heads.append(report["head"])
        entries = list(_chosen(report, names, runs))
        states.append(state_of(report, entries))
        for entry in entries:
            datasets.append(entry | {"name": prefix + entry["name"]})
    head = heads[0] if len(heads) == 1 else None
    return {"head": head, "datasets": datasets, "states": states}


def _chosen(
    report: Mapping[str, Any], names: Sequence[str] | None, runs: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the accounts with some names. With runs, those from which one of them spent."""
    entries = {entry["name"]: entry for entry in report["datasets"]}
    names = list(entries) if names is None else names
    if missing := [name for name in names if name not in entries]:
        raise ValueError(
            f"{shown(report['path'])} has no {', '.join(map(repr, missing))}. It is not the "
            "ledger of this run."
        )
    for name in names:
        spenders = {row["run"] for row in entries[name]["runs"]}
        if not runs or spenders & set(runs):
            yield entries[name]


def _together(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names) + (", each" if len(names) > 1 else "")
    return f"{names[0]} … {names[-1]} ({len(names)} alike), each"


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def spends_of(names: str, group: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a row for each kind of release. The labels are those of all accounts of the group."""
    first = group[0]
    marginals = marginals_of(first)
    for place, rows in enumerate(zip(*(entry["spends"] for entry in group), strict=True)):
        row = rows[0]
        event = SelfComposedDpEvent(from_json(json.dumps(row["event"])), row["spends"])
        alone = epsilon(event, delta=first["delta"], adjacency=first["adjacency"])
        when = "not published"
        if row["first_at"]:
            when = f"{_minute(row['first_at'])} UTC"
        yield [
            names,
            _labels(rows),
            f"{row['spends']} × {row['description']}",
            round_up(alone),
            round_up(marginals[place]) if place in marginals else "not computed",
            when,
            str(row["open"] or "none"),
        ]


def _labels(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first and the last label of some spends: "epoch 1 … epoch 9"."""
    labels: list[str] = []
    for row in rows:
        labels += filter(None, (row["first_label"], row["last_label"]))
    return " … ".join(dict.fromkeys((labels[0], labels[-1]))) if labels else ""
