"""The ledger: one durable account of everything that was released about each private dataset.

    ledger = Ledger("ledger.sqlite")
    ledger.register("cifar10/train", adjacency="add_remove", unit="example", epsilon=8.0, delta=1e-5)
    with ledger.spend("cifar10/train", event, label="dp-sgd epoch 3"):
        ...  # touch the private data here
    ledger.epsilon("cifar10/train")

It stores events, not epsilons, and recomputes epsilon from their counts. `spend` reserves on disk at the call and the
`with` marks it committed at its end, so whatever ran is charged, whatever happens: an exception or a kill -9 leaves
the reservation spent. Checks and reservation are one SQLite transaction (WAL, synchronous=FULL), so several threads and
processes on one machine share a file and never overspend its budgets together. Keep the file on a local disk:
SQLite's locks do not hold on most network file systems.

Formal guarantees. For every registered dataset, the releases made inside `spend` bodies are jointly
(`Ledger.epsilon`, delta)-DP for the registered adjacency and unit, provided each body's release satisfies its event:

* ``accounting="pld"`` or ``"rdp"``: the sequence of events is fixed in advance. Each mechanism may use all earlier
  outputs (adaptive inputs: DP-SGD, tuning on released numbers), but neither the events themselves - noise, sampling,
  number of steps - nor the moment to stop may be chosen by looking at outputs. If a run stops early because of what
  it saw, quote the planned total (the budget), not the smaller number spent. Budgets stop overspending in either
  case, but the proof behind them needs fixed events.
* ``accounting="renyi_filter"``: events may be chosen fully adaptively. One Renyi order is fixed at registration and
  spending stops before the sum of Renyi losses at that order passes the bound that converts to (epsilon, delta)
  (Feldman and Zrnic 2021, arXiv 2008.11193; Lecuyer 2021, arXiv 2103.01379). What holds is the registered
  budget, so that is what `Ledger.epsilon` reports once anything was spent: a sum of adaptively chosen losses is not
  itself a bound.
* Partitions. `spend(..., partition="a")` says that the release reads only part "a" of a fixed division of the
  dataset into disjoint parts; the dataset's epsilon is then the maximum over parts of (releases on everything plus
  releases on that part). This needs that a record's part does not depend on other records (its content, its
  identity or its arrival time decide, not a rank or a cluster). Under "replace_one" it also needs that a record and
  its replacement lie in the same part: assign parts by something public that stays (slot, arrival time, hospital), and
  read the guarantee as hiding a record's content, not its part. Otherwise a replacement changes two parts at once;
  spend with `partition=None`, which composes with everything.
* Holds. `Ledger.hold` keeps room for a plan, so that a parallel program cannot take it in between. A hold is no
  spend: it changes no epsilon. `jaxdp.privacy.accounts.Hold` says when room that was not used may go back.
* One record in several datasets. `Ledger.epsilon` speaks for one dataset, `Ledger.total` for a record in all of
  several.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from jaxdp.privacy.accounting import (
    RELATIONS,
    Adjacency,
    Method,
    check_rules,
    default_renyi_order,
    epsilon_of_counts,
    rdp_epsilon_of_counts,
    rdp_of_counts,
    renyi_bound,
    renyi_epsilon,
)
from jaxdp.privacy.accounts import DAY, Account, Hold, Requests, Reservation, Spend
from jaxdp.privacy.events import DpEvent, UnprovenDpEvent, compose, composition, describe, from_json, to_json
from jaxdp.version import __version__

Accounting = Literal["pld", "rdp", "renyi_filter"]
Counts = Mapping[DpEvent, int]
Result = TypeVar("Result")

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x6A647031  # "jdp1", so that `file` and we can tell a ledger from another SQLite file.
_BUSY_SECONDS = 60.0
# 3 * 0.1 is 0.30000000000000004 in binary: a budget of 0.3 must still buy three spends of 0.1.
_ROUNDING = 1e-12
_REMEMBERED = 64
# `Ledger.total` goes through so many combinations of parts at most; beyond them it takes an upper bound.
_COMBINATIONS = 1000
_TERMS = "id, name, adjacency, unit, epsilon, delta, accounting, renyi_order, allow_unproven"

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
    created_at TEXT NOT NULL
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
    finished_at TEXT
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

# Made when a ledger first holds something, so that other files stay as they are. An older jaxdp ignores the table: its
# spends may take room that is held, and never more than the budget.
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
) WITHOUT ROWID
"""


class BudgetExceeded(RuntimeError):
    """A spend that its dataset's budget does not allow; nothing ran and nothing was charged.

    Attributes:
        dataset: the dataset's name.
        budget: (epsilon, delta) as registered.
        would_spend: epsilon at the budget's delta with this spend, and all that others hold, included.
        held: how much of `would_spend` is room that others hold; 0.0 if they hold none.
    """

    def __init__(
        self, message: str, *, dataset: str, budget: tuple[float, float], would_spend: float, held: float = 0.0
    ):
        super().__init__(message)
        self.dataset = dataset
        self.budget = budget
        self.would_spend = would_spend
        self.held = held


@dataclasses.dataclass(frozen=True)
class _Dataset:
    id: int
    name: str
    adjacency: Adjacency
    unit: str
    epsilon: float | None
    delta: float | None
    accounting: Accounting
    renyi_order: float | None
    allow_unproven: bool

    @property
    def method(self) -> Method:
        """The method of `jaxdp.privacy.accounting` behind this dataset's numbers."""
        return "auto" if self.accounting == "pld" else "rdp"

    @property
    def renyi_bound(self) -> float:
        """The largest Renyi loss at the fixed order that converts to the budget."""
        assert self.epsilon is not None and self.delta is not None and self.renyi_order is not None
        return renyi_bound(self.epsilon, self.delta, self.renyi_order)


