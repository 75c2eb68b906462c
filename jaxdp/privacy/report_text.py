"""The report of a ledger as text."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.files import shown
from jaxdp.files.text import down, indented, up
from jaxdp.privacy.contacts import FIELDS
from jaxdp.privacy.relations import LABELS, PROTECTED
from jaxdp.privacy.times import local
from jaxdp.privacy.units import unit_words

OWNERS_PUBLIC = "who owns which record counts as public"
# The runs and the spends that did not commit, of which the text shows at most so many.
_MOST_LINES = 20


def text(report: Mapping[str, Any], timezone: datetime.tzinfo) -> str:
    """Returns a report as text. Datasets with equal accounts are shown once."""
    lines = [
        f"Ledger {shown(report['path'])}: {len(report['datasets'])} dataset(s), "
        f"{report['head']['spend']} spend(s), times in {timezone}"
    ]
    for group in grouped(report):
        first = group[0]
        lines += ["", *_terms(group, timezone), *_spends(group, timezone)]
        lines += [*_runs(first, timezone), *_open_spends(first)]
    return "\n".join(lines)


def grouped(report: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Returns the datasets of a report in groups, whose accounts differ only in name and times."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in report["datasets"]:
        groups.setdefault(_account_text(entry), []).append(entry)
    return list(groups.values())


def _account_text(entry: Mapping[str, Any]) -> str:
    """Returns a text that is equal for datasets whose accounts differ only in name and times."""
    compared_apart = {"name", "runs", "open", "spends"}
    terms = {key: entry[key] for key in entry.keys() - compared_apart}
    spends = []
    for row in entry["spends"]:
        spends.append({key: value for key, value in row.items() if not key.endswith("_at")})
    runs = sorted(
        [row["who"], row["host"], row["run"], row["version"], row["spends"]]
        for row in entry["runs"]
    )
    unfinished = [row["id"] for row in entry["open"]]
    return json.dumps([terms, spends, runs, unfinished], sort_keys=True)


def _terms(group: Sequence[Mapping[str, Any]], timezone: datetime.tzinfo) -> list[str]:
    """Returns the lines with the names, terms and epsilon of a group."""
    first = group[0]
    names = ", ".join(shown(entry["name"]) for entry in group)
    if len(group) > 1:
        names = f"{len(group)} datasets with equal accounts: {names}"
    order = "" if first["renyi_order"] is None else f" at order {first['renyi_order']:g}"
    records = "not declared" if first["records"] is None else f"{first['records']} as declared"
    budget = "none"
    if first["budget"] is not None:
        budget = f"epsilon {first['budget']:g} at delta {first['delta']:g}"
    if first["remaining"] is not None:
        budget += f", remaining {down(first['remaining'])}"
    lines = [
        names,
        f"  adjacency    {first['adjacency']}, unit {shown(first['unit'])}, accounting "
        f"{first['accounting']}{order}",
        f"  {unit_words(shown(first['unit'])).many:<12} {records}",
        f"  budget       {budget}",
        f"  epsilon      {first['headline']} at delta {first['delta']:g}",
    ]
    for field in FIELDS:
        if first[field]:
            lines.append(f"  {field:<12} {shown(first[field])}")
    if first["adjacency"] == LABELS:
        lines.append(f"  protects     {PROTECTED[LABELS]}: features count as public")
    if has_public_owners(first):
        lines.append(f"  protects     what records contain: {OWNERS_PUBLIC}")
    if first["headline"] == "inf (empirical only)":
        proven = "inf" if first["proven_epsilon"] is None else up(first["proven_epsilon"])
        lines.append(f"  proven part  {proven} at delta {first['delta']:g}")
    if first["partitions"]:
        lines.append(
            f"  partitions   {first['partitions']} disjoint parts; epsilon is the maximum over them"
        )
    if first["holds"]:
        holds = [_hold(hold, timezone) for hold in first["holds"]]
        lines.append(f"  held         {'; '.join(holds)}; not spent")
    return lines


def has_public_owners(entry: Mapping[str, Any]) -> bool:
    """Returns whether a release about a dataset takes it for public who owns which record."""
    return any("OwnedGaussian(" in row["description"] for row in entry["spends"])


def _hold(hold: Mapping[str, Any], timezone: datetime.tzinfo) -> str:
    holder = shown(hold["label"] or hold["key"] or "-")
    until = _time(hold["lapses_at"], timezone)
    return f"{hold['description']} ({holder}, run {shown(hold['run'])}, until {until})"


def _spends(group: Sequence[Mapping[str, Any]], timezone: datetime.tzinfo) -> list[str]:
    """Returns the table of the spends of a group, whose times are those of all its datasets."""
    first = group[0]
    if not first["spends"]:
        return []
    table = [["spends", "open", "partition", "event", "labels", "first", "last"]]
    for rows in zip(*(entry["spends"] for entry in group), strict=True):
        row = rows[0]
        # Each label once, and none that is empty.
        labels = dict.fromkeys(filter(None, (row["first_label"], row["last_label"])))
        first_at = min(row["first_at"] for row in rows)
        last_at = max(row["last_at"] for row in rows)
        table.append(
            [
                str(row["spends"]),
                str(row["open"]),
                shown(row["partition"] or "(all)"),
                shown(row["description"]),
                shown(" .. ".join(labels) or "-"),
                _time(first_at, timezone),
                _time(last_at, timezone),
            ]
        )
    lines = indented(table)
    if first["rows"] > len(first["spends"]):
        lines.append(f"  ... {first['rows'] - len(first['spends'])} more rows")
    return lines


def _runs(entry: Mapping[str, Any], timezone: datetime.tzinfo) -> list[str]:
    """Returns the table of the latest runs."""
    if not entry["runs"]:
        return []
    table = [["who", "host", "run", "version", "spends", "open", "first", "last"]]
    for row in entry["runs"][-_MOST_LINES:]:
        origin = [shown(row[key]) or "-" for key in ("who", "host", "run", "version")]
        times = [_time(row[key], timezone) for key in ("first_at", "last_at")]
        table.append([*origin, str(row["spends"]), str(row["open"]), *times])
    lines = indented(table)
    if len(entry["runs"]) > _MOST_LINES:
        lines.append(f"  ... {len(entry['runs']) - _MOST_LINES} or more earlier runs")
    return lines


def _open_spends(entry: Mapping[str, Any]) -> list[str]:
    """Returns a line for each spend that did not commit."""
    lines = []
    for row in entry["open"][:_MOST_LINES]:
        lines.append(
            f"  not committed, counted in full: #{row['id']} {row['status']} "
            f"{shown(row['label']) or '-'} (run {shown(row['run'])})"
        )
    more = entry["unfinished"] - len(lines)  # `open` ends at 1000 spends
    if more:
        lines.append(f"  ... {more} more not committed")
    return lines


def _time(time: str, timezone: datetime.tzinfo) -> str:
    return local(time, timezone).isoformat(timespec="seconds")[:19]
