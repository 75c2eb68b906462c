"""What a ledger's database must agree with in itself. It is compared whenever a file is opened."""

import sqlite3

from jaxdp.privacy import chain, contacts
from jaxdp.privacy.events import from_json

_TOTALS = (
    "SELECT dataset, partition, event, spends, first_at, last_at, first_label, last_label "
    "FROM totals"
)
# What the table `totals` must hold, from the spends.
COUNTED_TOTALS = """
SELECT ends.dataset, ends.partition, ends.event, spends,
    old.reserved_at AS first_at, new.reserved_at AS last_at,
    old.label AS first_label, new.label AS last_label
FROM (SELECT dataset, partition, event, count(*) AS spends, min(id) AS first, max(id) AS last
    FROM spends GROUP BY dataset, partition, event) AS ends
JOIN spends AS old ON old.id = first JOIN spends AS new ON new.id = last
"""


def find_problem(db: sqlite3.Connection) -> str | None:
    """Returns why a database is inconsistent, in words that follow its path, or None."""
    try:
        # Torn pages first, because the other queries would read them.
        torn_page = find_torn_page(db)
        if torn_page is not None:
            return torn_page
        if db.execute("PRAGMA foreign_key_check").fetchone() is not None:
            return "is damaged: a spend has an unknown dataset or event"
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
        if not {"id", "branch"} <= meta.keys():
            return "is damaged: it has no ledger identity"
        if meta.get("schema") != chain.schema_of(db):
            return "is damaged: its tables differ from the original schema"
        # Terms may never change, and `records` only once, by the ledger itself.
        for row in db.execute(f"SELECT {chain.TERMS}, records, seal FROM datasets"):
            if row["seal"] != chain.seal_of(row, meta["id"]):
                name = repr(row["name"])
                return f"is damaged: the terms of dataset {name} differ from the registered ones"
        # No link covers the holds, which change no number. Their events must at least parse.
        for row in db.execute("SELECT json FROM holds"):
            from_json(row["json"])
        return (
            chain.find_broken_link(db, meta["id"])
            or contacts.find_broken_link(db, meta["id"])
            or find_unequal_total(db)
        )
    except (TypeError, ValueError, KeyError, OverflowError) as error:  # a value of the wrong type
        return f"is damaged: {type(error).__name__}, {error}"


def find_torn_page(db: sqlite3.Connection) -> str | None:
    """Returns what SQLite finds damaged in the file, in words, or None."""
    (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    return None if verdict == "ok" else f"is damaged: {verdict}"


def find_unequal_total(db: sqlite3.Connection) -> str | None:
    """Returns which dataset's totals are not the sums of its spends, in words, or None."""
    # In both directions: a total without spends is wrong too.
    for one, other in ((_TOTALS, COUNTED_TOTALS), (COUNTED_TOTALS, _TOTALS)):
        row = db.execute(f"SELECT * FROM ({one} EXCEPT {other}) LIMIT 1").fetchone()
        if row is None:
            continue
        name = db.execute("SELECT name FROM datasets WHERE id = ?", (row["dataset"],)).fetchone()
        return (
            f"is damaged: the totals of dataset {name and name[0]!r} are not the sums of its spends"
        )
    return None
