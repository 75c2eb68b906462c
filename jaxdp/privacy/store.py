"""The ledger's file: how it is opened, locked, written, copied and accepted.

`ledger.sqlite` is an SQLite database (`jaxdp.privacy.schema` lists its tables) with the datasets,
the events, and one row per spend. `ledger.sqlite.head` beside it is one line with the number of
spends and the link of the last one (`jaxdp.privacy.chain`).

* Every spend carries a link: SHA-256 of the previous link, the fields of its row that never change,
  and the terms of its dataset. So each row authenticates all rows before it.
* The head is written after the commit and before `spend` returns. No body runs before both are
  done. So a head that is behind shows a crash in between, and a head that is ahead shows that the
  database lost spends.
* `.ledger.sqlite.anchor` is a second head under a name that neither `backup` nor a copy of
  `ledger.sqlite*` takes along. So a ledger that was restored from an older copy shows.
* `totals` holds sums over `spends`, so that queries take time independent of the number of spends.
  Opening the file compares them with `spends` (`jaxdp.privacy.integrity`).
* A writer holds an exclusive lock on the head. The system queues waiting writers.

A hash without a key shows damage and loss. It does not stop somebody who rewrites both files on
purpose. The heads in the notes of workdirs and in backups do, if that person cannot change them.
"""

import contextlib
import functools
import getpass
import os
import pathlib
import secrets
import shutil
import socket
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxdp.files import free_bytes, shown, write_durably
from jaxdp.privacy import chain, contacts, database, schema
from jaxdp.privacy.chain import Head
from jaxdp.privacy.damage import LedgerDamaged, damaged, is_damage
from jaxdp.privacy.integrity import find_problem
from jaxdp.privacy.privacy_warnings import warn_of_network_disk, warn_of_no_anchor
from jaxdp.privacy.schema import SCHEMA_VERSION
from jaxdp.privacy.times import now
from jaxdp.version import __version__

__all__ = ["SCHEMA_VERSION", "Head", "LedgerDamaged", "Store", "accept", "damaged", "now"]

# A fork copies a lock that another thread holds, and not the thread that would release it.
_STORES: "weakref.WeakSet[Store]" = weakref.WeakSet()


def _renew_locks() -> None:
    for store in _STORES:
        store.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


