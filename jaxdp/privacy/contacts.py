"""Whom to ask about a data set: owner, purpose, contact and approver, with their history.

They are rows of the table `meta`, so files of earlier versions have room for them and earlier
versions of jaxdp open files that have them. Row number n has the key "contact n". Its value is a
JSON object with the data set, the four fields as they are from then on, the time, the user, the
host, the number and link of the ledger's last spend, and a link: SHA-256 of the link before it and
of everything in the row. So a row is changed, added in between or removed from the middle only if
all later links change. They change no number, so the head does not cover the newest row.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from jaxdp.files import parse_json

FIELDS = ("owner", "purpose", "contact", "approver")
_KEY = "contact "
_LONGEST = 500


def checked(**fields: Any) -> dict[str, str]:
    """Returns the fields that are not None. Raises TypeError or ValueError for an impossible one.

    "" is a field that is not known, or no longer.
    """
    texts: dict[str, str] = {}
    for name, text in fields.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a text or None, got {type(text).__name__} {text!r}.")
        if len(text) > _LONGEST or not text.isprintable():
            raise ValueError(
                f"{name} must be one line of at most {_LONGEST} printable characters, got {text!r}."
            )
        texts[name] = text.strip()
    return texts


def rows(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Returns the history of all data sets, the oldest row first."""
    stored = db.execute("SELECT key, value FROM meta WHERE key LIKE 'contact %'").fetchall()
    # As text, 10 would come before 2.
    stored.sort(key=lambda row: int(row["key"].removeprefix(_KEY)))
    return [
        {"number": int(row["key"].removeprefix(_KEY))} | parse_json(row["value"]) for row in stored
    ]


def current(history: Iterable[Mapping[str, Any]], name: str) -> dict[str, str]:
    """Returns the fields of a data set after a history of `rows`. A field without a row is ""."""
    fields = dict.fromkeys(FIELDS, "")
    for row in history:
        if row["dataset"] == name:
            fields = {field: row[field] for field in FIELDS}
    return fields


def append(
    db: sqlite3.Connection, ledger: str, name: str, changes: Mapping[str, str], **about: Any
) -> None:
    """Adds a row with some changed fields of a data set, in the caller's transaction.

    Args:
        db: The ledger's database.
        ledger: The identity of the ledger.
        name: The data set.
        changes: The fields that change.
        **about: When, by whom and after which spend, for the row.
    """
    history = rows(db)
    row = {"dataset": name, **current(history, name), **changes, **about}
    # The first link depends on the ledger, so that rows of another one do not fit.
    row["link"] = _link(history[-1]["link"] if history else ledger, row)
    key = f"{_KEY}{len(history) + 1}"
    db.execute("INSERT INTO meta VALUES (?, ?)", (key, json.dumps(row)))


def _link(before: str, row: Mapping[str, Any]) -> str:
    # "number" is a part of the key, and "link" is the result.
    linked = {key: value for key, value in row.items() if key not in ("number", "link")}
    text = json.dumps([before, linked], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_broken_link(db: sqlite3.Connection, ledger: str) -> str | None:
    """Returns why the rows are not one chain, in words that follow the ledger's path, or None."""
    link = ledger
    for number, row in enumerate(rows(db), start=1):
        link = _link(link, row)
        if row["number"] != number or row["link"] != link:
            return (
                f"is damaged: row {number} of owners and contacts, or an earlier one, was changed"
            )
    return None
