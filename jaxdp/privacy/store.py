"""The ledger's file: how it is made, locked, read, copied and checked.

`ledger.sqlite` is an SQLite database with the datasets, the events, and one row per spend.
`ledger.sqlite.head` beside it is one line with the number of spends and the link of the last one.

* Every spend carries a link: SHA-256 of the previous link, the fields of its row that never change,
  and the terms of its dataset. So each row authenticates all rows before it.
* The head is written after the commit and before `spend` returns. No body runs before both are
  done. So a head that is behind shows a crash in between, and a head that is ahead shows that the
  database lost spends.
* `totals` holds sums over `spends`, so that queries take time independent of the number of spends.
  Opening the file compares them with `spends`.
* A writer holds an exclusive lock on the head. The system queues waiting writers.

A hash without a key shows damage and loss. It does not stop somebody who rewrites both files on
purpose. The heads in the notes of workdirs and in backups do, if that person cannot change them.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import getpass
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxdp.files import parse_json, shown, sync_folder, write_durably
from jaxdp.privacy.events import from_json
from jaxdp.version import __version__

SCHEMA_VERSION = 2
BUSY_SECONDS = 60.0
_APPLICATION_ID = 0x6A647031  # "jdp1" distinguishes a ledger from other SQLite files.
_HEAD_BYTES = 256

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
_GUARD = """
CREATE TRIGGER spends_linked BEFORE INSERT ON spends WHEN NEW.link IS NULL
BEGIN SELECT RAISE(ABORT, 'a newer jaxdp migrated this ledger; start this program again with that version'); END;
"""
_MIGRATION = """
ALTER TABLE datasets ADD COLUMN records INTEGER;
ALTER TABLE datasets ADD COLUMN seal TEXT;
ALTER TABLE spends ADD COLUMN who TEXT NOT NULL DEFAULT '';
ALTER TABLE spends ADD COLUMN host TEXT NOT NULL DEFAULT '';
ALTER TABLE spends ADD COLUMN link TEXT;
"""

_LAST = "SELECT id, link FROM spends ORDER BY id DESC LIMIT 1"
_TERMS = (
    "name, adjacency, unit, epsilon, delta, accounting, renyi_order, allow_unproven, created_at"
)


class LedgerDamaged(ValueError):
    """A ledger that does not hold everything that was spent. Nothing was charged, and no run may
    use it.
    """


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


def damaged(path: str | os.PathLike[str], what: str, *, gone: bool = False) -> LedgerDamaged:
    """Returns the error for a ledger that must not be used. `gone` means that nothing of it is
    left.
    """
    path, quoted = shown(path), repr(os.fspath(path))
    older = f"`jaxdp ledger accept {path}` makes an intact older copy valid"
    last = "delete both, and a new ledger is made" if gone else older
    return LedgerDamaged(
        f"ledger {quoted} {shown(what).removesuffix('.')}. It would under-count, so it is not "
        f"used. Restore `{path}` and `{path}.head` from a backup. If no better copy exists, "
        f"{last}. Runs that were charged since then charge it again when they are resumed in their "
        "workdirs."
    )


# A fork copies a lock that another thread holds, and not the thread that would release it.
_STORES: "weakref.WeakSet[Store]" = weakref.WeakSet()


def _renew_locks() -> None:
    for store in _STORES:
        store.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


class Store:
    """One open ledger file, or ":memory:", shared by the threads of a process. Its errors are the
    errors of `Ledger`.

    With `read_only` it writes nothing to the file or beside it, and takes no lock.
    """

    def __init__(self, path: str, *, read_only: bool = False):
        self.path, self.read_only, self.lock = path, read_only, threading.RLock()
        _STORES.add(self)
        self._in_memory = path == ":memory:"
        self._head_path, self._head_file = pathlib.Path(f"{path}.head"), -1
        if not self._in_memory and not pathlib.Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"path {path!r} lies in a directory that does not exist. Create the directory "
                "first."
            )
        self._open()

    # --- Opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        self._pid = os.getpid()
        self._seen: Head | None = None
        with contextlib.ExitStack() as files:
            try:
                if self._in_memory:
                    self._connect(files, ":memory:")
                    _fill(self.db)
                    self._check(None, new=True)
                elif self.read_only:
                    self._open_to_read(files)
                else:
                    self._open_to_write(files)
            except UnicodeDecodeError as error:
                raise damaged(self.path, f"is damaged: {error}") from error
            except sqlite3.Error as error:
                if _is_damage(error) and (
                    self._head_path.exists() or "not a database" not in str(error)
                ):
                    raise damaged(self.path, f"is damaged: {error}") from error
                raise ValueError(
                    f"path {self.path!r} cannot be opened as a ledger: {shown(error)}."
                ) from error
            self.close = weakref.finalize(self, files.pop_all().close)

    def _connect(self, files: contextlib.ExitStack, path: str) -> None:
        self.db = files.enter_context(contextlib.closing(_connection(path)))

    def _open_to_write(self, files: contextlib.ExitStack) -> None:
        path, wal = pathlib.Path(self.path), pathlib.Path(f"{self.path}-wal")
        in_use = (
            self._head_path.exists()
        )  # first, because a process that makes both makes the head last
        if not path.exists():
            if in_use:
                raise damaged(path, "is missing: only its head exists, so it was in use", gone=True)
            _create(path)
        _check_size(path)
        log = b""
        with contextlib.suppress(FileNotFoundError):
            log = wal.read_bytes()
        try:
            self._connect(files, self.path)
            _version(self.db, self.path)
            os.close(os.open(self._head_path, os.O_RDWR | os.O_CREAT, 0o666))
            with self._locked():
                old = (
                    _version(self.db, self.path) < SCHEMA_VERSION
                )  # another process may have migrated it
                if old:
                    self._migrate()
                self._check(self._read_head(), new=old)
                self._write_head()
                for left in path.parent.glob(
                    f".{path.name}.new-*"
                ):  # from processes that died while making it
                    left.unlink(missing_ok=True)
        except (LedgerDamaged, sqlite3.Error):
            # SQLite deletes a log when it closes the file. Its unread part may be needed.
            if log and not (kept := pathlib.Path(f"{wal}.kept")).exists():
                kept.write_bytes(log)
            raise

    def _open_to_read(self, files: contextlib.ExitStack) -> None:
        path = _existing(self.path)
        seen = self._read_head()  # first, because the database may grow meanwhile
        try:
            self._connect(files, f"{path.absolute().as_uri()}?mode=ro")
            _pragma(self.db, "schema_version")
        except (
            sqlite3.OperationalError
        ):  # SQLite must write beside the file, but the folder is read-only
            if os.access(path.absolute().parent, os.W_OK):
                raise
            folder = files.enter_context(tempfile.TemporaryDirectory())
            for suffix in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(f"{path}{suffix}", f"{folder}/copy{suffix}")
            self._connect(files, f"{folder}/copy")
        if _version(self.db, self.path) < SCHEMA_VERSION:
            old = self.db
            self._connect(files, ":memory:")
            old.backup(self.db)
            _migrate(self.db, self.path)
        self._check(seen, new=True)

    def _migrate(self) -> None:
        """Migrates a file of version 1 to this version. An unchanged copy stays beside it."""
        kept = pathlib.Path(f"{self.path}.version1")
        if not kept.exists():
            _copy(self.db, kept)
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            _migrate(self.db, self.path)

    def _check(self, head: Head | None, *, new: bool) -> None:
        """Raises LedgerDamaged unless the file agrees with itself and its head. A `new` one may
        have no head.
        """
        with self.db:
            self.db.execute("BEGIN")  # all queries see one instant
            if (problem := find_problem(self.db)) is None:
                meta = dict(self.db.execute("SELECT key, value FROM meta").fetchall())
                self.identity, self._name = meta["id"], f"{meta['id']}.{meta['branch']}"
                self._origin = _origin(self.identity)
                if head is not None:
                    problem = self._compared(head)
                elif not new and self._last().spend:
                    problem = "has no head beside it, which would show whether its last spends are missing"
        if problem is not None:
            raise damaged(self.path, problem)

    # --- Transactions ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(
        self, mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE"
    ) -> Iterator[sqlite3.Connection]:
        """Yields the connection inside one transaction. IMMEDIATE waits for the write lock."""
        with self.lock:
            if self._pid != os.getpid():
                self._after_fork()
            try:
                with self._locked() if mode == "IMMEDIATE" else contextlib.nullcontext():
                    self.db.execute(f"BEGIN {mode}")
                    if mode == "IMMEDIATE":
                        self._check_head()
                    yield self.db
                    self.db.execute("COMMIT")
                    if mode == "IMMEDIATE":
                        self._write_head()
            except BaseException as error:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error) and _is_damage(error):
                    raise damaged(self.path, f"is damaged: {error}") from error
                if isinstance(error, sqlite3.OperationalError):
                    raise OSError(
                        f"ledger {self.path!r} cannot be read or written: {shown(error)}. "
                        "Everything that was reserved in it still counts. Free space on its disk, "
                        "or wait for the process that holds it, and try again."
                    ) from error
                raise

    def _after_fork(self) -> None:
        if self._in_memory:
            raise RuntimeError(
                "an in-memory ledger cannot be shared with a forked process. Open a file instead."
            )
        # SQLite forbids use of the inherited connection, which the parent owns.
        self.close.detach()
        self._inherited = self.db
        self._open()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self.read_only:
            raise ValueError(
                f"ledger {self.path!r} was opened with read_only=True. Open it without to write."
            )
        if self._in_memory:
            yield
            return
        try:
            self._head_file = _acquire(self._head_path)
        except FileNotFoundError as error:
            raise damaged(
                self.path, "has lost its head, the file that records its last spend"
            ) from error
        try:
            yield
        finally:
            fcntl.flock(self._head_file, fcntl.LOCK_UN)
            os.close(self._head_file)

    # --- Head and links --------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The position of the ledger's last spend."""
        with self.transaction("DEFERRED"):
            return self._last()

    @property
    def has_head(self) -> bool:
        """Whether a head lies beside the database."""
        return self._head_path.exists()

    def contains(self, head: Head) -> bool | None:
        """Returns whether the ledger's history contains `head`, or None if `head` is of another
        ledger or branch.
        """
        with self.transaction("DEFERRED"):
            return None if head.ledger != self._name else self._link_at(head.spend) == head.link

    def seal(self, name: str) -> None:
        """Seals the terms of a dataset, in the caller's transaction."""
        row = self.db.execute("SELECT * FROM datasets WHERE name = ?", (name,)).fetchone()
        self.db.execute(
            "UPDATE datasets SET seal = ? WHERE id = ?", (_seal(row, self.identity), row["id"])
        )

    def append(
        self, dataset: int, partition: str, json: str, label: str, token: str | None, run: str
    ) -> int:
        """Writes a reservation, its link and its total, in the caller's transaction. Returns its
        number.
        """
        self.db.execute("INSERT INTO events (json) VALUES (?) ON CONFLICT DO NOTHING", (json,))
        (event,) = self.db.execute("SELECT id FROM events WHERE json = ?", (json,)).fetchone()
        terms = self.db.execute("SELECT * FROM datasets WHERE id = ?", (dataset,)).fetchone()
        last, (who, host), at = self._last(), _author(), now()
        row = {
            "id": last.spend + 1,
            "partition": partition,
            "json": json,
            "label": label,
            "token": token,
            "run": run,
        }
        row |= {"version": __version__, "reserved_at": at, "who": who, "host": host}
        row |= {"link": _link(last.link, row, terms_of(terms)), "dataset": dataset, "event": event}
        self.db.execute(
            "INSERT INTO spends (id, dataset, partition, event, label, token, status, run, "
            "version, reserved_at, who, host, link) VALUES (:id, :dataset, :partition, :event, "
            ":label, :token, 'reserved', :run, :version, :reserved_at, :who, :host, :link)",
            row,
        )
        self.db.execute(
            "INSERT INTO totals VALUES (?, ?, ?, 1, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "spends = spends + 1, last_at = excluded.last_at, last_label = excluded.last_label",
            (dataset, partition, event, at, at, label, label),
        )
        return last.spend + 1

    def _last(self) -> Head:
        row = self.db.execute(_LAST).fetchone()
        return Head(self._name, *(row or (0, self._origin)))

    def _link_at(self, spend: int) -> str | None:
        row = self.db.execute("SELECT link FROM spends WHERE id = ?", (spend,)).fetchone()
        return row["link"] if row else self._origin if spend == 0 else None

    def _compared(self, head: Head) -> str | None:
        """Returns why the database's history does not contain `head`, or None."""
        last = self._last()
        if head.ledger != self._name:
            return "does not belong to the head beside it"
        if head.spend > last.spend:
            return f"has lost history: it ends with spend {last.spend}, and its head has seen spend {head.spend}"
        if self._link_at(head.spend) != head.link:
            return f"has lost history: its spend {head.spend} is not the one that its head has seen"
        return None

    def _check_head(self) -> None:
        """Raises LedgerDamaged if the database lacks spends that the head has seen, as after a lost
        -wal file.
        """
        if self._in_memory:
            return
        head = self._read_head()
        if head is None:
            raise damaged(self.path, "has lost its head, the file that records its last spend")
        if head != self._last() and (problem := self._compared(head)) is not None:
            raise damaged(self.path, problem)
        self._seen = head

    def _read_head(self) -> Head | None:
        """Returns the head beside the database, or None if it is missing or empty."""
        try:
            file = self._head_file if not self.read_only else os.open(self._head_path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            text = os.pread(file, 2 * _HEAD_BYTES, 0)
        finally:
            if self.read_only:
                os.close(file)
        return _head_of(text, self.path) if text else None

    def _write_head(self) -> None:
        """Writes the position of the last spend. A head that stays behind because the process dies
        is legal.
        """
        last = self._last()
        if last == self._seen or self._in_memory:
            return
        try:
            os.pwrite(self._head_file, _head_text(last), 0)
        except OSError as error:
            raise OSError(
                f"the head of ledger {self.path!r} cannot be written: {error}. The reservation "
                "counts, but its body does not run. Repair the disk, and try again."
            ) from error
        # After the checkpoint, a copy of the database without its -wal file is complete.
        self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._seen = last

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the ledger with its head, durably and at one instant. Others may spend
        meanwhile.
        """
        target = pathlib.Path(path)
        if target.exists() or pathlib.Path(f"{target}.head").exists():
            raise ValueError(
                f"path {os.fspath(path)!r} exists. A backup replaces nothing. Choose another path."
            )
        if not target.absolute().parent.is_dir():
            raise ValueError(
                f"path {os.fspath(path)!r} lies in a directory that does not exist. Create it "
                "first."
            )
        with self.transaction("DEFERRED") as db:
            head = self._last()  # first, so that the copy is of this instant
            _copy(db, target)
        write_durably(pathlib.Path(f"{target}.head"), _head_text(head))


# --- Damage -------------------------------------------------------------------------------------


def find_problem(db: sqlite3.Connection) -> str | None:
    """Returns why a database is inconsistent, in words that follow its path, or None."""
    try:
        if (torn := _torn_page(db)) is not None:
            return torn
        if db.execute("PRAGMA foreign_key_check").fetchone() is not None:
            return "is damaged: a spend has an unknown dataset or event"
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
        if not {"id", "branch"} <= meta.keys():
            return "is damaged: it has no ledger identity"
        if meta.get("schema") != _schema(db):
            return "is damaged: its tables differ from the original schema"
        for row in db.execute(f"SELECT {_TERMS}, records, seal FROM datasets"):
            if row["seal"] != _seal(row, meta["id"]):
                return f"is damaged: the terms of dataset {row['name']!r} differ from the registered ones"
        for row in db.execute("SELECT json FROM holds"):
            from_json(row["json"])
        return _broken_link(db, meta["id"]) or _unequal_total(db)
    except (TypeError, ValueError, KeyError, OverflowError) as error:  # a value of the wrong type
        return f"is damaged: {type(error).__name__}, {error}"


def _torn_page(db: sqlite3.Connection) -> str | None:
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    return None if found == "ok" else f"is damaged: {found}"


def _relinked(db: sqlite3.Connection, ledger: str) -> Iterator[tuple[sqlite3.Row, str]]:
    terms = {row["id"]: terms_of(row) for row in db.execute(f"SELECT id, {_TERMS} FROM datasets")}
    link = _origin(ledger)
    for row in db.execute(
        "SELECT spends.id, dataset, partition, json, label, token, run, version, reserved_at, "
        "who, host, link FROM spends JOIN events ON events.id = event ORDER BY spends.id"
    ):
        link = _link(link, row, terms[row["dataset"]])
        yield row, link


def _broken_link(db: sqlite3.Connection, ledger: str) -> str | None:
    for expected, (row, link) in enumerate(_relinked(db, ledger), start=1):
        if row["id"] != expected:
            return f"has lost history: spend {expected} is missing"
        if row["link"] != link:
            return f"is damaged: spend {row['id']} or an earlier one was changed"
    return None


def _unequal_total(db: sqlite3.Connection) -> str | None:
    for one, other in ((_TOTALS, _COUNTED), (_COUNTED, _TOTALS)):
        row = db.execute(f"SELECT * FROM ({one} EXCEPT {other}) LIMIT 1").fetchone()
        if row is not None:
            name = db.execute(
                "SELECT name FROM datasets WHERE id = ?", (row["dataset"],)
            ).fetchone()
            return f"is damaged: the totals of dataset {name and name[0]!r} are not the sums of its spends"
    return None


_TOTALS = "SELECT dataset, partition, event, spends, first_at, last_at, first_label, last_label FROM totals"
_COUNTED = """
SELECT ends.dataset, ends.partition, ends.event, spends, old.reserved_at AS first_at, new.reserved_at AS last_at,
    old.label AS first_label, new.label AS last_label
FROM (SELECT dataset, partition, event, count(*) AS spends, min(id) AS first, max(id) AS last
    FROM spends GROUP BY dataset, partition, event) AS ends
JOIN spends AS old ON old.id = first JOIN spends AS new ON new.id = last
"""


def accept(path: str | os.PathLike[str]) -> Head:
    """Makes an intact database valid whose head is missing or ahead. Returns the head of this new
    branch.

    Nothing is undone. A workdir that spent more sees that the branch is not the one in its notes.
    It charges the missing spends when it is resumed.

    Raises:
        LedgerDamaged: The database is inconsistent.
        ValueError: The file is not a ledger.
    """
    path = os.fspath(_existing(path))
    head_path = pathlib.Path(f"{path}.head")
    os.close(os.open(head_path, os.O_RDWR | os.O_CREAT, 0o666))
    file = _acquire(head_path)
    try:
        with contextlib.closing(_connection(path)) as db:
            if _version(db, path) < SCHEMA_VERSION:
                raise ValueError(
                    f"ledger {path!r} is of version 1. Open it to migrate it, instead of "
                    "accepting it."
                )
            if (problem := find_problem(db)) is not None:
                raise damaged(path, problem)
            branch = secrets.token_hex(4)
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE meta SET value = ? WHERE key = 'branch'", (branch,))
            (ledger,) = db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
            last = db.execute(_LAST).fetchone() or (0, _origin(ledger))
            db.execute(
                "INSERT INTO meta VALUES (?, ?)", (f"accepted {now()} {branch}", f"spend {last[0]}")
            )
            db.execute("COMMIT")
            head = Head(f"{ledger}.{branch}", *last)
            os.pwrite(file, _head_text(head), 0)
            os.fsync(file)
    finally:
        os.close(file)
    return head


# --- Files --------------------------------------------------------------------------------------


def _connection(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        uri=path.startswith("file:"),
    )
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA synchronous = FULL")
    return db


def _existing(path: str | os.PathLike[str]) -> pathlib.Path:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"path {os.fspath(path)!r} is not a file. Give the ledger of a run.")
    _check_size(pathlib.Path(path))
    return pathlib.Path(path)


def _check_size(path: pathlib.Path) -> None:
    """Refuses an empty file, which SQLite would open as a new database.

    Only SQLite may open a ledger. Closing it otherwise would drop the locks of all connections of
    this process.
    """
    if path.stat().st_size == 0:
        raise damaged(path, "is empty", gone=True)


def _version(db: sqlite3.Connection, path: str) -> int:
    """Returns the schema version of a ledger. Raises ValueError for another file."""
    application, version = _pragma(db, "application_id"), _pragma(db, "user_version")
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


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "UTF-8" in str(error)


def _create(path: pathlib.Path) -> None:
    """Makes a new ledger, which appears whole. Another process may have made it first."""
    try:
        with (
            _appearing(path) as temporary,
            contextlib.closing(_connection(os.fspath(temporary))) as db,
        ):
            db.execute("PRAGMA journal_mode = WAL")
            _fill(db)
    except (OSError, sqlite3.Error):
        if (
            not path.exists()
        ):  # otherwise another process made it first and removed the temporary file
            raise


def _copy(db: sqlite3.Connection, path: pathlib.Path) -> None:
    """Copies a database durably to a new file, which appears whole."""
    with _appearing(path) as temporary, contextlib.closing(sqlite3.connect(temporary)) as copy:
        db.backup(copy)


@contextlib.contextmanager
def _appearing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path and renames its finished file to `path`. Raises FileExistsError if
    `path` exists.
    """
    temporary = path.with_name(f".{path.name}.new-{secrets.token_hex(8)}")
    try:
        yield temporary
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if path.exists():
                raise FileExistsError(os.fspath(path)) from None
            os.rename(temporary, path)
    finally:
        for suffix in ("", "-wal", "-shm"):
            pathlib.Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    sync_folder(path.absolute().parent)


def _fill(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    for statement in (*_SCHEMA.split(";\n"), _HOLDS, _GUARD):
        db.execute(statement)
    _describe(db, secrets.token_hex(16), created_at=now(), created_by=f"jaxdp {__version__}")
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")


def _describe(db: sqlite3.Connection, ledger: str, **origin: str) -> None:
    about = {**origin, "id": ledger, "branch": "0", "schema": _schema(db)}
    db.executemany("INSERT INTO meta VALUES (?, ?)", about.items())


def _migrate(db: sqlite3.Connection, path: str) -> None:
    """Adds version 2 to a database of version 1, in the caller's transaction. Raises LedgerDamaged
    if unsound.
    """
    problem = _torn_page(db) or _unequal_total(db)
    if problem is not None:
        raise damaged(path, problem)
    for statement in (*_MIGRATION.split(";\n"), _HOLDS, _GUARD):
        db.execute(statement)
    ledger = secrets.token_hex(16)
    _describe(db, ledger, migrated_at=now(), migrated_by=f"jaxdp {__version__}")
    for row in db.execute(f"SELECT id, {_TERMS}, records FROM datasets").fetchall():
        db.execute("UPDATE datasets SET seal = ? WHERE id = ?", (_seal(row, ledger), row["id"]))
    # Spends of version 1 have numbers without gaps, because none was deleted and a failed insert
    # takes no number.
    for row, link in list(_relinked(db, ledger)):
        db.execute("UPDATE spends SET link = ? WHERE id = ?", (link, row["id"]))
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _acquire(path: pathlib.Path) -> int:
    """Opens a file and waits until this process alone holds it. The system queues waiting
    processes.
    """
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        pass
    except OSError as error:
        os.close(file)
        raise OSError(
            f"{os.fspath(path)!r} cannot be locked: {error}. Two programs could then spend one "
            "budget twice. Keep the ledger on a local disk."
        ) from error
    # flock has no timeout, so another thread waits. It closes a lock that arrives too late.
    waiting: concurrent.futures.Future[None] = concurrent.futures.Future()

    def wait() -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting.set_result(None)

    threading.Thread(target=wait, daemon=True).start()
    try:
        waiting.result(BUSY_SECONDS)
        return file
    except BaseException as error:  # also an interrupt
        waiting.add_done_callback(lambda _: os.close(file))
        if not isinstance(error, TimeoutError):
            raise
    raise OSError(
        f"{os.fspath(path)!r} is held by another process for {BUSY_SECONDS:g} seconds, so its "
        "ledger cannot be written. Everything that was reserved in it still counts. Wait for that "
        "process, and try again."
    )


# --- Texts --------------------------------------------------------------------------------------


def utc(seconds: float) -> str:
    """Returns a time, in seconds since 1970, in UTC to milliseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def now() -> str:
    """Returns the present time in the format of `utc`."""
    return utc(time.time())


@functools.cache
def _author() -> tuple[str, str]:
    try:
        who = getpass.getuser()
    except (KeyError, OSError, ImportError):
        who = ""
    return who, socket.gethostname()


def terms_of(row: Mapping[str, Any]) -> str:
    """Returns a hash of a dataset's terms, which never change."""
    return _digest([row[name] for name in _TERMS.split(", ")])


def _seal(row: Mapping[str, Any], ledger: str) -> str:
    return _digest([ledger, terms_of(row), row["records"]])


def _schema(db: sqlite3.Connection) -> str:
    rows = db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    ).fetchall()
    return _digest([list(row) for row in rows])


def _origin(ledger: str) -> str:
    return _digest(["jaxdp ledger", ledger])


def _link(last: str, row: Mapping[str, Any], terms: str) -> str:
    names = (
        "id",
        "partition",
        "json",
        "label",
        "token",
        "run",
        "version",
        "reserved_at",
        "who",
        "host",
    )
    return _digest([last, terms, *(row[name] for name in names)])


def _head_text(head: Head) -> bytes:
    fields = list(dataclasses.astuple(head))
    return (json.dumps([fields, _digest(fields)]).ljust(_HEAD_BYTES - 1) + "\n").encode()


def _head_of(text: bytes, path: str) -> Head:
    try:
        fields, check = parse_json(text)
        if check != _digest(fields):
            raise ValueError("its check differs.")
        return Head(*fields)
    except (ValueError, TypeError) as error:
        raise damaged(path, f"has a damaged head, `{path}.head`") from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