class Ledger:
    """The account of all releases about the datasets registered in it; see the module's text for its guarantees.

    Safe to share between threads, and between processes by opening the same path in each.

    Args:
        path: the SQLite file; created if it does not exist, its directory must.
        run: an identifier of this run, stored with every spend; random by default.

    Raises:
        ValueError: the file is not a ledger, cannot be opened or made, or a newer jaxdp wrote it.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str | None = None):
        self._path = os.fspath(path)
        self._run = run or secrets.token_hex(8)
        self._lock = threading.RLock()
        self._budgets: dict[int, _BudgetCheck] = {}
        if self._path != ":memory:" and not Path(self._path).absolute().parent.is_dir():
            raise ValueError(f"path {self._path!r} lies in a directory that does not exist; create the directory first")
        self._open()

    @classmethod
    def in_memory(cls, *, run: str | None = None) -> "Ledger":
        """Returns a ledger that lives and dies with this process, for notebooks and tests."""
        return cls(":memory:", run=run)

    def close(self) -> None:
        """Closes the file; the ledger cannot be used afterwards."""
        with self._lock:
            self._close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- Datasets and spending ----------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        *,
        adjacency: Adjacency,
        unit: str,
        epsilon: float | None = None,
        delta: float | None = None,
        accounting: Accounting = "pld",
        renyi_order: float | None = None,
        allow_unproven: bool = False,
    ) -> None:
        """Registers a private dataset; registering it again with the same terms does nothing.

        Args:
            name: the dataset's name in this ledger.
            adjacency: which datasets are neighbours: "add_remove" one unit, "replace_one" by another, or "zero_out"
                one (replace it by the zero or null record).
            unit: what one neighbour differs in, in words: "example", "user", "patient".
            epsilon: the budget; None records spends without limiting them.
            delta: the budget's delta, and the default delta of queries. 0 allows pure releases only.
            accounting: "pld" (PLD, or RDP where an event has no PLD rule), "rdp", or "renyi_filter" for a budget that
                holds under fully adaptive choice of events; see the module's text.
            renyi_order: for "renyi_filter", the order > 1 fixed for this dataset's life. By default the order that
                admits most of a mechanism whose Renyi loss is proportional to the order, as the Gaussian's is.
            allow_unproven: let `privacy.unproven(...)` releases through although there is a budget. They turn the
                headline epsilon into infinity; the budget then limits the proven part.

        Raises:
            ValueError: an argument is impossible, or the dataset is registered on other terms.
        """
        if not name or not isinstance(name, str):
            raise ValueError(f"name must be a non-empty string, got {name!r}")
        if not unit or not isinstance(unit, str):
            raise ValueError(f"unit must be a non-empty string such as 'example' or 'user', got {unit!r}")
        if adjacency not in RELATIONS:
            raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}")
        if accounting not in ("pld", "rdp", "renyi_filter"):
            raise ValueError(f"accounting must be 'pld', 'rdp' or 'renyi_filter', got {accounting!r}")
        if delta is not None and not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta!r}")
        if epsilon is not None and (not 0 < epsilon < math.inf or delta is None):
            raise ValueError(
                f"a budget needs a finite epsilon > 0 and a delta (0.0 for pure releases), got {epsilon=}, {delta=}"
            )
        if accounting == "renyi_filter":
            if epsilon is None or not delta:
                raise ValueError(f"accounting='renyi_filter' needs a budget with delta > 0, got {epsilon=}, {delta=}")
            renyi_order = default_renyi_order(epsilon, delta) if renyi_order is None else float(renyi_order)
            if not 1 < renyi_order < math.inf or renyi_bound(epsilon, delta, renyi_order) <= 0:
                raise ValueError(
                    f"renyi_order={renyi_order!r} leaves nothing to spend of epsilon={epsilon!r} at delta={delta!r}; "
                    "use a larger order, or leave it out"
                )
        elif renyi_order is not None:
            raise ValueError(f"renyi_order={renyi_order!r} needs accounting='renyi_filter'")
        terms = {
            "adjacency": adjacency,
            "unit": unit,
            "epsilon": None if epsilon is None else float(epsilon),
            "delta": None if delta is None else float(delta),
            "accounting": accounting,
            "renyi_order": renyi_order,
            "allow_unproven": bool(allow_unproven),
        }
        with self._transaction() as db:
            existing = _find_dataset(db, name)
            if existing is None:
                db.execute(
                    "INSERT INTO datasets (name, adjacency, unit, epsilon, delta, accounting, renyi_order, "
                    "allow_unproven, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (name, *terms.values(), _now()),
                )
                return
            different = [
                f"{key} {getattr(existing, key)!r}, not {value!r}"
                for key, value in terms.items()
                if getattr(existing, key) != value
            ]
            if different:
                raise ValueError(
                    f"dataset {name!r} is already registered with {'; '.join(different)}. Terms never change: what "
                    "was spent was promised under them. Use the same terms, or another name for other data"
                )

    def account(self, name: str, *, label: str = "") -> Account:
        """Returns a dataset as one value to spend from.

        Args:
            name: a registered dataset.
            label: who spends, shown before the labels of single spends. Never put data in it.

        Raises:
            ValueError: the dataset is not registered.
        """
        return Account(self, name, label)

    def spend(
        self,
        name: str | Account,
        event: DpEvent,
        *,
        partition: str | None = None,
        label: str = "",
        token: str | None = None,
    ) -> Reservation[Spend]:
        """Charges `event` to a dataset; `with` runs the body that it pays for, and marks the charge committed.

        The budget check and the reservation are one transaction, on disk before this returns. If the body raises, the
        process dies or `with` is never entered, the reservation stays spent: nobody can tell what was seen.

        Args:
            name: a registered dataset, or an account of this ledger.
            event: what the body releases, in the vocabulary of `jaxdp.privacy.events`.
            partition: the part of the dataset that the body reads, if the dataset has a fixed division into disjoint
                parts (see the module's text); None for all of it.
            label: for people who read the report; an account puts its own in front. Never put data in it.
            token: makes a retry after a crash free. A second spend with the same dataset and token is not charged
                again and yields `replay=True`, whatever became of the first. The token must therefore determine the
                released value bit for bit - program, inputs, noise key, hardware: for example a hash of a checkpoint
                that holds the key, with the step number. Fresh noise needs a fresh token.

        Returns:
            A `Reservation`, to be entered once; `with` yields its `Spend`.

        Raises:
            BudgetExceeded: before anything runs or is charged.
            ValueError: unknown dataset or event; an event without an accounting rule for this dataset's adjacency; a
                token that was used for another event or partition; an account of another ledger.
            OSError: the file cannot be written, for example because its disk is full. Before the body: it does not run
                and nothing is charged. After it: the release counts, but its mark in the report stays "reserved".
        """
        (spend,) = self._reserve([self._request(name, event, label)], partition, token)
        return Reservation(self, spend)

    def spend_all(
        self, requests: Requests, *, label: str = "", token: str | None = None
    ) -> Reservation[tuple[Spend, ...]]:
        """Charges an event to each of several datasets or to none; `with` runs the body that they pay for.

        Args:
            requests: (registered dataset or account of this ledger, event) pairs; a dataset that is named twice pays
                twice.
            label: as in `spend`.
            token: as in `spend`, one for all of them; each dataset may then be named once only.

        Returns:
            A `Reservation`, to be entered once; `with` yields one `Spend` per request.

        Raises:
            BudgetExceeded, ValueError, OSError: as `spend`, for the first dataset that cannot pay; then nothing is
                charged on any dataset.
        """
        asked = [self._request(account, event, label) for account, event in requests]
        names = [request.name for request in asked]
        if token is not None and len(set(names)) < len(names):
            raise ValueError(f"with a token each dataset pays once, but requests names {sorted(names)}")
        return Reservation(self, self._reserve(asked, None, token))

    def hold(self, requests: Requests, *, key: str | None = None, label: str = "", seconds: float = DAY) -> Hold:
        """Keeps room for events that will be spent later, on all of several datasets or on none.

        Spends and holds of others, in this process or another, must fit beside what is held. A hold is no spend:
        `epsilon`, `remaining` and `events` are as without it, and the report lists it apart. Partitions do not matter:
        a hold is on whole datasets, and a spend on any part takes from it.

        Under an account that spends from a hold already, this extends that hold: it makes sure that the event fits into
        what the other one keeps, and adds what is missing. Closing the new one returns what it added. `key` and
        `seconds` of the other one stay; those given here do not count.

        Args:
            requests: (registered dataset or account of this ledger, event) pairs; a dataset that is named twice gets
                room for the sum. Accounts that spend from a hold must share it.
            key: who holds. A hold replaces the one with the same key, so a program that died and is started again
                takes its own over. It should then hold what is still to be paid (`paid` tells).
            label: for people who read the report. Never put data in it.
            seconds: the hold lapses so long after it was made or last spent from, so that a program that died does not
                keep the room for ever.

        Returns:
            A `Hold`; spend from it through `hold.account(name)`. Its text says when the accounting allows room to be
            returned.

        Raises:
            BudgetExceeded: some dataset has no room beside what is spent and what others hold; nothing is held then.
            ValueError, OSError: as `spend`; an impossible `key` or `seconds`.
        """
        asked = [self._request(account, event, label) for account, event in requests]
        _check_text("key", key)
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be finite and > 0, got {seconds!r}")
        outer = {request.hold for request in asked if request.hold is not None}
        if len(outer) > 1:
            raise ValueError(
                f"requests has accounts that spend from {len(outer)} different holds; hold for the accounts of one at "
                "a time"
            )
        return self._settled(lambda db: self._make_hold(db, asked, min(outer, default=None), key, float(seconds)))

    # --- Questions ----------------------------------------------------------------------------------------------

    def adjacency(self, name: str) -> Adjacency:
        """Returns the neighbouring relation that a dataset was registered with; ValueError if it was not."""
        with self._transaction("DEFERRED") as db:
            return _dataset(db, name).adjacency

    def delta(self, name: str) -> float | None:
        """Returns the delta that a dataset was registered with, or None; ValueError if the dataset was not."""
        with self._transaction("DEFERRED") as db:
            return _dataset(db, name).delta

    def paid(self, name: str, token: str) -> bool:
        """Returns whether a spend with this token was charged to a dataset, so that the next one would be a replay.

        Raises:
            ValueError: unknown dataset, or an impossible token.
        """
        _check_text("token", token)
        with self._transaction("DEFERRED") as db:
            return _find_token(db, _dataset(db, name), token) is not None

    def would_cost(
        self, name: str, event: DpEvent, *, delta: float | None = None, partition: str | None = None
    ) -> float:
        """Returns what `epsilon(name, delta=, partition=)` would be after spending `event` there; spends nothing.

        It does not ask whether the budget allows the spend: `check` does. For a "renyi_filter" dataset the answer is
        that of its bound, or more where the bound does not allow the event.

        Raises:
            ValueError: as `epsilon`; an event that is unknown or has no accounting rule for the dataset's adjacency.
        """
        return self._epsilon(name, delta, partition, step=composition(event))

    def check(self, requests: Requests) -> None:
        """Raises what `spend_all` of the same requests would raise; changes nothing.

        It counts what others hold, and under an account of a hold the room that is there. A dataset that is named
        several times is asked for the sum. Somebody else may take the room right afterwards: `hold` keeps it.

        Args:
            requests: (registered dataset or account of this ledger, event) pairs.

        Raises:
            BudgetExceeded, ValueError: as `spend_all`.
        """
        asked = [self._request(account, event, "") for account, event in requests]
        self._settled(lambda db: self._admit_all(db, asked, None, ahead=True), "DEFERRED")

    def epsilon(self, name: str, *, delta: float | None = None, partition: str | None = None) -> float:
        """Returns epsilon of everything reserved so far, as (epsilon, delta)-DP under the dataset's adjacency.

        Args:
            name: a registered dataset.
            delta: by default the registered one.
            partition: only for the units of this part; by default the maximum over all parts.

        Returns:
            Epsilon >= 0; `math.inf` if some release is unproven or not private, or delta is 0 and not all are pure.

        Raises:
            ValueError: unknown dataset, or no delta is given or registered.
        """
        return self._epsilon(name, delta, partition)

    def proven_epsilon(self, name: str, *, delta: float | None = None, partition: str | None = None) -> float:
        """Returns `epsilon` of the releases that have a proof, leaving the unproven ones out. Never the headline."""
        return self._epsilon(name, delta, partition, proven_only=True)

    def total(self, names: Sequence[str], *, delta: float) -> float:
        """Returns epsilon, at `delta`, for a record that may be in all of several datasets.

        Changing such a record changes every dataset at once, to a neighbour each. So the releases of all of them
        compose as if they were made about one dataset: the PLD (or RDP) of the sum of their compositions. In each
        dataset the record lies in one part; the result is the maximum over all choices of parts. Releases that read
        the datasets in turn, each with a view of all earlier outputs, are covered, since adaptive composition does not
        ask which input a mechanism reads.

        A "renyi_filter" dataset, whose events may be chosen adaptively, enters as one interactive mechanism that is
        (registered epsilon, registered delta)-DP, once anything was spent on it. Epsilons and deltas of concurrent
        interactive mechanisms add up (Vadhan and Zhang 2023, arXiv 2207.08335; Lyu 2022, arXiv 2207.09397):
        the result is the sum of the registered epsilons and of the epsilon of the other datasets at `delta` less the
        registered deltas.

        Args:
            names: registered datasets of one adjacency and unit; one that is named twice counts once.
            delta: in [0, 1).

        Returns:
            Epsilon >= 0; `math.inf` if some release is unproven or not private. With very many parts, an upper bound.

        Raises:
            ValueError: an unknown dataset or no name; adjacencies or units that differ; events without a common
                accounting rule; a `delta` that leaves nothing beside the registered ones of "renyi_filter" datasets.
        """
        if isinstance(names, str) or not names:
            raise ValueError(f"names must be a sequence of one or more datasets, got {names!r}")
        if not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta!r}")
        with self._transaction("DEFERRED") as db:
            datasets = [_dataset(db, name) for name in dict.fromkeys(names)]
            compositions = [_compositions(db, dataset, None) for dataset in datasets]
        first = datasets[0]
        for dataset in datasets:
            if (dataset.adjacency, dataset.unit) != (first.adjacency, first.unit):
                raise ValueError(
                    f"names: dataset {first.name!r} has adjacency {first.adjacency!r} and unit {first.unit!r}, "
                    f"{dataset.name!r} has {dataset.adjacency!r} and {dataset.unit!r}, so no one change of a record is "
                    "meant; ask for datasets that share both, and register data of the same people with the same terms"
                )
        if any(not _is_proven(counts) for parts in compositions for counts in parts):
            return math.inf
        accounts = list(zip(datasets, compositions, strict=True))
        filtered = [data for data, parts in accounts if data.accounting == "renyi_filter" and any(parts)]
        together = _combinations(parts for data, parts in accounts if data.accounting != "renyi_filter")
        taken = math.fsum(dataset.delta or 0.0 for dataset in filtered)
        left = 0.0 if math.isclose(taken, delta) else delta - taken
        if left < 0 or (filtered and left == 0 and any(together)):
            raise ValueError(
                f"delta={delta!r} leaves nothing beside the registered deltas of the 'renyi_filter' datasets "
                f"{[dataset.name for dataset in filtered]}, which add up to {taken:g}; ask for a larger delta"
            )
        method: Method = "auto" if any(dataset.accounting == "pld" for dataset in datasets) else "rdp"
        rest = max(_cached_epsilon(frozenset(c.items()), left, first.adjacency, method) for c in together)
        return rest + math.fsum(dataset.epsilon or 0.0 for dataset in filtered)

    def remaining(self, name: str, *, partition: str | None = None) -> float:
        """Returns the budget's epsilon less what is spent, at the budget's delta; infinite without a budget.

        Epsilons do not add up, so the next event may cost less than its own epsilon. What is held counts as free. For a
        "renyi_filter" dataset it is the share of the Renyi bound that is left, times the budget's epsilon. Unproven
        releases do not count.
        """
        with self._transaction("DEFERRED") as db:
            dataset = _dataset(db, name)
            if dataset.epsilon is None or dataset.delta is None:
                return math.inf
            compositions = _compositions(db, dataset, partition)
        return max(0.0, dataset.epsilon - max(_used(dataset, _proven(counts)) for counts in compositions))

    def events(self, name: str) -> dict[str | None, DpEvent]:
        """Returns what was reserved, composed per partition; key None holds the releases on the whole dataset."""
        with self._transaction("DEFERRED") as db:
            parse = _history_parser(db)
            rows = db.execute(_HISTORY.format("1"), (_dataset(db, name).id,)).fetchall()
            composed = {history: compose(parse(history)) for history in {row["history"] for row in rows}}
        return {row["partition"] or None: composed[row["history"]] for row in rows}

    def report(self, *, delta: float = 1e-5) -> dict[str, Any]:
        """Returns the whole account as plain data, ready for JSON.

        Args:
            delta: used for datasets that have none registered.

        Returns:
            {"path", "schema_version", "datasets": [...]}. Each dataset has its terms; at its `delta` the `headline`
            (text) and `proven_epsilon` and `remaining` (numbers, None for infinity); the number of `partitions`;
            `spends`, one row per partition and event, at most 1000 of `rows` in all; `open`, at most 1000 spends
            that did not commit (running, failed or killed): they count in full; and `holds`, the room that live holds
            keep, in no number of the report.
        """
        with self._transaction("DEFERRED") as db:
            datasets = [_Dataset(**row) for row in db.execute(f"SELECT {_TERMS} FROM datasets ORDER BY name")]
            entries = [_report_of(db, dataset, delta) for dataset in datasets]
        for entry in entries:  # Outside the transaction: this may compute PLDs.
            epsilon = self.epsilon(entry["name"], delta=entry["delta"])
            entry["headline"] = "inf (empirical only)" if entry.pop("unproven") else f"{epsilon:.6g}"
            entry["proven_epsilon"] = _finite(self.proven_epsilon(entry["name"], delta=entry["delta"]))
            entry["remaining"] = _finite(self.remaining(entry["name"]))
        return {"path": self._path, "schema_version": SCHEMA_VERSION, "datasets": entries}

    def report_text(self, *, delta: float = 1e-5) -> str:
        """Returns `report` for people."""
        report = self.report(delta=delta)
        lines = [f"Ledger {report['path']}: {len(report['datasets'])} dataset(s)"]
        for entry in report["datasets"]:
            lines += ["", *_render(entry)]
        return "\n".join(lines)

    # --- Inside -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._pid = os.getpid()
        self._db = _connect(self._path)
        self._close = weakref.finalize(self, self._db.close)

    @contextlib.contextmanager
    def _transaction(self, mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Yields the connection inside one transaction; IMMEDIATE takes the write lock first."""
        with self._lock:
            if self._pid != os.getpid():
                if self._path == ":memory:":
                    raise RuntimeError(
                        "an in-memory ledger cannot be shared with a forked process; open a file instead"
                    )
                self._close.detach()  # The parent owns the inherited connection: SQLite forbids touching it here.
                self._inherited = self._db
                self._open()
            db = self._db
            try:
                db.execute(f"BEGIN {mode}")
                yield db
                db.execute("COMMIT")
            except BaseException as error:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise OSError(
                        f"ledger {self._path!r} cannot be read or written: {error}. Everything that was reserved in "
                        "it still counts. Mend this (free space on its disk, or wait for the process that holds it), "
                        "and go on"
                    ) from error
                raise

    def _request(self, account: str | Account, event: DpEvent, label: str) -> "_Request":
        if not isinstance(label, str):
            raise ValueError(f"label must be a string, got {label!r}")
        step = composition(event)
        if not isinstance(account, Account):
            return _Request(account, None, label, step)
        if account.ledger is not self:
            raise ValueError(
                f"account {account.name!r} belongs to the ledger {account.ledger._path!r}, which was not asked "
                f"({self._path!r} was); take it from this one: ledger.account({account.name!r})"
            )
        hold = None if account.held is None else account.held._id
        return _Request(account.name, hold, account.labelled(label), step)

    def _settled(
        self, work: Callable[[sqlite3.Connection], Result], mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE"
    ) -> Result:
        """Returns `work(db)` of one transaction, which starts again whenever a PLD has to decide something."""
        while True:
            try:
                with self._transaction(mode) as db:
                    return work(db)
            except _Unsettled as error:
                unsettled = error
            # Slow and without the write lock; counts may move meanwhile, so the loop looks again.
            with self._lock:
                allowed = unsettled.decide()
            if not allowed:
                raise unsettled.refusal()

    def _admit_all(
        self, db: sqlite3.Connection, requests: Sequence["_Request"], partition: str | None, *, ahead: bool
    ) -> None:
        """Raises unless every dataset has room for the sum of its requests."""
        for name in dict.fromkeys(request.name for request in requests):
            steps: dict[str | None, Counts] = {}
            for request in requests:
                if request.name == name:
                    steps[request.hold] = _sum(steps.get(request.hold, {}), request.step)
            self._admit(db, _dataset(db, name), partition, steps, ahead=ahead)

    def _admit(
        self,
        db: sqlite3.Connection,
        dataset: _Dataset,
        partition: str | None,
        steps: Mapping[str | None, Counts],
        *,
        ahead: bool,
    ) -> None:
        """Raises unless `steps`, {the hold whose room is taken: events}, fit beside what is spent and held.

        What a hold keeps and a step takes out of it is counted once: while a program spends what it holds, the sum
        stays the same, and so does the verdict.
        """
        held = _held(db, dataset)
        others = _sum_all(counts for hold, counts in held.items() if hold not in steps)
        own = _sum_all(_maximum(held.get(hold, {}), step) for hold, step in steps.items())
        question = _Unsettled(
            self._budgets.setdefault(dataset.id, _BudgetCheck(dataset)),
            _compositions(db, dataset, partition),
            others,
            own,
            _sum_all(steps.values()),
            ahead,
        )
        for counts in question.after:
            check_rules(counts, adjacency=dataset.adjacency, method=dataset.method)
        if not question.is_allowed():
            raise question

    def _reserve(self, requests: Sequence["_Request"], partition: str | None, token: str | None) -> tuple[Spend, ...]:
        """Reserves all of the requests or none."""
        _check_text("partition", partition)
        _check_text("token", token)
        return self._settled(lambda db: self._reserve_all(db, requests, partition, token))

    def _reserve_all(
        self, db: sqlite3.Connection, requests: Sequence["_Request"], partition: str | None, token: str | None
    ) -> tuple[Spend, ...]:
        replayed = {request.name: _replayed(db, request, partition, token) for request in requests}
        self._admit_all(db, [r for r in requests if replayed[r.name] is None], partition, ahead=True)
        spends = []
        for request in requests:
            replay = replayed[request.name]
            if replay is None:
                dataset, event = _dataset(db, request.name), compose(request.step)
                number = _insert(db, dataset, partition, to_json(event), request.label, token, self._run)
                if request.hold is not None:
                    _take(db, dataset, request.hold, request.step)
                replay = Spend(number, request.name, event, replay=False)
            spends.append(replay)
        return tuple(spends)

    def _make_hold(
        self, db: sqlite3.Connection, requests: Sequence["_Request"], outer: str | None, key: str | None, seconds: float
    ) -> Hold:
        """Makes a hold, or extends the live hold `outer`."""
        now = _clock()
        db.execute(_HOLDS)
        db.execute("DELETE FROM holds WHERE lapses <= ?", (now,))
        terms = db.execute("SELECT key, seconds FROM holds WHERE id = ?", (outer,)).fetchone()
        if terms is None:
            outer = None
            db.execute("DELETE FROM holds WHERE key = ?", (key,))
        else:
            key, seconds = terms
        hold = outer or secrets.token_hex(8)
        self._admit_all(db, [request._replace(hold=hold) for request in requests], None, ahead=False)
        added = {}
        for name in dict.fromkeys(request.name for request in requests):
            dataset, same = _dataset(db, name), [request for request in requests if request.name == name]
            kept = _held(db, dataset).get(hold, {})
            wanted = _maximum(kept, _sum_all(request.step for request in same))
            added[name] = _difference(wanted, kept)
            db.execute(
                "INSERT INTO holds VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET json = excluded.json",
                (hold, dataset.id, to_json(compose(wanted)), key, same[0].label, self._run, seconds, now + seconds),
            )
        db.execute("UPDATE holds SET lapses = ? WHERE id = ?", (now + seconds, hold))
        return Hold(self, hold, added, nested=outer is not None)

    def _held_left(self, hold: str, name: str) -> DpEvent:
        with self._transaction("DEFERRED") as db:
            return compose(_held(db, _dataset(db, name)).get(hold, {}))

    def _release(self, hold: str, added: Mapping[str, Counts] | None) -> None:
        """Returns what was added to a hold, or with None the whole hold."""
        with self._transaction() as db:
            if added is None:
                db.execute("DELETE FROM holds WHERE id = ?", (hold,))
            for name, counts in (added or {}).items():
                _take(db, _dataset(db, name), hold, counts)

    def _finish(self, spends: Sequence[Spend], status: Literal["committed", "failed"]) -> None:
        with self._transaction() as db:
            db.executemany(
                "UPDATE spends SET status = ?, finished_at = ? WHERE id = ?",
                [(status, _now(), spend.id) for spend in spends],
            )

    def _epsilon(
        self,
        name: str,
        delta: float | None,
        partition: str | None,
        *,
        proven_only: bool = False,
        step: Counts | None = None,
    ) -> float:
        """Returns epsilon of all releases, or of the proven ones, or of all and a next `step`."""
        with self._transaction("DEFERRED") as db:
            dataset = _dataset(db, name)
            compositions = _compositions(db, dataset, partition)
        delta = dataset.delta if delta is None else delta
        if delta is None:
            raise ValueError(f"delta is needed: dataset {name!r} has none registered")
        if proven_only:
            compositions = [_proven(counts) for counts in compositions]
        if step is not None:
            compositions = [_sum(counts, step) for counts in compositions]
            for counts in compositions:
                check_rules(counts, adjacency=dataset.adjacency, method=dataset.method)
        return max(_epsilon_of(dataset, counts, delta) for counts in compositions)


class _Request(NamedTuple):
    """One event for one dataset."""

    name: str
    hold: str | None
    label: str
    step: Counts


class _Unsettled(Exception):
    """A question that the budget denies, or that a PLD has to decide.

    Args:
        check: of the dataset.
        spent: compositions of what is spent.
        others: what others hold.
        own: what is asked for, with all that its own holds keep.
        step: what is asked for.
        ahead: whether more steps of this kind are likely to follow.
    """

    def __init__(
        self, check: "_BudgetCheck", spent: Sequence[Counts], others: Counts, own: Counts, step: Counts, ahead: bool
    ):
        super().__init__()
        self._check, self._spent, self._others, self._own, self._step = check, spent, others, own, step
        self._ahead = ahead
        self.after = [_sum(_sum(counts, others), own) for counts in spent]

    def is_allowed(self) -> bool:
        """Returns whether the budget is known to allow it."""
        return not self._check.refuses_unproven(self._step) and all(map(self._check.known, self.after))

    def decide(self) -> bool:
        """Makes the check know; returns False if it is certain that the budget does not allow it."""
        if self._check.refuses_unproven(self._step):
            return False
        verdicts = [self._check.known(counts) for counts in self.after]
        if any(verdict is False for verdict in verdicts):
            return False
        for counts, verdict in zip(self.after, verdicts, strict=True):
            if verdict is None:
                self._check.decide(counts, self._step if self._ahead else {}, remember=_REMEMBERED + len(self.after))
        return True

    def refusal(self) -> BudgetExceeded:
        """Returns the error for the user."""
        return self._check.exceeded(self._spent, self._others, self._own, self._step)


class _BudgetCheck:
    """Decides whether compositions fit a dataset's budget, computing a PLD as seldom as it can.

    Composition is monotone: what fits, fits with fewer releases, and what does not, does not with more. So a few
    compositions known to fit or not answer most questions; and RDP, where it is enough, is cheap.
    """

    def __init__(self, dataset: _Dataset):
        self._dataset = dataset
        self._fitting: list[Counts] = []
        self._exceeding: list[Counts] = []
        self._last: Counts | None = None

    def refuses_unproven(self, step: Counts) -> bool:
        """Returns whether `step` is unproven on a dataset whose budget stands for proofs only."""
        limited = self._dataset.epsilon is not None and not self._dataset.allow_unproven
        return limited and any(isinstance(leaf, UnprovenDpEvent) for leaf in step)

    def known(self, counts: Counts) -> bool | None:
        """Returns whether `counts` fit, or None if that needs a PLD."""
        dataset, counts = self._dataset, _proven(counts)
        if dataset.epsilon is None or dataset.delta is None:
            return True
        if dataset.accounting == "renyi_filter":
            return _renyi_spent(dataset, counts) <= dataset.renyi_bound * (1 + _ROUNDING)
        if any(_covers(fitting, counts) for fitting in self._fitting):
            return True
        if any(_covers(counts, exceeding) for exceeding in self._exceeding):
            return False
        rdp = rdp_epsilon_of_counts(counts, delta=dataset.delta, adjacency=dataset.adjacency)
        if rdp <= dataset.epsilon * (1 + _ROUNDING):
            return True
        return False if dataset.accounting == "rdp" else None

    def decide(self, counts: Counts, step: Counts, *, remember: int) -> None:
        """Makes `counts` known, and so much of what may come next that a loop of spends rarely comes back.

        Args:
            counts: the composition in question.
            step: what came last; empty if nothing of its kind will follow.
            remember: how many verdicts to keep; enough for all compositions that one question asks about.
        """
        counts, step = _proven(counts), _proven(step)
        recent = _difference(counts, self._last) if self._last and _covers(counts, self._last) else dict(step)
        self._last = counts
        if not self._computed(counts, remember) or not step:
            return
        # What came since the last time, twice over, is a guess at what comes next. While it grows this doubles;
        # near the budget it halves until it fits: the number of PLDs is logarithmic in the number of spends.
        share = 2.0
        while recent:
            ahead = {leaf: math.ceil(share * count) for leaf, count in recent.items()}
            fits = self.known(_sum(counts, ahead))
            if fits or (fits is None and self._computed(_sum(counts, ahead), remember)) or max(ahead.values()) == 1:
                return
            share /= 2

    def _computed(self, counts: Counts, remember: int) -> bool:
        dataset = self._dataset
        assert dataset.epsilon is not None and dataset.delta is not None
        fits = _epsilon_of(dataset, counts, dataset.delta) <= dataset.epsilon * (1 + _ROUNDING)
        if fits:
            self._fitting = [counts, *(old for old in self._fitting if not _covers(counts, old))][:remember]
        else:
            self._exceeding = [counts, *(old for old in self._exceeding if not _covers(old, counts))][:remember]
        return fits

    def exceeded(self, spent: Sequence[Counts], others: Counts, own: Counts, step: Counts) -> BudgetExceeded:
        """Returns the error for a refused spend; the arguments are those of `_Unsettled`."""
        dataset = self._dataset
        assert dataset.epsilon is not None and dataset.delta is not None
        event = describe(compose(step))
        what = f"dataset {dataset.name!r}, budget epsilon {dataset.epsilon:g} at delta {dataset.delta:g}"
        budget = (dataset.epsilon, dataset.delta)
        if self.refuses_unproven(step):
            return BudgetExceeded(
                f"{what}: {event} has no proof, so its epsilon is infinite. Nothing was run or charged. "
                "Register the dataset without a budget or with allow_unproven=True to accept empirical privacy",
                dataset=dataset.name,
                budget=budget,
                would_spend=math.inf,
            )
        if dataset.accounting == "renyi_filter":
            what += f" by the Renyi filter at order {dataset.renyi_order:g} (shares of its bound, in units of epsilon)"
        alone = [_sum(counts, own) for counts in spent]
        before, without, would = (
            max(_used(dataset, _proven(counts)) for counts in counted)
            for counted in (spent, alone, [_sum(counts, others) for counts in alone])
        )
        held = would - without if without < would else 0.0
        return BudgetExceeded(
            f"{what}: {before:.6g} is spent and {event} would make it {would:.6g}"
            + (f", {held:.6g} of which is room that others hold" if held else "")
            + ". Nothing was run or charged. "
            + ("Wait until the others are done (the report lists their holds), or use" if held else "Use")
            + " more noise or fewer steps (privacy.calibrate_noise finds how much), or other data",
            dataset=dataset.name,
            budget=budget,
            would_spend=would,
            held=held,
        )


# --- Compositions -----------------------------------------------------------------------------------------------


def _sum(counts: Counts, step: Counts, times: int = 1) -> dict[DpEvent, int]:
    total = dict(counts)
    for leaf, count in step.items():
        total[leaf] = total.get(leaf, 0) + times * count
    return total


def _sum_all(compositions: Iterable[Counts]) -> dict[DpEvent, int]:
    return functools.reduce(_sum, compositions, {})


def _maximum(one: Counts, other: Counts) -> dict[DpEvent, int]:
    return {leaf: max(one.get(leaf, 0), other.get(leaf, 0)) for leaf in {**one, **other}}


def _difference(large: Counts, small: Counts) -> dict[DpEvent, int]:
    return {leaf: count - small.get(leaf, 0) for leaf, count in large.items() if count > small.get(leaf, 0)}


def _covers(large: Counts, small: Counts) -> bool:
    return all(count <= large.get(leaf, 0) for leaf, count in small.items())


def _maximal(compositions: Iterable[Counts]) -> list[Counts]:
    """Returns those compositions that no other one covers, and one of equal ones."""
    maximal: list[Counts] = []
    for counts in sorted(compositions, key=lambda part: sum(part.values()), reverse=True):
        if not any(_covers(larger, counts) for larger in maximal):
            maximal.append(counts)
    return maximal


def _combinations(datasets: Iterable[Sequence[Counts]]) -> list[Counts]:
    """Returns the maximal sums of one composition of every dataset, or compositions that cover all sums."""
    sums: list[Counts] = [{}]
    for parts in datasets:
        if len(sums) * len(parts) > _COMBINATIONS:
            parts = [functools.reduce(_maximum, parts)]
        sums = _maximal(_sum(counts, part) for counts in sums for part in parts)
    return sums


def _is_proven(counts: Counts) -> bool:
    return not any(isinstance(leaf, UnprovenDpEvent) for leaf in counts)


def _proven(counts: Counts) -> Counts:
    return {leaf: count for leaf, count in counts.items() if not isinstance(leaf, UnprovenDpEvent)}


def _renyi_spent(dataset: _Dataset, counts: Counts) -> float:
    assert dataset.renyi_order is not None
    return rdp_of_counts(counts, order=dataset.renyi_order, adjacency=dataset.adjacency)


def _epsilon_of(dataset: _Dataset, counts: Counts, delta: float) -> float:
    if dataset.accounting != "renyi_filter":
        return _cached_epsilon(frozenset(counts.items()), delta, dataset.adjacency, dataset.method)
    spent, bound = _renyi_spent(dataset, counts), dataset.renyi_bound
    if spent == 0 or math.isinf(spent):
        return spent
    if spent > bound * (1 + _ROUNDING):  # Only of events that were not spent: the filter holds them back.
        bound = spent
    assert dataset.renyi_order is not None
    return math.inf if delta == 0 else renyi_epsilon(bound, delta, dataset.renyi_order)


def _used(dataset: _Dataset, counts: Counts) -> float:
    """Returns how much of the budget's epsilon a composition uses up."""
    assert dataset.epsilon is not None and dataset.delta is not None
    if dataset.accounting == "renyi_filter":
        return _renyi_spent(dataset, counts) / dataset.renyi_bound * dataset.epsilon
    return _epsilon_of(dataset, counts, dataset.delta)


@functools.lru_cache(maxsize=4096)
def _cached_epsilon(
    counts: frozenset[tuple[DpEvent, int]], delta: float, adjacency: Adjacency, method: Method
) -> float:
    return epsilon_of_counts(dict(counts), delta=delta, adjacency=adjacency, method=method)


# --- The file ---------------------------------------------------------------------------------------------------


def _connect(path: str) -> sqlite3.Connection:
    """Opens a ledger that we can read, making a new file one."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return _try_connect(path)
        except sqlite3.Error as error:
            # Switching a new file to WAL does not wait for another process that does the same.
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise ValueError(f"path {path!r} cannot be opened as a ledger: {error}") from error
            time.sleep(0.01)


def _try_connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = FULL")
        if _kind(db) == (0, 0):
            _create(db)
        application, version = _kind(db)
        if application != _APPLICATION_ID:
            raise ValueError(f"path {path!r} is an SQLite file, but not a ledger; choose another path")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"ledger {path!r} has schema version {version}, this jaxdp {__version__} knows up to {SCHEMA_VERSION}; "
                "upgrade jaxdp to use it"
            )
    except BaseException:
        db.close()
        raise
    return db


def _create(db: sqlite3.Connection) -> None:
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return  # Somebody else's file: leave it alone.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("BEGIN IMMEDIATE")
    if _kind(db) == (0, 0):  # Two processes may create the same ledger: the second finds it made.
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        for key, value in (("created_at", _now()), ("created_by", f"jaxdp {__version__}")):
            db.execute("INSERT INTO meta VALUES (?, ?)", (key, value))
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")


def _kind(db: sqlite3.Connection) -> tuple[int, int]:
    """Returns (application_id, user_version) of the file."""
    return _pragma(db, "application_id"), _pragma(db, "user_version")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _now() -> str:
    return _text_of(datetime.datetime.now(datetime.UTC))


def _text_of(time: datetime.datetime) -> str:
    return time.isoformat(timespec="milliseconds")


def _find_dataset(db: sqlite3.Connection, name: str) -> _Dataset | None:
    row = db.execute(f"SELECT {_TERMS} FROM datasets WHERE name = ?", (name,)).fetchone()
    return None if row is None else _Dataset(**row)


def _dataset(db: sqlite3.Connection, name: str) -> _Dataset:
    dataset = _find_dataset(db, name)
    if dataset is None:
        known = [row[0] for row in db.execute("SELECT name FROM datasets ORDER BY name LIMIT 20")]
        raise ValueError(f"dataset {name!r} is not registered (registered: {known}); call ledger.register first")
    return dataset


def _check_text(key: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{key} must be a non-empty string or None, got {value!r}")


def _find_token(db: sqlite3.Connection, dataset: _Dataset, token: str | None) -> sqlite3.Row | None:
    return db.execute(
        "SELECT spends.id, partition, json FROM spends JOIN events ON events.id = event "
        "WHERE dataset = ? AND token = ?",
        (dataset.id, token),
    ).fetchone()


def _replayed(db: sqlite3.Connection, request: _Request, partition: str | None, token: str | None) -> Spend | None:
    """Returns the spend that the token paid for already, or None."""
    paid = None if token is None else _find_token(db, _dataset(db, request.name), token)
    if paid is None:
        return None
    event = compose(request.step)
    if paid["json"] != to_json(event) or paid["partition"] != (partition or ""):
        raise ValueError(
            f"token {token!r} of dataset {request.name!r} paid for {describe(from_json(paid['json']))} on "
            f"partition {paid['partition'] or None!r}, not for {describe(event)} on {partition!r}; "
            "a token stands for one release: use a fresh one"
        )
    return Spend(paid["id"], request.name, event, replay=True)


def _insert(
    db: sqlite3.Connection,
    dataset: _Dataset,
    partition: str | None,
    text: str,
    label: str,
    token: str | None,
    run: str,
) -> int:
    """Writes a reservation and its running total, in the caller's transaction."""
    part, now = partition or "", _now()
    db.execute("INSERT INTO events (json) VALUES (?) ON CONFLICT DO NOTHING", (text,))
    event = db.execute("SELECT id FROM events WHERE json = ?", (text,)).fetchone()[0]
    cursor = db.execute(
        "INSERT INTO spends (dataset, partition, event, label, token, status, run, version, reserved_at) "
        "VALUES (?, ?, ?, ?, ?, 'reserved', ?, ?, ?)",
        (dataset.id, part, event, label, token, run, __version__, now),
    )
    db.execute(
        "INSERT INTO totals VALUES (?, ?, ?, 1, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "spends = spends + 1, last_at = excluded.last_at, last_label = excluded.last_label",
        (dataset.id, part, event, now, now, label, label),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _clock() -> float:
    """Returns seconds since 1970, the same for all processes of a machine."""
    return time.time()


def _live_holds(db: sqlite3.Connection, dataset: _Dataset) -> list[sqlite3.Row]:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'holds'").fetchone():
        return []
    query = "SELECT id, json, key, label, run, lapses FROM holds WHERE dataset = ? AND lapses > ? ORDER BY lapses, id"
    return db.execute(query, (dataset.id, _clock())).fetchall()


def _held(db: sqlite3.Connection, dataset: _Dataset) -> dict[str | None, Counts]:
    """Returns what each live hold keeps room for."""
    return {row["id"]: composition(from_json(row["json"])) for row in _live_holds(db, dataset)}


def _take(db: sqlite3.Connection, dataset: _Dataset, hold: str, step: Counts) -> None:
    """Takes what a hold keeps of `step` out of it, and makes it live on; does nothing without such a live hold."""
    kept = _held(db, dataset).get(hold)
    if kept is not None:
        left = to_json(compose(_difference(kept, step)))
        db.execute("UPDATE holds SET json = ? WHERE id = ? AND dataset = ?", (left, hold, dataset.id))
        db.execute("UPDATE holds SET lapses = ? + seconds WHERE id = ?", (_clock(), hold))


# One row per part: what it went through, as "event:spends,event:spends,...", the same text for the same history.
_HISTORY = (
    "SELECT partition, group_concat(event || ':' || spends) AS history FROM (SELECT partition, event, spends "
    "FROM totals WHERE dataset = ? AND {} ORDER BY partition, event) GROUP BY partition"
)


def _history_parser(db: sqlite3.Connection) -> Callable[[str], dict[DpEvent, int]]:
    parsed: dict[str, Counts] = {}

    def parse(history: str) -> dict[DpEvent, int]:
        counts: dict[DpEvent, int] = {}
        for item in history.split(","):
            event, spends = item.split(":")
            if event not in parsed:
                row = db.execute("SELECT json FROM events WHERE id = ?", (int(event),)).fetchone()
                parsed[event] = composition(from_json(row["json"]))
            counts = _sum(counts, parsed[event], int(spends))
        return counts

    return parse


def _compositions(db: sqlite3.Connection, dataset: _Dataset, partition: str | None) -> list[Counts]:
    """Returns the compositions that the dataset's units bear: the releases on everything, plus one part's.

    One composition for a named partition; otherwise every maximal one. Parts with equal histories are merged in SQL, so
    that a million parts cost little.
    """
    parse = _history_parser(db)
    whole = db.execute(_HISTORY.format("partition = ''"), (dataset.id,)).fetchone()
    common = parse(whole["history"]) if whole else {}
    parts, values = ("partition <> ''", ()) if partition is None else ("partition = ?", (partition,))
    query = f"SELECT DISTINCT history FROM ({_HISTORY.format(parts)})"
    candidates = [_sum(common, parse(row["history"])) for row in db.execute(query, (dataset.id, *values)).fetchall()]
    return _maximal(candidates) or [common]


# --- The report -------------------------------------------------------------------------------------------------


def _report_of(db: sqlite3.Connection, dataset: _Dataset, default_delta: float) -> dict[str, Any]:
    totals = db.execute(
        "SELECT partition, event, json, spends, first_at, last_at, first_label, last_label "
        "FROM totals JOIN events ON events.id = event WHERE dataset = ? ORDER BY first_at, partition, event LIMIT 1000",
        (dataset.id,),
    ).fetchall()
    unfinished = {
        (row["partition"], row["event"]): row["open"]
        for row in db.execute(
            "SELECT partition, event, count(*) AS open FROM spends WHERE dataset = ? AND status <> 'committed' "
            "GROUP BY partition, event",
            (dataset.id,),
        )
    }
    rows, partitions = db.execute(
        "SELECT count(*), count(DISTINCT nullif(partition, '')) FROM totals WHERE dataset = ?", (dataset.id,)
    ).fetchone()
    unproven = db.execute(
        "SELECT 1 FROM totals JOIN events ON events.id = event WHERE dataset = ? "
        'AND json LIKE \'%"type":"Unproven"%\' LIMIT 1',
        (dataset.id,),
    ).fetchone()
    still_open = db.execute(
        "SELECT id, partition, label, status, run, version, reserved_at FROM spends "
        "WHERE dataset = ? AND status <> 'committed' ORDER BY id LIMIT 1000",
        (dataset.id,),
    ).fetchall()
    return {
        "name": dataset.name,
        "adjacency": dataset.adjacency,
        "unit": dataset.unit,
        "accounting": dataset.accounting,
        "renyi_order": dataset.renyi_order,
        "allow_unproven": dataset.allow_unproven,
        "budget": dataset.epsilon,
        "delta": default_delta if dataset.delta is None else dataset.delta,
        "unproven": unproven is not None,
        "partitions": partitions,
        "rows": rows,
        "spends": [
            {
                "partition": row["partition"] or None,
                "event": json.loads(row["json"]),
                "description": describe(from_json(row["json"])),
                "spends": row["spends"],
                "open": unfinished.get((row["partition"], row["event"]), 0),
                "first_at": row["first_at"],
                "last_at": row["last_at"],
                "first_label": row["first_label"],
                "last_label": row["last_label"],
            }
            for row in totals
        ],
        "open": [{**dict(row), "partition": row["partition"] or None} for row in still_open],
        "holds": [
            {
                "event": json.loads(row["json"]),
                "description": describe(from_json(row["json"])),
                "key": row["key"],
                "label": row["label"],
                "run": row["run"],
                "lapses_at": _text_of(datetime.datetime.fromtimestamp(row["lapses"], datetime.UTC)),
            }
            for row in _live_holds(db, dataset)
            if composition(from_json(row["json"]))
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _render(entry: Mapping[str, Any]) -> list[str]:
    """Returns the lines of one dataset's report."""
    budget = "none" if entry["budget"] is None else f"epsilon {entry['budget']:g} at delta {entry['delta']:g}"
    order = "" if entry["renyi_order"] is None else f" at order {entry['renyi_order']:g}"
    proven = "inf" if entry["proven_epsilon"] is None else f"{entry['proven_epsilon']:.6g}"
    lines = [
        entry["name"],
        f"  adjacency    {entry['adjacency']}, unit {entry['unit']}, accounting {entry['accounting']}{order}",
        f"  budget       {budget}" + ("" if entry["remaining"] is None else f", remaining {entry['remaining']:.6g}"),
        f"  epsilon      {entry['headline']} at delta {entry['delta']:g}",
    ]
    if entry["headline"] == "inf (empirical only)":
        lines.append(f"  proven part  {proven} at delta {entry['delta']:g}")
    if entry["partitions"]:
        lines.append(f"  partitions   {entry['partitions']} disjoint parts; epsilon is the maximum over them")
    if entry["holds"]:
        holds = (
            f"{hold['description']} ({hold['label'] or hold['key'] or '-'}, run {hold['run']}, "
            f"until {hold['lapses_at'][:19]})"
            for hold in entry["holds"]
        )
        lines.append(f"  held         {'; '.join(holds)}; not spent")
    table = [["spends", "open", "partition", "event", "labels", "first", "last"]]
    for row in entry["spends"]:
        labels = dict.fromkeys(label for label in (row["first_label"], row["last_label"]) if label)
        table.append(
            [
                str(row["spends"]),
                str(row["open"]),
                row["partition"] or "(all)",
                row["description"],
                " .. ".join(labels) or "-",
                row["first_at"][:19],
                row["last_at"][:19],
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if len(table) > 1:
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
    if entry["rows"] > len(entry["spends"]):
        lines.append(f"  ... {entry['rows'] - len(entry['spends'])} more rows")
    for row in entry["open"][:20]:
        lines.append(
            f"  not committed, counted in full: #{row['id']} {row['status']} {row['label'] or '-'} (run {row['run']})"
        )
    if len(entry["open"]) > 20:
        lines.append(f"  ... {len(entry['open']) - 20} or more not committed")
    return lines
