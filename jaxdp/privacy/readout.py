"""What a ledger shows to people: the report as data and as text, every spend, and epsilon by the
day.
"""

import datetime
import itertools
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.files import parse_json, shown
from jaxdp.privacy import books
from jaxdp.privacy.budget import Dataset, epsilon_of, maximal
from jaxdp.privacy.events import Counts, composition, describe, from_json
from jaxdp.privacy.store import utc

_OPEN = "status <> 'committed'"


def entry(db: sqlite3.Connection, dataset: Dataset, default_delta: float) -> dict[str, Any]:
    """Returns one dataset of `Ledger.report`, without the fields that need a PLD."""

    def rows(query: str) -> list[dict[str, Any]]:
        found = [dict(row) for row in db.execute(query, {"dataset": dataset.id})]
        for row in found:
            if "partition" in row:
                row["partition"] = row["partition"] or None
            if "json" in row:
                row |= {
                    "event": parse_json(row["json"]),
                    "description": describe(from_json(row.pop("json"))),
                }
        return found

    spends = rows(
        "SELECT totals.partition, json, spends, coalesce(open, 0) AS open, first_at, last_at, "
        "first_label, last_label FROM totals JOIN events ON events.id = event LEFT JOIN (SELECT "
        f"partition, event, count(*) AS open FROM spends WHERE dataset = :dataset AND {_OPEN} "
        "GROUP BY partition, event) USING (partition, event) WHERE dataset = :dataset ORDER BY "
        "first_at, totals.partition, event LIMIT 1000"
    )
    (counted,) = rows(
        "SELECT count(*) AS rows, count(DISTINCT nullif(partition, '')) AS partitions, "
        'coalesce(max(json LIKE \'%"type":"Unproven"%\'), 0) AS unproven '
        "FROM totals JOIN events ON events.id = event WHERE dataset = :dataset"
    )
    return {
        **{
            key: getattr(dataset, key)
            for key in ("name", "adjacency", "unit", "records", "accounting", "renyi_order")
        },
        "allow_unproven": dataset.allow_unproven,
        "budget": dataset.epsilon,
        "delta": default_delta if dataset.delta is None else dataset.delta,
        **counted,
        "spends": spends,
        "runs": rows(
            f"SELECT who, host, run, version, count(*) AS spends, sum({_OPEN}) AS open, "
            "min(reserved_at) AS first_at, max(reserved_at) AS last_at FROM spends WHERE dataset "
            "= :dataset GROUP BY who, host, run, version ORDER BY max(id) DESC LIMIT 1000"
        )[::-1],
        "open": rows(
            "SELECT id, partition, label, status, run, version, who, host, reserved_at FROM spends "
            f"WHERE dataset = :dataset AND {_OPEN} ORDER BY id LIMIT 1000"
        ),
        "holds": [
            {
                "event": parse_json(row["json"]),
                "description": describe(from_json(row["json"])),
                **{key: row[key] for key in ("key", "label", "run")},
                "lapses_at": utc(row["lapses"]),
            }
            for row in books.live_holds(db, dataset)
            if composition(from_json(row["json"]))
        ],
    }


def finite(value: float) -> float | None:
    """Returns a number for JSON, with None for infinity."""
    return value if math.isfinite(value) else None


def history(db: sqlite3.Connection, dataset: Dataset | None) -> list[dict[str, Any]]:
    """Returns the rows of `Ledger.history`."""
    rows = db.execute(
        "SELECT spends.id AS spend, name AS dataset, partition, json AS event, label, status, "
        "reserved_at, finished_at, who, host, run, version, token, link FROM spends JOIN "
        "datasets ON datasets.id = dataset JOIN events ON events.id = event WHERE dataset = "
        ":dataset OR :dataset IS NULL ORDER BY spends.id",
        {"dataset": dataset and dataset.id},
    ).fetchall()
    events = {text: describe(from_json(text)) for text in {row["event"] for row in rows}}
    return [
        {**row, "partition": row["partition"] or None, "event": events[row["event"]]}
        for row in rows
    ]


