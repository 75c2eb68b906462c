"""The rows of holds in a ledger's file: room for later events that lapses by itself."""

import secrets
import sqlite3
import time
from collections import Counter
from typing import NamedTuple

from jaxdp.privacy.events import Counts, compose, composition, from_json, to_json
from jaxdp.privacy.terms import Dataset


class HoldTerms(NamedTuple):
    """What all rows of a hold have in common."""

    id: str
    key: str | None
    run: str
    seconds: float


def clock() -> float:
    """Returns seconds since 1970, which all processes of a machine share."""
    return time.time()


def live_holds(db: sqlite3.Connection, dataset: Dataset) -> list[sqlite3.Row]:
    """Returns the holds that have not lapsed, sorted by when they lapse."""
    return db.execute(
        "SELECT id, json, key, label, run, lapses FROM holds WHERE dataset = ? AND lapses > ? "
        "ORDER BY lapses, id",
        (dataset.id, clock()),
    ).fetchall()


def held(db: sqlite3.Connection, dataset: Dataset) -> dict[str | None, Counts]:
    """Returns the composition for which each live hold keeps room."""
    return {row["id"]: composition(from_json(row["json"])) for row in live_holds(db, dataset)}


def take(db: sqlite3.Connection, dataset: Dataset, hold: str, step: Counts) -> None:
    """Takes the events that a live hold shares with `step` out of it and renews it.

    Ignores a hold that is not live.
    """
    room = held(db, dataset).get(hold)
    if room is None:
        return
    # Counters drop what is not positive, so nothing is left where `step` asks for more.
    left = to_json(compose(room - step))
    db.execute("UPDATE holds SET json = ? WHERE id = ? AND dataset = ?", (left, hold, dataset.id))
    # All rows of the hold, those of other datasets too, lapse together.
    db.execute("UPDATE holds SET lapses = ? + seconds WHERE id = ?", (clock(), hold))


def begin(
    db: sqlite3.Connection, outer: str | None, key: str | None, run: str, seconds: float
) -> tuple[HoldTerms, bool]:
    """Returns the terms of a hold to make or extend, and whether it extends the live hold `outer`.

    Deletes holds that lapsed, and the one that a new hold of the same key replaces.
    """
    # Room that has lapsed must not be taken over.
    db.execute("DELETE FROM holds WHERE lapses <= ?", (clock(),))
    row = db.execute("SELECT key, seconds FROM holds WHERE id = ?", (outer,)).fetchone()
    # A hold that lapsed meanwhile is replaced by a new one.
    if outer is not None and row is not None:
        return HoldTerms(outer, row["key"], run, row["seconds"]), True
    db.execute("DELETE FROM holds WHERE key = ?", (key,))
    return HoldTerms(secrets.token_hex(8), key, run, seconds), False


def extend(
    db: sqlite3.Connection, dataset: Dataset, terms: HoldTerms, label: str, needed: Counts
) -> Counts:
    """Raises the room of a hold on a dataset to `needed` at least. Returns what was added.

    A hold of {a: 2} that needs {a: 1, b: 1} keeps room for {a: 2, b: 1} then.
    """
    room = held(db, dataset).get(terms.id, Counter())
    enough = room | needed
    json = to_json(compose(enough))
    lapses = clock() + terms.seconds
    # A hold that is extended keeps its label, run and length.
    db.execute(
        "INSERT INTO holds VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET json "
        "= excluded.json",
        (terms.id, dataset.id, json, terms.key, label, terms.run, terms.seconds, lapses),
    )
    return enough - room


def renew(db: sqlite3.Connection, terms: HoldTerms) -> None:
    """Lets all rows of a hold lapse at one time, counted from now."""
    db.execute("UPDATE holds SET lapses = ? WHERE id = ?", (clock() + terms.seconds, terms.id))


def release(db: sqlite3.Connection, hold: str) -> None:
    """Ends a hold on all datasets."""
    db.execute("DELETE FROM holds WHERE id = ?", (hold,))