class Store:
    """One open ledger file, or ":memory:", shared by the threads of a process.

    Its errors are the errors of `Ledger`. With `read_only` it writes nothing to the file or beside
    it, and takes no lock.
    """

    def __init__(self, path: str, *, read_only: bool = False):
        self.path = path
        self.read_only = read_only
        self.lock = threading.RLock()
        _STORES.add(self)
        self._in_memory = path == ":memory:"
        # A program may change its folder while a ledger is open, or before a fork opens it again.
        self._file = pathlib.Path(path).absolute()
        self._head_path = pathlib.Path(f"{self._file}.head")
        self._anchor_path = anchor_of(self._file)
        self._head_file = -1  # its descriptor while the lock is held
        if not self._in_memory and not self._file.parent.is_dir():
            raise ValueError(
                f"path {path!r} lies in a directory that does not exist. Create the directory "
                "first."
            )
        self._open()

    # --- Opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        self._pid = os.getpid()
        # The last head that this process has compared with the database.
        self._seen: Head | None = None
        with contextlib.ExitStack() as files:
            try:
                if self._in_memory:
                    self._connect(files, ":memory:")
                    schema.fill(self.db)
                    self._check(None, new=True)
                elif self.read_only:
                    self._open_to_read(files)
                else:
                    self._open_to_write(files)
            except UnicodeDecodeError as error:
                raise damaged(self.path, f"is damaged: {error}") from error
            except (PermissionError, sqlite3.Error) as error:
                # Without a head, a file that is no database is another program's, not a damaged
                # ledger.
                is_ledger = self._head_path.exists() or "not a database" not in str(error)
                if isinstance(error, sqlite3.Error) and is_damage(error) and is_ledger:
                    raise damaged(self.path, f"is damaged: {error}") from error
                remedy = database.rights_missing(self._file, read_only=self.read_only)
                raise ValueError(
                    f"path {self.path!r} cannot be opened as a ledger: {shown(error)}. "
                    f"{remedy}".rstrip()
                ) from error
            # The finalizer also closes the files of a store that nobody closes.
            self.close = weakref.finalize(self, files.pop_all().close)

    def _connect(self, files: contextlib.ExitStack, path: str) -> None:
        self.db = files.enter_context(contextlib.closing(database.connect(path)))

    def _open_to_write(self, files: contextlib.ExitStack) -> None:
        path = self._file
        # They are looked at first, because a process that makes a ledger makes them last.
        witnesses = [file for file in (self._head_path, self._anchor_path) if file.exists()]
        if not path.exists():
            if witnesses:
                names = " and ".join(f"`{file}`" for file in witnesses)
                raise damaged(path, f"is missing, and {names} shows that it was in use", gone=True)
            database.create(path)
        database.check_size(path)
        database.check_writable(path, self._head_path, self._anchor_path)
        if kind := database.network_disk(path):
            warn_of_network_disk(self.path, kind)
        wal = pathlib.Path(f"{path}-wal")
        unread_log = b""
        with contextlib.suppress(FileNotFoundError):
            unread_log = wal.read_bytes()
        try:
            self._connect(files, os.fspath(path))
            # Before the head is made, because another program's file gets none.
            schema.version_of(self.db, self.path)
            # Writers lock the head, so it exists from here on, if only empty.
            os.close(os.open(self._head_path, os.O_RDWR | os.O_CREAT, 0o666))
            # Nobody writes while the file is compared with its heads.
            with self._locked():
                # Another process may have migrated the file meanwhile.
                is_old = schema.version_of(self.db, self.path) < SCHEMA_VERSION
                if is_old:
                    self._migrate()
                self._check(self._read_head(), new=is_old)
                self._check_anchor(self._read(self._anchor_path, "anchor"), new=is_old)
                # A head that a crash left behind is brought up to date.
                self._write_head()
                database.share_with_group(path, self._head_path, self._anchor_path)
                database.remove_unfinished(path)
        except (LedgerDamaged, sqlite3.Error):
            # SQLite deletes a log when it closes the file. Its unread part may be needed.
            saved_log = pathlib.Path(f"{wal}.kept")
            if unread_log and not saved_log.exists():
                saved_log.write_bytes(unread_log)
            raise

    def _open_to_read(self, files: contextlib.ExitStack) -> None:
        path = database.existing(self._file)
        # These are read first, because the database may grow meanwhile.
        head = self._read(self._head_path, "head")
        anchor = self._read(self._anchor_path, "anchor")
        # Without these files SQLite would make them, with the reader as their owner, and lock out
        # the owner of the ledger. Then nobody has it open, and a copy is read.
        if all(pathlib.Path(f"{path}{suffix}").exists() for suffix in ("-wal", "-shm")):
            self._connect(files, f"{path.absolute().as_uri()}?mode=ro")
        else:
            folder = files.enter_context(tempfile.TemporaryDirectory())
            for suffix in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(f"{path}{suffix}", f"{folder}/copy{suffix}")
            self._connect(files, f"{folder}/copy")
        if schema.version_of(self.db, self.path) < SCHEMA_VERSION:
            # The file stays as it is. A copy in memory is migrated.
            old = self.db
            self._connect(files, ":memory:")
            old.backup(self.db)
            schema.migrate(self.db, self.path)
        self._check(head, new=True)
        self._check_anchor(anchor, new=True)

    def _migrate(self) -> None:
        """Migrates a file of version 1 to this version. An unchanged copy stays beside it."""
        old_copy = pathlib.Path(f"{self._file}.version1")
        # It exists if a process died while it migrated.
        if not old_copy.exists():
            database.copy_database(self.db, old_copy)
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            schema.migrate(self.db, self.path)

    def _check(self, head: Head | None, *, new: bool) -> None:
        """Raises LedgerDamaged unless the file agrees with itself and its head.

        A `new` one may have no head.
        """
        with self.db:
            self.db.execute("BEGIN")  # all queries see one instant
            problem = find_problem(self.db)
            if problem is None:
                meta = dict(self.db.execute("SELECT key, value FROM meta").fetchall())
                self.identity = meta["id"]
                self._branch = meta["branch"]
                if head is not None:
                    problem = self._find_lost_history(head)
                elif not new and self.last().spend:
                    problem = (
                        "has no head beside it, which would show whether its last spends are "
                        "missing"
                    )
        if problem is not None:
            raise damaged(self.path, problem)

    def _read(self, path: pathlib.Path, what: str) -> Head | None:
        """Returns the position that the head or the anchor has seen, or None if there is none."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        # An empty one was made by a process that died before it wrote.
        return chain.head_of(text, self.path, what) if text else None

    def _check_anchor(self, anchor: Head | None, *, new: bool) -> None:
        """Raises LedgerDamaged if the ledger lacks spends that its anchor has seen.

        Warns if there is no anchor. A `new` ledger need not have one.
        """
        if anchor is not None:
            problem = self._find_lost_history(anchor, "its anchor")
            if problem is not None:
                raise damaged(self.path, f"{problem}. An older copy was restored")
        elif not new and self.last().spend:
            warn_of_no_anchor(self.path)

    # --- Transactions ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(
        self, mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE"
    ) -> Iterator[sqlite3.Connection]:
        """Yields the connection inside one transaction. IMMEDIATE waits for the write lock."""
        writes = mode == "IMMEDIATE"
        with self.lock:
            if self._pid != os.getpid():
                self._after_fork()
            try:
                # Readers need no turn: WAL shows them one instant while others write.
                with self._locked() if writes else contextlib.nullcontext():
                    self.db.execute(f"BEGIN {mode}")
                    if writes:
                        self._check_head()
                    yield self.db
                    # The head follows the commit, so a kill in between leaves it behind and never
                    # ahead.
                    self.db.execute("COMMIT")
                    if writes:
                        self._write_head()
            except BaseException as error:  # also an interrupt
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error) and is_damage(error):
                    raise damaged(self.path, f"is damaged: {error}") from error
                if isinstance(error, sqlite3.OperationalError):
                    missing = database.rights_missing(self._file, read_only=self.read_only)
                    remedy = missing or (
                        f"Free space on its disk ({free_bytes(self._file)} bytes are free), or "
                        "wait for the process that holds it, and try again."
                    )
                    raise OSError(
                        f"ledger {self.path!r} cannot be read or written: {shown(error)}. "
                        f"Everything that was reserved in it still counts. {remedy}"
                    ) from error
                raise

    def _after_fork(self) -> None:
        if self._in_memory:
            raise RuntimeError(
                "an in-memory ledger cannot be shared with a forked process. Open a file instead."
            )
        # SQLite forbids use of the inherited connection, which the parent owns. A reference keeps
        # it from being closed here.
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
            self._head_file = database.acquire(self._head_path)
        except FileNotFoundError as error:
            raise damaged(
                self.path, "has lost its head, the file that records its last spend"
            ) from error
        try:
            yield
        finally:
            database.release(self._head_file)

    # --- Head ------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The position of the ledger's last spend."""
        with self.transaction("DEFERRED"):
            return self.last()

    @property
    def has_head(self) -> bool:
        """Whether a head lies beside the database."""
        return self._head_path.exists()

    def contains(self, head: Head) -> bool | None:
        """Returns whether the ledger's history contains `head`.

        It returns None if `head` is of another ledger or branch.
        """
        with self.transaction("DEFERRED"):
            if head.ledger != self.last().ledger:
                return None
            return self._link_at(head.spend) == head.link

    def last(self) -> Head:
        """Returns the position of the last spend, in the caller's transaction."""
        return chain.last_head(self.db, self.identity, self._branch)

    def _link_at(self, spend: int) -> str | None:
        return chain.link_at(self.db, spend, chain.origin_of(self.identity))

    def _find_lost_history(self, head: Head, witness: str = "its head") -> str | None:
        """Returns why the database's history does not contain what `witness` saw, or None."""
        last = self.last()
        if head.ledger != last.ledger:
            return "does not belong to the head beside it"
        if head.spend > last.spend:
            return (
                f"has lost history: it ends with spend {last.spend}, and {witness} has seen spend "
                f"{head.spend}"
            )
        if self._link_at(head.spend) != head.link:
            return (
                f"has lost history: its spend {head.spend} is not the one that {witness} has seen"
            )
        return None

    def _check_head(self) -> None:
        """Raises LedgerDamaged if the database lacks spends that the head has seen.

        This happens after a lost -wal file.
        """
        if self._in_memory:
            return
        # Other processes may have written it since this one did.
        head = self._read_head()
        if head is None:
            raise damaged(self.path, "has lost its head, the file that records its last spend")
        if head != self.last():
            problem = self._find_lost_history(head)
            if problem is not None:
                raise damaged(self.path, problem)
        # All files may have been restored from a copy while this process had them open.
        if self._seen is not None and self._seen != head:
            problem = self._find_lost_history(self._seen, "this process")
            if problem is not None:
                raise damaged(self.path, f"{problem}. An older copy was restored")
        self._seen = head

    def _read_head(self) -> Head | None:
        """Returns the head of the locked file, or None if it is empty."""
        # Twice as much as a head has, so that a longer file does not pass for one.
        text = os.pread(self._head_file, 2 * chain.HEAD_BYTES, 0)
        return chain.head_of(text, self.path) if text else None

    def _write_head(self) -> None:
        """Writes the position of the last spend to the head.

        If the process dies before this, the head is one spend behind. The next process that opens
        the ledger accepts such a head, because it lies on the chain, and writes a new one.
        """
        last = self.last()
        if last == self._seen or self._in_memory:
            return
        try:
            # Not synced, because an older head after a power failure is accepted too.
            os.pwrite(self._head_file, chain.head_text(last), 0)
            _write_anchor(self._anchor_path, last)
        except OSError as error:
            raise OSError(
                f"the head of ledger {self.path!r} cannot be written: {error}. The reservation "
                "counts, but its body does not run. Its disk has "
                f"{free_bytes(self._file)} bytes free. Free space or repair the disk, and try "
                "again."
            ) from error
        # After the checkpoint, a copy of the database without its -wal file is complete.
        self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._seen = last

    # --- Rows ------------------------------------------------------------------------------------

    def seal(self, name: str) -> None:
        """Seals the terms of a dataset, in the caller's transaction."""
        row = self.db.execute("SELECT * FROM datasets WHERE name = ?", (name,)).fetchone()
        seal = chain.seal_of(row, self.identity)
        self.db.execute("UPDATE datasets SET seal = ? WHERE id = ?", (seal, row["id"]))

    def describe(self, name: str, changes: Mapping[str, str]) -> None:
        """Notes whom to ask about a dataset from now on, in the caller's transaction."""
        last = self.last()
        who, host = _author()
        about = {"at": now(), "who": who, "host": host, "spend": last.spend, "after": last.link}
        contacts.append(self.db, self.identity, name, changes, **about)

    def append(
        self, dataset: int, partition: str, json: str, label: str, token: str | None, run: str
    ) -> int:
        """Writes a reservation, its link and its total, in the caller's transaction.

        Returns its number.
        """
        # Equal events have equal texts, and each is stored once.
        self.db.execute("INSERT INTO events (json) VALUES (?) ON CONFLICT DO NOTHING", (json,))
        (event,) = self.db.execute("SELECT id FROM events WHERE json = ?", (json,)).fetchone()
        terms = self.db.execute("SELECT * FROM datasets WHERE id = ?", (dataset,)).fetchone()
        last = self.last()
        who, host = _author()
        reserved_at = now()
        row = {
            # Without gaps, so that a missing spend shows.
            "id": last.spend + 1,
            "partition": partition,
            "json": json,
            "label": label,
            "token": token,
            "run": run,
            "version": __version__,
            "reserved_at": reserved_at,
            "who": who,
            "host": host,
        }
        link = chain.link_of(last.link, row, chain.terms_of(terms))
        self.db.execute(
            "INSERT INTO spends (id, dataset, partition, event, label, token, status, run, "
            "version, reserved_at, who, host, link) VALUES (:id, :dataset, :partition, :event, "
            ":label, :token, 'reserved', :run, :version, :reserved_at, :who, :host, :link)",
            {**row, "link": link, "dataset": dataset, "event": event},
        )
        self.db.execute(
            "INSERT INTO totals VALUES (?, ?, ?, 1, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "spends = spends + 1, last_at = excluded.last_at, last_label = excluded.last_label",
            (dataset, partition, event, reserved_at, reserved_at, label, label),
        )
        return last.spend + 1

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the ledger with its head, durably and at one instant.

        Others may spend meanwhile.
        """
        target = pathlib.Path(path)
        database.check_new(target)
        database.check_new(f"{target}.head")
        with self.transaction("DEFERRED") as db:
            # The first query fixes the instant that the copy is of.
            head = self.last()
            database.copy_database(db, target)
        # After the database, because a head without one would look like a lost ledger.
        write_durably(pathlib.Path(f"{target}.head"), chain.head_text(head))


def anchor_of(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a ledger's anchor."""
    ledger = pathlib.Path(path)
    return ledger.with_name(f".{ledger.name}.anchor")


