"""The tables of a ledger's file, and the migration of older files.

| table | content |
|---|---|
| `meta` | by key: `id` and `branch` of the ledger, `schema` (hash of the tables), who made it |
| `datasets` | the terms of each dataset and their seal |
| `events` | the canonical JSON of each event, once |
| `spends` | one row per spend, with its link |
| `totals` | sums over `spends` by dataset, partition and event |
| `holds` | room that is held, with the time at which it lapses |

The partition '' is the whole dataset. Times are ISO texts in UTC, except `lapses`, which is seconds
since 1970. SQLite's `application_id` is "jdp1", and its `user_version` is the version of the
schema. Version 1 had no `holds`, no links and seals, and no `records`, `who` and `host`.

A change of any byte of these statements changes the `schema` hash, and old files no longer open.
"""

import secrets
import sqlite3

from jaxdp.privacy import chain
from jaxdp.privacy.damage import damaged
from jaxdp.privacy.integrity import find_torn_page, find_unequal_total
from jaxdp.privacy.times import now
from jaxdp.version import __version__

SCHEMA_VERSION = 2
_APPLICATION_ID = 0x6A647031  # "jdp1" distinguishes a ledger from other SQLite files.

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE datasets (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    adjacency TEXT NOT NULL,
    unit TEXT NOT NULL,
    epsilon REAL,
    delta REAL,
    accounting TEXT NOT NULL,
    renyi_order REAL,
    allow_unproven INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    records INTEGER,
    seal TEXT
);
CREATE TABLE events (id INTEGER PRIMARY KEY, json TEXT NOT NULL UNIQUE);
CREATE TABLE spends (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    dataset INTEGER NOT NULL REFERENCES datasets (id),
    partition TEXT NOT NULL,
    event INTEGER NOT NULL REFERENCES events (id),
    label TEXT NOT NULL,
    token TEXT,
    status TEXT NOT NULL CHECK (status IN ('reserved', 'committed', 'failed')),
    run TEXT NOT NULL,
    version TEXT NOT NULL,
    reserved_at TEXT NOT NULL,
    finished_at TEXT,
    who TEXT NOT NULL DEFAULT '',
    host TEXT NOT NULL DEFAULT '',
    link TEXT
);
CREATE UNIQUE INDEX spends_token ON spends (dataset, token) WHERE token IS NOT NULL;
CREATE INDEX spends_open ON spends (dataset) WHERE status <> 'committed';
CREATE TABLE totals (
    dataset INTEGER NOT NULL REFERENCES datasets (id),
    partition TEXT NOT NULL,
    event INTEGER NOT NULL REFERENCES events (id),
    spends INTEGER NOT NULL,
    first_at TEXT NOT NULL,
    last_at TEXT NOT NULL,
    first_label TEXT NOT NULL,
    last_label TEXT NOT NULL,
    PRIMARY KEY (dataset, partition, event)
) WITHOUT ROWID;
"""
_HOLDS = """
CREATE TABLE IF NOT EXISTS holds (
    id TEXT NOT NULL,
    dataset INTEGER NOT NULL REFERENCES datasets (id),
    json TEXT NOT NULL,
    key TEXT,
    label TEXT NOT NULL,
    run TEXT NOT NULL,
    seconds REAL NOT NULL,
    lapses REAL NOT NULL,
    PRIMARY KEY (id, dataset)
) WITHOUT ROWID;
"""
# Version 1 has no links. A program that opened the file before its migration must stop writing.
_GUARD = (
    "\nCREATE TRIGGER spends_linked BEFORE INSERT ON spends WHEN NEW.link IS NULL\n"
    "BEGIN SELECT RAISE(ABORT, 'a newer jaxdp migrated this ledger; start this program again with "
    "that version'); END;\n"
)
_MIGRATION = """
ALTER TABLE datasets ADD COLUMN records INTEGER;
ALTER TABLE datasets ADD COLUMN seal TEXT;
ALTER TABLE spends ADD COLUMN who TEXT NOT NULL DEFAULT '';
ALTER TABLE spends ADD COLUMN host TEXT NOT NULL DEFAULT '';
ALTER TABLE spends ADD COLUMN link TEXT;
"""


def fill(db: sqlite3.Connection) -> None:
    """Makes an empty database a new ledger."""
    db.execute("BEGIN IMMEDIATE")
    # One by one, because `executescript` commits first.
    for statement in (*_SCHEMA.split(";\n"), _HOLDS, _GUARD):
        db.execute(statement)
    ledger = secrets.token_hex(16)
    _describe(db, ledger, created_at=now(), created_by=f"jaxdp {__version__}")
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")


def migrate(db: sqlite3.Connection, path: str) -> None:
    """Adds version 2 to a database of version 1, in the caller's transaction.

    Raises LedgerDamaged if unsound.
    """
    problem = find_torn_page(db) or find_unequal_total(db)
    if problem is not None:
        raise damaged(path, problem)
    for statement in (*_MIGRATION.split(";\n"), _HOLDS, _GUARD):
        db.execute(statement)
    ledger = secrets.token_hex(16)
    _describe(db, ledger, migrated_at=now(), migrated_by=f"jaxdp {__version__}")
    for row in db.execute(f"SELECT id, {chain.TERMS}, records FROM datasets").fetchall():
        seal = chain.seal_of(row, ledger)
        db.execute("UPDATE datasets SET seal = ? WHERE id = ?", (seal, row["id"]))
    # Spends of version 1 have numbers without gaps, because none was deleted and a failed insert
    # takes no number.
    # Read as a whole before the rows change.
    for row, link in list(chain.relinked(db, ledger)):
        db.execute("UPDATE spends SET link = ? WHERE id = ?", (link, row["id"]))
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _describe(db: sqlite3.Connection, ledger: str, **origin: str) -> None:
    about = {**origin, "id": ledger, "branch": "0", "schema": chain.schema_of(db)}
    db.executemany("INSERT INTO meta VALUES (?, ?)", about.items())


def version_of(db: sqlite3.Connection, path: str) -> int:
    """Returns the schema version of a ledger. Raises ValueError for another file."""
    application = pragma(db, "application_id")
    version = pragma(db, "user_version")
    if not application and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise damaged(
            path,
            "has no tables: its `-wal` file is missing, or it is another program's file",
            gone=True,
        )
    if application != _APPLICATION_ID:
        raise ValueError(f"path {path!r} is an SQLite file, but not a ledger. Choose another path.")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"ledger {path!r} has schema version {version}, but jaxdp {__version__} knows up to "
            f"{SCHEMA_VERSION}. Upgrade jaxdp to use it."
        )
    return version


def pragma(db: sqlite3.Connection, name: str) -> int:
    """Returns the value of a pragma that is an integer."""
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