def by_day(
    db: sqlite3.Connection, dataset: Dataset, delta: float, timezone: datetime.tzinfo
) -> list[dict[str, Any]]:
    """Returns the rows of `Ledger.by_day`."""
    rows = _spent(db, dataset)
    days = itertools.groupby(
        rows, lambda row: local(row["reserved_at"], timezone).date().isoformat()
    )
    return [
        {
            "day": day,
            "dataset": dataset.name,
            "spends": len(same),
            "epsilon": epsilon,
            "delta": delta,
        }
        for day, same, epsilon in _grown(dataset, delta, days)
    ]


def growth(
    db: sqlite3.Connection, dataset: Dataset, delta: float, points: int
) -> list[dict[str, Any]]:
    """Returns the rows of `Ledger.growth`."""
    rows = _spent(db, dataset)
    chunks = itertools.groupby(
        enumerate(rows), lambda item: item[0] * min(points, len(rows)) // len(rows)
    )
    grown = _grown(dataset, delta, ((chunk, [row for _, row in same]) for chunk, same in chunks))
    return [
        {
            **{
                "first_at": same[0]["reserved_at"],
                "last_at": same[-1]["reserved_at"],
                "spends": len(same),
            },
            **{"epsilon": epsilon, "delta": delta},
        }
        for _, same, epsilon in grown
    ]


def _spent(db: sqlite3.Connection, dataset: Dataset) -> list[sqlite3.Row]:
    return db.execute(
        "SELECT partition, json, reserved_at FROM spends JOIN events ON events.id = event WHERE "
        "dataset = ? ORDER BY spends.id",
        (dataset.id,),
    ).fetchall()


def _grown(
    dataset: Dataset, delta: float, groups: Iterable[tuple[Any, Iterable[sqlite3.Row]]]
) -> Iterable[tuple[Any, list[sqlite3.Row], float]]:
    """Yields each group of consecutive spends with its key, and epsilon of everything until its
    end.
    """
    events: dict[str, Counts] = {}
    spent: dict[str, Counts] = {"": Counter()}  # by part, where "" is the whole dataset
    for key, rows in groups:
        same = list(rows)
        for row in same:
            if row["json"] not in events:
                events[row["json"]] = composition(from_json(row["json"]))
            spent.setdefault(row["partition"], Counter()).update(events[row["json"]])
        parts = [spent[""] + counts for part, counts in spent.items() if part]
        yield (
            key,
            same,
            max(epsilon_of(dataset, counts, delta) for counts in maximal(parts) or [spent[""]]),
        )


def local(time: str, timezone: datetime.tzinfo) -> datetime.datetime:
    """Converts a time of the ledger to a time zone."""
    return datetime.datetime.fromisoformat(time).astimezone(timezone)


# --- Text ---------------------------------------------------------------------------------------


def text(report: Mapping[str, Any], timezone: datetime.tzinfo) -> str:
    """Returns a report as text. Datasets with equal accounts are shown once."""
    lines = [
        f"Ledger {shown(report['path'])}: {len(report['datasets'])} dataset(s), "
        f"{report['head']['spend']} spend(s), times in {timezone}"
    ]
    for group in grouped(report):
        lines += ["", *_render(group, timezone)]
    return "\n".join(lines)