def _write_anchor(path: pathlib.Path, head: Head) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(file, chain.head_text(head), 0)
    finally:
        os.close(file)


@functools.cache
def _author() -> tuple[str, str]:
    """Returns the names of the user and the host."""
    try:
        who = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user has no name
        who = ""
    return who, socket.gethostname()


def accept(path: str | os.PathLike[str]) -> Head:
    """Makes an intact database valid whose head is missing or ahead.

    Returns the head of this new branch. Nothing is undone. A workdir that spent more sees that the
    branch is not the one in its notes. It charges the missing spends when it is resumed.

    Raises:
        LedgerDamaged: The database is inconsistent.
        ValueError: The file is not a ledger, or this user cannot write it.
    """
    path = os.fspath(database.existing(path))
    if missing := database.rights_missing(path):
        raise ValueError(missing)
    head_path = pathlib.Path(f"{path}.head")
    os.close(os.open(head_path, os.O_RDWR | os.O_CREAT, 0o666))
    head_file = database.acquire(head_path)
    try:
        with contextlib.closing(database.connect(path)) as db:
            if schema.version_of(db, path) < SCHEMA_VERSION:
                raise ValueError(
                    f"ledger {path!r} is of version 1. Open it to migrate it, instead of "
                    "accepting it."
                )
            problem = find_problem(db)
            if problem is not None:
                raise damaged(path, problem)
            # A crash before the head is written leaves one of the old branch. Accepting again
            # begins another branch.
            head = _begin_branch(db)
            os.pwrite(head_file, chain.head_text(head), 0)
            os.fsync(head_file)
            _write_anchor(anchor_of(path), head)
            # A restored file has the mode of whoever copied it.
            database.share_with_group(pathlib.Path(path), head_path, anchor_of(path))
    finally:
        os.close(head_file)  # which ends the lock
    return head


def _begin_branch(db: sqlite3.Connection) -> Head:
    """Begins a new branch at the last spend, and notes it in `meta`. Returns the branch's head."""
    branch = secrets.token_hex(4)
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE meta SET value = ? WHERE key = 'branch'", (branch,))
    (ledger,) = db.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()
    head = chain.last_head(db, ledger, branch)
    note = (f"accepted {now()} {branch}", f"spend {head.spend}")
    db.execute("INSERT INTO meta VALUES (?, ?)", note)
    db.execute("COMMIT")
    return head
