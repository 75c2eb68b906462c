"""The chain of a ledger: a link per spend, a seal per dataset, and the head.

A hash is SHA-256, in hexadecimal digits, of the JSON text of a list. With ledger = the identity of
the file, a random text in its table `meta`:

* The terms of a dataset are hash([name, adjacency, unit, epsilon, delta, accounting, renyi_order,
  allow_unproven, created_at]). They never change.
* The seal of a dataset is hash([ledger, terms, records]). `records` may be declared later, once.
* The origin of the chain is hash(["jaxdp ledger", ledger]).
* The link of a spend is hash([the link before it or the origin, terms, id, partition, event as
  JSON, label, token, run, version, reserved_at, who, host]). The columns `status` and `finished_at`
  change, so they are left out. They change no number.
* The head is the text [[ledger.branch, number of the last spend, its link], hash of this list],
  filled with blanks to 256 bytes.

A link so authenticates its row and all rows before it.
"""

import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.files import parse_json
from jaxdp.privacy.damage import damaged

HEAD_BYTES = 256
# The hash takes them in this order, so neither names nor order may ever change.
TERMS = "name, adjacency, unit, epsilon, delta, accounting, renyi_order, allow_unproven, created_at"
_LINKED = "id, partition, json, label, token, run, version, reserved_at, who, host"
_LAST = "SELECT id, link FROM spends ORDER BY id DESC LIMIT 1"


@dataclasses.dataclass(frozen=True)
class Head:
    """The position of a ledger's last spend.

    Attributes:
        ledger: The ledger and the branch of its history.
        spend: The number of the last spend, or 0.
        link: The link of that spend, SHA-256 as hexadecimal digits.
    """

    ledger: str
    spend: int
    link: str


# --- Hashes -------------------------------------------------------------------------------------


def _digest(value: Any) -> str:
    # The blanks that Python puts into JSON are part of the format.
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def origin_of(ledger: str) -> str:
    """Returns the link before the first spend."""
    return _digest(["jaxdp ledger", ledger])


def terms_of(row: Mapping[str, Any]) -> str:
    """Returns a hash of a dataset's terms, which never change."""
    # By names and not by `tuple(row)`, because a query may have other columns.
    return _digest([row[name] for name in TERMS.split(", ")])


def seal_of(row: Mapping[str, Any], ledger: str) -> str:
    """Returns a hash of a dataset's terms and its declared number of records."""
    return _digest([ledger, terms_of(row), row["records"]])


def link_of(last_link: str, row: Mapping[str, Any], terms: str) -> str:
    """Returns the link of a spend behind the spend of `last_link`."""
    return _digest([last_link, terms, *(row[name] for name in _LINKED.split(", "))])


def schema_of(db: sqlite3.Connection) -> str:
    """Returns a hash of the tables, indices and triggers of a database."""
    rows = db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    ).fetchall()
    return _digest([list(row) for row in rows])


# --- Head ---------------------------------------------------------------------------------------


def head_text(head: Head) -> bytes:
    """Returns the content of a head file."""
    fields = list(dataclasses.astuple(head))
    text = json.dumps([fields, _digest(fields)])
    # Of one length, so that a shorter text needs no truncation, which would be a second write.
    return (text.ljust(HEAD_BYTES - 1) + "\n").encode()


def head_of(text: bytes, path: str, what: str = "head") -> Head:
    """Returns the head of a file's content. Raises LedgerDamaged for the ledger `path`.

    `what` is the word for the file: head or anchor.
    """
    try:
        # The check tells a torn write from a head that is only old.
        fields, check = parse_json(text)
        if check != _digest(fields):
            raise ValueError("its check differs.")
        return Head(*fields)
    except (ValueError, TypeError) as error:
        raise damaged(path, f"has a damaged {what}") from error


def last_head(db: sqlite3.Connection, ledger: str, branch: str) -> Head:
    """Returns the position of a database's last spend."""
    name = f"{ledger}.{branch}"
    row = db.execute(_LAST).fetchone()
    if row is None:
        return Head(name, 0, origin_of(ledger))
    return Head(name, row["id"], row["link"])


# --- Links --------------------------------------------------------------------------------------


def link_at(db: sqlite3.Connection, spend: int, origin: str) -> str | None:
    """Returns the link of a spend, the origin for spend 0, or None if there is no such spend."""
    row = db.execute("SELECT link FROM spends WHERE id = ?", (spend,)).fetchone()
    if row is not None:
        link: str | None = row["link"]
        return link
    # Spend 0 is the start of the history, before any spend.
    return origin if spend == 0 else None


def relinked(db: sqlite3.Connection, ledger: str) -> Iterator[tuple[sqlite3.Row, str]]:
    """Yields each spend with the link that follows from all spends until it."""
    # Hashed once a dataset, and not once a spend.
    terms = {row["id"]: terms_of(row) for row in db.execute(f"SELECT id, {TERMS} FROM datasets")}
    link = origin_of(ledger)
    for row in db.execute(
        "SELECT spends.id, dataset, partition, json, label, token, run, version, reserved_at, "
        "who, host, link FROM spends JOIN events ON events.id = event ORDER BY spends.id"
    ):
        link = link_of(link, row, terms[row["dataset"]])
        yield row, link


def find_broken_link(db: sqlite3.Connection, ledger: str) -> str | None:
    """Returns why the spends of a database are not one chain, in words, or None."""
    # Spends are never deleted, so their numbers have no gap.
    for number, (row, link) in enumerate(relinked(db, ledger), start=1):
        if row["id"] != number:
            return f"has lost history: spend {number} is missing"
        if row["link"] != link:
            return f"is damaged: spend {row['id']} or an earlier one was changed"
    return None
