"""The registry: which private records are counted in which ledger.

A ledger knows what was released about a data set by its name. It cannot know that a second ledger,
or a second name, stands for the same records. The registry can: it keeps a short keyed hash of each
record (`jaxdp.data.record_digests`), and names the ledger that counts them.

What the file reveals, and to whom: it holds its own secret key, so whoever can read the file can
tell whether a record that he already knows is in a data set, and how many records two data sets
share. The file has mode 0600. It is never part of a workdir, a report or the copy of a ledger.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jaxdp.privacy import database
from jaxdp.privacy.times import now

# Of the smaller set. Two sets of images share a few blank or repeated ones by chance.
SHARED = 0.05
_APPLICATION_ID = 0x6A647072  # "jdpr"
_TABLES = """
CREATE TABLE secret (key BLOB NOT NULL);
CREATE TABLE claims (
    id INTEGER PRIMARY KEY,
    ledger TEXT NOT NULL,
    dataset TEXT NOT NULL,
    records BLOB NOT NULL,
    at TEXT NOT NULL,
    UNIQUE (ledger, dataset)
);
"""


class CountedElsewhere(ValueError):
    """The same records are counted in another ledger, or under another name."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """Records that a ledger counts.

    Attributes:
        ledger: The real path of the ledger.
        dataset: Their name in it.
        records: The number of different records of the claim.
        shared: The number of them that the set in question has too.
    """

    ledger: str
    dataset: str
    records: int
    shared: int


class Registry:
    """The file that says which ledger counts which records.

    Processes may share it. It is a local file of one user, or of a team that reads the same
    records.

    Args:
        path: The SQLite file, made with mode 0600 if it does not exist. So is its folder, with
            mode 0700.

    Raises:
        ValueError: The file is of another program.
        OSError: The file cannot be made or read. The message names it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), mode=0o700, exist_ok=True)
        if missing := database.rights_missing(self.path):
            raise OSError(
                f"registry {self.path!r} cannot be opened. {missing} The owner of a registry gives "
                "the group access with chmod 660."
            )
        # SQLite would make it with the umask's mode, and the key must not be readable for a moment.
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._transaction() as db:
            application = db.execute("PRAGMA application_id").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if application != _APPLICATION_ID and tables:
                raise ValueError(
                    f"registry {self.path!r} is an SQLite file of another program. Name another "
                    "path."
                )
            if not tables:
                for statement in _TABLES.split(";\n"):
                    db.execute(statement)
                db.execute("INSERT INTO secret VALUES (?)", (secrets.token_bytes(32),))
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self.key: bytes = db.execute("SELECT key FROM secret").fetchone()[0]

    def claims(self, records: np.ndarray) -> list[Claim]:
        """Returns the claims that share records with a set, the largest share first.

        Args:
            records: The digests of the set under `key`, uint64 [m], sorted, without repetition.
        """
        with self._transaction() as db:
            return list(_sharing(db, records))

    def claim(
        self,
        ledger: str | os.PathLike[str],
        dataset: str,
        records: np.ndarray,
        *,
        count_anew: bool = False,
    ) -> None:
        """Notes that a ledger counts a set of records. The same claim again does nothing.

        A set that has grown keeps its name: the claim then covers old and new records.

        Args:
            ledger: The path of the ledger.
            dataset: The name of the set in it.
            records: As in `claims`.
            count_anew: Whether records that are counted elsewhere are counted here too. Each
                ledger then states a part of the truth: what is known about a record is bounded by
                the sum of all of them.

        Raises:
            CountedElsewhere: At least `SHARED` of the smaller set is counted by another ledger or
                under another name, or `SHARED` of this set by several of them together, and
                `count_anew` is False. Or the name stands for other records. Nothing is noted.
        """
        place = os.path.realpath(ledger)
        with self._transaction() as db:
            own = db.execute(
                "SELECT id, records FROM claims WHERE ledger = ? AND dataset = ?", (place, dataset)
            ).fetchone()
            if not count_anew:
                others = {
                    claim: shared
                    for claim, shared in _sharing(db, records).items()
                    if (claim.ledger, claim.dataset) != (place, dataset)
                }
                _check(others, place, dataset, records)
                fresh = records if own is None else np.setdiff1d(records, _digests(own["records"]))
                _check_together(others, place, records, fresh)
                if own is not None and not _overlap(_digests(own["records"]), records):
                    raise CountedElsewhere(
                        f"dataset {dataset!r} of ledger {place!r} stands for other records: not "
                        "one is the same. Give these records a name of their own."
                    )
            if own is None:
                db.execute(
                    "INSERT INTO claims (ledger, dataset, records, at) VALUES (?, ?, ?, ?)",
                    (place, dataset, records.astype("<u8").tobytes(), now()),
                )
                return
            # Records that were once counted stay counted.
            together = np.union1d(_digests(own["records"]), records)
            db.execute(
                "UPDATE claims SET records = ? WHERE id = ?",
                (together.astype("<u8").tobytes(), own["id"]),
            )

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the registry durably to a new file with mode 0600. Others may claim meanwhile.

        Raises:
            ValueError: There is such a file already, or no such directory.
            OSError: The copy cannot be written.
        """
        database.check_new(path)
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as db:
            database.copy_database(db, pathlib.Path(path), mode=0o600)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        except sqlite3.Error as error:
            raise OSError(f"registry {self.path!r} cannot be opened: {error}.") from error
        db.row_factory = sqlite3.Row
        try:
            # Two processes cannot both find the same records free.
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            raise OSError(
                f"registry {self.path!r} cannot be read or written: {error}. Mend the rights or "
                "the disk, or restore the file from a copy."
            ) from error
        finally:
            db.close()  # An open transaction is rolled back.


def _digests(blob: bytes) -> np.ndarray:
    return np.frombuffer(blob, "<u8")


def _overlap(first: np.ndarray, second: np.ndarray) -> int:
    """Returns how many digests two sets share."""
    return len(np.intersect1d(first, second, assume_unique=True))


def _sharing(db: sqlite3.Connection, records: np.ndarray) -> dict[Claim, np.ndarray]:
    """Returns the digests that each claim shares with a set, the largest share first."""
    shares = {}
    for row in db.execute("SELECT ledger, dataset, records FROM claims ORDER BY id"):
        claimed = _digests(row["records"])
        shared = np.intersect1d(claimed, records, assume_unique=True)
        if len(shared):
            shares[Claim(row["ledger"], row["dataset"], len(claimed), len(shared))] = shared
    return dict(sorted(shares.items(), key=lambda share: -share[0].shared))


def _check(claims: Iterable[Claim], ledger: str, dataset: str, records: np.ndarray) -> None:
    """Raises CountedElsewhere if another claim has the same records."""
    for claim in claims:
        if claim.shared < SHARED * min(claim.records, len(records)):
            continue
        of_them = f"{claim.shared} of these {len(records)} records"
        if claim.ledger == ledger:
            raise CountedElsewhere(
                f"{of_them} are dataset {claim.dataset!r} of ledger {ledger!r} already, and "
                f"{dataset!r} would give them a second budget. Use the name {claim.dataset!r}."
            )
        raise CountedElsewhere(
            f"{of_them} are counted by ledger {claim.ledger!r}, as dataset {claim.dataset!r}. "
            f"Ledger {ledger!r} would give them a second budget. Use the first one."
        )


def _check_together(
    others: Mapping[Claim, np.ndarray], ledger: str, records: np.ndarray, fresh: np.ndarray
) -> None:
    """Raises CountedElsewhere if several other claims together have many of the records.

    A sample of 4 % of each of 25 sets shares few records with each one, and has no other records.

    Args:
        others: The digests that the other claims share with the set.
        ledger: The real path of the ledger.
        records: The digests of the set.
        fresh: Those that the own claim lacks. Without any there is nothing to refuse: other claims
            may have come later.
    """
    counted = np.unique(np.concatenate([np.zeros(0, np.uint64), *others.values()]))
    if not _overlap(counted, fresh) or len(counted) < SHARED * len(records):
        return
    first, *more = others
    name = f"{first.dataset!r} of ledger {first.ledger!r}"
    if more:
        name += f" and {len(more)} more data sets"
    raise CountedElsewhere(
        f"{len(counted)} of these {len(records)} records are counted as {name}. "
        f"Ledger {ledger!r} would give them a second budget. Use the sets that count them."
    )