def grouped(report: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Returns the datasets of a report in groups, whose accounts differ only in name and times."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for found in report["datasets"]:
        groups.setdefault(_alike(found), []).append(found)
    return list(groups.values())


def _alike(found: Mapping[str, Any]) -> str:
    """Returns a text that is equal for datasets whose accounts differ only in name and times."""
    own = {"name", "runs", "open", "spends"}
    spends = [
        {key: value for key, value in row.items() if not key.endswith("_at")}
        for row in found["spends"]
    ]
    runs = sorted(
        [row["who"], row["host"], row["run"], row["version"], row["spends"]]
        for row in found["runs"]
    )
    unfinished = [row["id"] for row in found["open"]]
    return json.dumps(
        [{key: found[key] for key in found.keys() - own}, spends, runs, unfinished], sort_keys=True
    )


def _render(group: Sequence[Mapping[str, Any]], timezone: datetime.tzinfo) -> list[str]:
    first = group[0]
    budget = (
        "none"
        if first["budget"] is None
        else f"epsilon {first['budget']:g} at delta {first['delta']:g}"
    )
    order = "" if first["renyi_order"] is None else f" at order {first['renyi_order']:g}"
    proven = "inf" if first["proven_epsilon"] is None else f"{first['proven_epsilon']:.6g}"
    names = ", ".join(shown(found["name"]) for found in group)
    records = "not declared" if first["records"] is None else f"{first['records']} as declared"
    lines = [
        names if len(group) == 1 else f"{len(group)} datasets with equal accounts: {names}",
        f"  adjacency    {first['adjacency']}, unit {shown(first['unit'])}, accounting "
        f"{first['accounting']}{order}",
        f"  records      {records}",
        f"  budget       {budget}"
        + ("" if first["remaining"] is None else f", remaining {first['remaining']:.6g}"),
        f"  epsilon      {first['headline']} at delta {first['delta']:g}",
    ]
    if first["headline"] == "inf (empirical only)":
        lines.append(f"  proven part  {proven} at delta {first['delta']:g}")
    if first["partitions"]:
        lines.append(
            f"  partitions   {first['partitions']} disjoint parts; epsilon is the maximum over them"
        )
    if first["holds"]:
        holds = (
            f"{hold['description']} ({shown(hold['label'] or hold['key'] or '-')}, run "
            f"{shown(hold['run'])}, until {_time(hold['lapses_at'], timezone)})"
            for hold in first["holds"]
        )
        lines.append(f"  held         {'; '.join(holds)}; not spent")
    table = [["spends", "open", "partition", "event", "labels", "first", "last"]]
    for rows in zip(*(found["spends"] for found in group), strict=True):
        one = rows[0]
        labels = (
            " .. ".join(
                dict.fromkeys(one[key] for key in ("first_label", "last_label") if one[key])
            )
            or "-"
        )
        texts = [shown(text) for text in (one["partition"] or "(all)", one["description"], labels)]
        ends = min(row["first_at"] for row in rows), max(row["last_at"] for row in rows)
        table.append(
            [str(one["spends"]), str(one["open"]), *texts, *(_time(end, timezone) for end in ends)]
        )
    lines += [f"  {line}" for line in aligned(table) if first["spends"]]
    if first["rows"] > len(first["spends"]):
        lines.append(f"  ... {first['rows'] - len(first['spends'])} more rows")
    runs = [["who", "host", "run", "version", "spends", "open", "first", "last"]]
    for row in first["runs"][-20:]:
        times = [_time(row[key], timezone) for key in ("first_at", "last_at")]
        about = [shown(row[key]) or "-" for key in ("who", "host", "run", "version")]
        runs.append([*about, str(row["spends"]), str(row["open"]), *times])
    lines += [f"  {line}" for line in aligned(runs) if first["runs"]]
    if len(first["runs"]) > 20:
        lines.append(f"  ... {len(first['runs']) - 20} or more earlier runs")
    for row in first["open"][:20]:
        lines.append(
            f"  not committed, counted in full: #{row['id']} {row['status']} "
            f"{shown(row['label']) or '-'} (run {shown(row['run'])})"
        )
    if len(first["open"]) > 20:
        lines.append(f"  ... {len(first['open']) - 20} or more not committed")
    return lines


def _time(time: str, timezone: datetime.tzinfo) -> str:
    return local(time, timezone).isoformat(timespec="seconds")[:19]


def aligned(table: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yields the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
