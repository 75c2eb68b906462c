"""The rows of datasets and tokens in a ledger's file, as values."""

import dataclasses
import sqlite3

from jaxdp.privacy.terms import Dataset, Terms
from jaxdp.privacy.times import now

_DATASETS = (
    "SELECT id, name, adjacency, unit, epsilon, delta, accounting, renyi_order, allow_unproven, "
    "records FROM datasets"
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


def insert_dataset(db: sqlite3.Connection, name: str, terms: Terms) -> None:
    """Adds a dataset, whose terms the caller seals."""
    row = {"name": name, **dataclasses.asdict(terms), "created_at": now()}
    values = ", ".join("?" * len(row))
    db.execute(
        f"INSERT INTO datasets ({', '.join(row)}) VALUES ({values})",
        tuple(row.values()),
    )


def paid_for(db: sqlite3.Connection, dataset: Dataset, token: str | None) -> sqlite3.Row | None:
    """Returns the number, partition and event of the spend with a token, or None."""
    row: sqlite3.Row | None = db.execute(
        "SELECT spends.id, partition, json FROM spends JOIN events ON events.id = event "
        "WHERE dataset = ? AND token = ?",
        (dataset.id, token),
    ).fetchone()
    return row
