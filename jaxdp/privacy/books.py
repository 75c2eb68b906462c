"""The rows of a ledger as values: datasets, tokens, holds and spent compositions."""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jaxdp.privacy.accounting import Tally
from jaxdp.privacy.budget import Dataset, maximal
from jaxdp.privacy.events import Counts, compose, composition, from_json, to_json

_DATASETS = (
    "SELECT id, name, adjacency, unit, epsilon, delta, accounting, renyi_order, allow_unproven, "
    "records FROM datasets"
)
# One row per part with its history "event:spends,event:spends,...". Equal histories have equal
# texts.
_HISTORY = (
    "SELECT partition, group_concat(event || ':' || spends) AS history FROM (SELECT partition, "
    "event, spends "
    "FROM totals WHERE dataset = ? AND {} ORDER BY partition, event) GROUP BY partition"
)


def datasets(db: sqlite3.Connection) -> list[Dataset]:
    """Returns all datasets, sorted by name."""
    return [Dataset(**row) for row in db.execute(f"{_DATASETS} ORDER BY name")]


def find_dataset(db: sqlite3.Connection, name: str) -> Dataset | None:
    """Returns a dataset, or None if it is not registered."""
    row = db.execute(f"{_DATASETS} WHERE name = ?", (name,)).fetchone()
    return None if row is None else Dataset(**row)


def dataset_of(db: sqlite3.Connection, name: str) -> Dataset:
    """Returns a dataset. Raises ValueError if it is not registered."""
    dataset = find_dataset(db, name)
    if dataset is None:
        known = [row[0] for row in db.execute("SELECT name FROM datasets ORDER BY name LIMIT 20")]
        raise ValueError(
            f"dataset {name!r} is not registered (registered: {known}). Call ledger.register first."
        )
    return dataset


def paid_for(db: sqlite3.Connection, dataset: Dataset, token: str | None) -> sqlite3.Row | None:
    """Returns the number, partition and event of the spend with a token, or None."""
    query = "SELECT spends.id, partition, json FROM spends JOIN events ON events.id = event WHERE dataset = ?"
    row: sqlite3.Row | None = db.execute(f"{query} AND token = ?", (dataset.id, token)).fetchone()
    return row


# --- Holds --------------------------------------------------------------------------------------


def clock() -> float:
    """Returns seconds since 1970, which all processes of a machine share."""
    return time.time()


def live_holds(db: sqlite3.Connection, dataset: Dataset) -> list[sqlite3.Row]:
    """Returns the holds that have not lapsed, sorted by when they lapse."""
    query = "SELECT id, json, key, label, run, lapses FROM holds WHERE dataset = ? AND lapses > ? ORDER BY lapses, id"
    return db.execute(query, (dataset.id, clock())).fetchall()


def held(db: sqlite3.Connection, dataset: Dataset) -> dict[str | None, Counts]:
    """Returns the composition for which each live hold keeps room."""
    return {row["id"]: composition(from_json(row["json"])) for row in live_holds(db, dataset)}


def take(db: sqlite3.Connection, dataset: Dataset, hold: str, step: Counts) -> None:
    """Takes the events that a live hold shares with `step` out of it and renews it. Ignores a hold
    that is not live.
    """
    kept = held(db, dataset).get(hold)
    if kept is not None:
        left = to_json(compose(kept - step))
        db.execute(
            "UPDATE holds SET json = ? WHERE id = ? AND dataset = ?", (left, hold, dataset.id)
        )
        db.execute("UPDATE holds SET lapses = ? + seconds WHERE id = ?", (clock(), hold))


# --- Spends -------------------------------------------------------------------------------------


class _Read(NamedTuple):
    whole: Tally  # the releases on everything
    parts: list[Counts] | None  # the maximal histories of its parts, or None if they must be read
    position: int | None  # the number of the last counted spend


class Spends:
    """The spends on each dataset. It keeps what it read, so that a loop of spends reads only its
    own rows.
    """

    def __init__(self) -> None:
        self._events: dict[int, Counts] = {}
        self._read: dict[int, _Read] = {}

    def compositions(
        self, db: sqlite3.Connection, dataset: Dataset, partition: str | None
    ) -> list[Counts]:
        """Returns what units of the dataset bear: the releases on the whole dataset plus those on
        one part.

        A named partition has one composition. None gives every maximal one.
        """
        whole = self._whole(db, dataset)
        return maximal(whole + part for part in self._parts(db, dataset, partition)) or [whole]

    def tallies(
        self, db: sqlite3.Connection, dataset: Dataset, partition: str | None
    ) -> list[Tally]:
        """Returns the proven parts of `compositions`. Reads only the spends that are new since the
        last call.
        """
        read = self._read.get(
            dataset.id, _Read(Tally(dataset.adjacency, dataset.orders), None, None)
        )
        whole, known = read.whole, read.parts
        last = db.execute("SELECT max(id) FROM spends").fetchone()[0] or 0
        if read.position is None:
            whole = whole.plus(self._whole(db, dataset))
        else:
            query = "SELECT event, partition, count(*) AS spends FROM spends WHERE id > ? AND dataset = ? GROUP BY 1, 2"
            for row in db.execute(query, (read.position, dataset.id)).fetchall():
                if row["partition"]:
                    known = None
                else:
                    whole = whole.plus(self._event(db, row["event"]), row["spends"])
        if partition is None and known is None:
            known = maximal(self._parts(db, dataset, None))
        self._read[dataset.id] = _Read(
            whole, known, last
        )  # one step: no interrupt can count a spend twice
        parts = self._parts(db, dataset, partition) if partition is not None else known or []
        return [whole.plus(part) for part in parts] or [whole]

    def by_part(self, db: sqlite3.Connection, dataset: Dataset) -> dict[str | None, Counts]:
        """Returns what was spent on each part alone. None is the whole dataset."""
        rows = db.execute(_HISTORY.format("1"), (dataset.id,)).fetchall()
        parsed = {
            history: self._parsed(db, history) for history in {row["history"] for row in rows}
        }
        return {row["partition"] or None: parsed[row["history"]] for row in rows}

    def _whole(self, db: sqlite3.Connection, dataset: Dataset) -> Counts:
        row = db.execute(_HISTORY.format("partition = ''"), (dataset.id,)).fetchone()
        return self._parsed(db, row["history"]) if row else Counter()

    def _parts(
        self, db: sqlite3.Connection, dataset: Dataset, partition: str | None
    ) -> Iterable[Counts]:
        """Returns the histories of all parts or of one. SQL merges equal ones, so that a million
        parts cost little.
        """
        parts, values = (
            ("partition <> ''", ()) if partition is None else ("partition = ?", (partition,))
        )
        query = f"SELECT DISTINCT history FROM ({_HISTORY.format(parts)})"
        return [
            self._parsed(db, row["history"])
            for row in db.execute(query, (dataset.id, *values)).fetchall()
        ]

    def _parsed(self, db: sqlite3.Connection, history: str) -> Counts:
        counts: Counts = Counter()
        for item in history.split(","):
            event, spends = item.split(":")
            for leaf, count in self._event(db, int(event)).items():
                counts[leaf] += int(spends) * count
        return counts

    def _event(self, db: sqlite3.Connection, event: int) -> Counts:
        if event not in self._events:
            row = db.execute("SELECT json FROM events WHERE id = ?", (event,)).fetchone()
            self._events[event] = composition(from_json(row["json"]))
        return self._events[event]
