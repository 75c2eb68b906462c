"""What a ledger shows as plain data: the report, every spend, and epsilon by the day."""

import datetime
import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxdp.files import parse_json
from jaxdp.privacy import holds
from jaxdp.privacy.compositions import maximal
from jaxdp.privacy.events import Counts, composition, describe, from_json
from jaxdp.privacy.spent_epsilon import largest_epsilon
from jaxdp.privacy.terms import Dataset
from jaxdp.privacy.times import local, utc

LISTED = 1000  # the most rows of a list, whose numbers do not end there
_OPEN = "status <> 'committed'"
_SPENDS = (
    "SELECT totals.partition, json, spends, coalesce(open, 0) AS open, first_at, last_at, "
    "first_label, last_label FROM totals JOIN events ON events.id = event LEFT JOIN (SELECT "
    f"partition, event, count(*) AS open FROM spends WHERE dataset = :dataset AND {_OPEN} "
    "GROUP BY partition, event) USING (partition, event) WHERE dataset = :dataset ORDER BY "
    f"first_at, totals.partition, event LIMIT {LISTED}"
)
_SUMS = (
    "SELECT count(*) AS rows, count(DISTINCT nullif(partition, '')) AS partitions, "
    'coalesce(max(json LIKE \'%"type":"Unproven"%\'), 0) AS unproven, '
    "coalesce(sum(spends), 0) AS charges, "
    f"(SELECT count(*) FROM spends WHERE dataset = :dataset AND {_OPEN}) AS unfinished "
    "FROM totals JOIN events ON events.id = event WHERE dataset = :dataset"
)
_RUNS = (
    f"SELECT who, host, run, version, count(*) AS spends, sum({_OPEN}) AS open, "
    "min(reserved_at) AS first_at, max(reserved_at) AS last_at FROM spends WHERE dataset "
    f"= :dataset GROUP BY who, host, run, version ORDER BY max(id) DESC LIMIT {LISTED}"
)
_OPEN_SPENDS = (
    "SELECT id, partition, label, status, run, version, who, host, reserved_at FROM spends "
    f"WHERE dataset = :dataset AND {_OPEN} ORDER BY id LIMIT {LISTED}"
)
_HISTORY = (
    "SELECT spends.id AS spend, name AS dataset, partition, json AS event, label, status, "
    "reserved_at, finished_at, who, host, run, version, token, link FROM spends JOIN "
    "datasets ON datasets.id = dataset JOIN events ON events.id = event WHERE dataset = "
    ":dataset OR :dataset IS NULL ORDER BY spends.id"
)


def entry(db: sqlite3.Connection, dataset: Dataset, default_delta: float) -> dict[str, Any]:
    """Returns one dataset of `Ledger.report`, without the fields that need a PLD."""
    (sums,) = _rows(db, _SUMS, dataset)
    return {
        "name": dataset.name,
        "adjacency": dataset.adjacency,
        "unit": dataset.unit,
        "records": dataset.records,
        "accounting": dataset.accounting,
        "renyi_order": dataset.renyi_order,
        "allow_unproven": dataset.allow_unproven,
        "budget": dataset.epsilon,
        "delta": default_delta if dataset.delta is None else dataset.delta,
        **sums,
        "spends": _rows(db, _SPENDS, dataset),
        # The query takes the latest runs. The report shows the oldest of them first.
        "runs": _rows(db, _RUNS, dataset)[::-1],
        "open": _rows(db, _OPEN_SPENDS, dataset),
        "holds": _holds(db, dataset),
    }


def _rows(db: sqlite3.Connection, query: str, dataset: Dataset) -> list[dict[str, Any]]:
    """Returns the rows of a query about a dataset, with its events as data and as text."""
    rows = [dict(row) for row in db.execute(query, {"dataset": dataset.id})]
    for row in rows:
        if "partition" in row:
            row["partition"] = row["partition"] or None
        if "json" in row:
            row |= _event_fields(row.pop("json"))
    return rows


