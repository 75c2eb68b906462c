"""The compositions that were spent on datasets, read from the ledger's file and kept up to date."""

import sqlite3
from collections import Counter
from typing import NamedTuple

from jaxdp.privacy.accounting import Tally
from jaxdp.privacy.compositions import maximal
from jaxdp.privacy.events import Counts, composition, from_json
from jaxdp.privacy.terms import Dataset

# One row per part with its history "event:spends,event:spends,...". Equal histories have equal
# texts.
_HISTORY = (
    "SELECT partition, group_concat(event || ':' || spends) AS history FROM (SELECT partition, "
    "event, spends FROM totals WHERE dataset = ? AND {} ORDER BY partition, event) "
    "GROUP BY partition"
)


class _Snapshot(NamedTuple):
    """What was read of a dataset's spends."""

    whole: Tally  # the releases on everything
    parts: list[Counts] | None  # the maximal histories of its parts, or None if they must be read
    position: int  # the number of the last counted spend


class Spends:
    """The spends on each dataset.

    It keeps what it read, so that a loop of spends reads only its own rows.
    """

    def __init__(self) -> None:
        self._events: dict[int, Counts] = {}
        self._snapshots: dict[int, _Snapshot] = {}

    def compositions(
        self, db: sqlite3.Connection, dataset: Dataset, partition: str | None
    ) -> list[Counts]:
        """Returns what units of the dataset bear.

        These are the releases on the whole dataset plus those on one part.

        A named partition has one composition. None gives every maximal one.
        """
        whole = self._whole(db, dataset)
        return maximal(whole + part for part in self._parts(db, dataset, partition)) or [whole]

    def tallies(
        self, db: sqlite3.Connection, dataset: Dataset, partition: str | None
    ) -> list[Tally]:
        """Returns the proven parts of `compositions`.

        Reads only the spends that are new since the last call.
        """
        last = db.execute("SELECT max(id) FROM spends").fetchone()[0] or 0
        snapshot = self._snapshots.get(dataset.id)
        if snapshot is None:
            whole = Tally(dataset.adjacency, dataset.orders).plus(self._whole(db, dataset))
            snapshot = _Snapshot(whole, None, last)
        else:
            snapshot = self._caught_up(db, dataset, snapshot, last)
        if partition is None and snapshot.parts is None:
            snapshot = snapshot._replace(parts=maximal(self._parts(db, dataset, None)))
        # One step: no interrupt can count a spend twice.
        self._snapshots[dataset.id] = snapshot
        if partition is None:
            counts_of_parts = snapshot.parts or []
        else:
            counts_of_parts = self._parts(db, dataset, partition)
        return [snapshot.whole.plus(part) for part in counts_of_parts] or [snapshot.whole]

    def _caught_up(
        self, db: sqlite3.Connection, dataset: Dataset, snapshot: _Snapshot, last: int
    ) -> _Snapshot:
        """Returns a snapshot with the spends behind its position, up to `last`."""
        whole = snapshot.whole
        counts_of_parts = snapshot.parts
        for row in db.execute(
            "SELECT event, partition, count(*) AS spends FROM spends WHERE id > ? AND dataset = ? "
            "GROUP BY 1, 2",
            (snapshot.position, dataset.id),
        ).fetchall():
            if row["partition"]:
                # A part's history is in the file only.
                counts_of_parts = None
            else:
                whole = whole.plus(self._event(db, row["event"]), row["spends"])
        return _Snapshot(whole, counts_of_parts, last)

    def by_part(self, db: sqlite3.Connection, dataset: Dataset) -> dict[str | None, Counts]:
        """Returns what was spent on each part alone. None is the whole dataset."""
        rows = db.execute(_HISTORY.format("1"), (dataset.id,)).fetchall()
        # A million parts have few distinct histories, and each is parsed once.
        histories = {row["history"] for row in rows}
        parsed = {history: self._parsed(db, history) for history in histories}
        return {row["partition"] or None: parsed[row["history"]] for row in rows}

    def _whole(self, db: sqlite3.Connection, dataset: Dataset) -> Counts:
        row = db.execute(_HISTORY.format("partition = ''"), (dataset.id,)).fetchone()
        return self._parsed(db, row["history"]) if row else Counter()

    def _parts(
        self, db: sqlite3.Connection, dataset: Dataset, partition: str | None
    ) -> list[Counts]:
        """Returns the histories of all parts or of one.

        SQL merges equal ones, so that a million parts cost little.
        """
        if partition is None:
            histories = _HISTORY.format("partition <> ''")
            values: tuple[int | str, ...] = (dataset.id,)
        else:
            histories = _HISTORY.format("partition = ?")
            values = (dataset.id, partition)
        rows = db.execute(f"SELECT DISTINCT history FROM ({histories})", values).fetchall()
        return [self._parsed(db, row["history"]) for row in rows]

    def _parsed(self, db: sqlite3.Connection, history: str) -> Counts:
        """Returns the composition of a history such as "3:10,7:1": event 3 ten times, 7 once."""
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