def _holds(db: sqlite3.Connection, dataset: Dataset) -> list[dict[str, Any]]:
    rows = []
    for row in holds.live_holds(db, dataset):
        # A hold whose plan is spent is live until it is closed, and keeps no room.
        if not composition(from_json(row["json"])):
            continue
        rows.append(
            {
                **_event_fields(row["json"]),
                "key": row["key"],
                "label": row["label"],
                "run": row["run"],
                "lapses_at": utc(row["lapses"]),
            }
        )
    return rows


def _event_fields(json: str) -> dict[str, Any]:
    return {"event": parse_json(json), "description": describe(from_json(json))}


def history(db: sqlite3.Connection, dataset: Dataset | None) -> list[dict[str, Any]]:
    """Returns the rows of `Ledger.history`."""
    rows = db.execute(_HISTORY, {"dataset": dataset and dataset.id}).fetchall()
    # Each distinct event is described once, because there are few of them.
    texts = {row["event"] for row in rows}
    descriptions = {text: describe(from_json(text)) for text in texts}
    return [
        {**row, "partition": row["partition"] or None, "event": descriptions[row["event"]]}
        for row in rows
    ]


def by_day(
    rows: Sequence[sqlite3.Row], dataset: Dataset, delta: float, timezone: datetime.tzinfo
) -> list[dict[str, Any]]:
    """Returns the rows of `Ledger.by_day` from those of `spent`."""

    def day_of(row: sqlite3.Row) -> str:
        return local(row["reserved_at"], timezone).date().isoformat()

    # By day, since a clock may have been set back between two spends.
    days = itertools.groupby(sorted(rows, key=day_of), day_of)
    return [
        {
            "day": stretch.key,
            "dataset": dataset.name,
            "spends": len(stretch.rows),
            "epsilon": stretch.epsilon,
            "delta": delta,
        }
        for stretch in _grown(dataset, delta, days)
    ]


def growth(
    rows: Sequence[sqlite3.Row], dataset: Dataset, delta: float, points: int
) -> list[dict[str, Any]]:
    """Returns the rows of `Ledger.growth` from those of `spent`."""
    count = min(points, len(rows))
    # Row i of n belongs to chunk floor(i count / n), so chunks differ by at most one row.
    chunks = itertools.groupby(range(len(rows)), lambda i: i * count // len(rows))
    groups = ((chunk, [rows[i] for i in indices]) for chunk, indices in chunks)
    return [
        {
            "first_at": stretch.rows[0]["reserved_at"],
            "last_at": stretch.rows[-1]["reserved_at"],
            "spends": len(stretch.rows),
            "epsilon": stretch.epsilon,
            "delta": delta,
        }
        for stretch in _grown(dataset, delta, groups)
    ]


def spent(db: sqlite3.Connection, dataset: Dataset) -> list[sqlite3.Row]:
    """Returns the spends on a dataset, the oldest first."""
    return db.execute(
        "SELECT partition, json, reserved_at FROM spends JOIN events ON events.id = event WHERE "
        "dataset = ? ORDER BY spends.id",
        (dataset.id,),
    ).fetchall()


class _Stretch(NamedTuple):
    """Consecutive spends, and epsilon of everything until their end."""

    key: Any
    rows: list[sqlite3.Row]
    epsilon: float


def _grown(
    dataset: Dataset, delta: float, groups: Iterable[tuple[Any, Iterable[sqlite3.Row]]]
) -> Iterator[_Stretch]:
    """Yields each group of consecutive spends, given with its key, with its epsilon."""
    events: dict[str, Counts] = {}
    spent: dict[str, Counts] = {"": Counter()}  # by part, where "" is the whole dataset
    for key, group in groups:
        rows = list(group)
        for row in rows:
            if row["json"] not in events:
                events[row["json"]] = composition(from_json(row["json"]))
            spent.setdefault(row["partition"], Counter()).update(events[row["json"]])
        spent_on_parts = [spent[""] + counts for part, counts in spent.items() if part]
        compositions = maximal(spent_on_parts) or [spent[""]]
        yield _Stretch(key, rows, largest_epsilon(dataset, compositions, delta))
