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

A ledger that lost history is refused, not believed: every spend is linked to all before it, and `ledger.sqlite.head`
beside the file tells how far it has come (`jaxdp.privacy.store`). Move and copy both files together, or use `backup`.

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

import datetime
import math
import os
import secrets
import sqlite3
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from jaxdp.privacy import readout
from jaxdp.privacy.accounting import (
    RELATIONS,
    Adjacency,
    Method,
    Tally,
    check_rules,
    default_renyi_order,
    renyi_bound,
)
from jaxdp.privacy.accounts import DAY, Account, Hold, Requests, Reservation, Spend
from jaxdp.privacy.budget import (
    Accounting,
    BudgetCheck,
    BudgetExceeded,
    Counts,
    Dataset,
    Unsettled,
    add,
    add_all,
    combinations,
    difference,
    epsilon_of,
    is_proven,
    maximal,
    maximum,
    pld_epsilon,
    proven,
    used,
)
from jaxdp.privacy.events import DpEvent, compose, composition, describe, from_json, to_json
from jaxdp.privacy.store import SCHEMA_VERSION, Head, LedgerDamaged, Store, author, damaged, now, seal, terms_of
from jaxdp.version import __version__

__all__ = ["Accounting", "BudgetExceeded", "Head", "Ledger", "LedgerDamaged"]

Result = TypeVar("Result")

_TERMS = "id, name, adjacency, unit, epsilon, delta, accounting, renyi_order, allow_unproven, records"


class Ledger:
    """The account of all releases about the datasets registered in it; see the module's text for its guarantees.

    Safe to share between threads, and between processes by opening the same path in each.

    Args:
        path: the SQLite file; created if it does not exist, its directory must. A file of the first release is brought
            to the present form once, and a copy of it as it was is kept as `path.version1`.
        run: an identifier of this run, stored with every spend; random by default.
        read_only: only questions are asked; nothing is written, so that copies on read-only storage can be opened.

    Raises:
        LedgerDamaged: the file lost history, or does not fit itself; it is a ValueError.
        ValueError: the file is not a ledger, cannot be opened or made, or a newer jaxdp wrote it.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str | None = None, read_only: bool = False):
        self._run = run or secrets.token_hex(8)
        self._store = Store(os.fspath(path), read_only=read_only)
        self._path, self._lock = self._store.path, self._store.lock
        self._transaction = self._store.transaction
        self._budgets: dict[int, BudgetCheck] = {}
        self._accounts: dict[int, _Spent] = {}
        self._events: dict[int, Counts] = {}
        self._met: set[DpEvent] = set()

    @classmethod
    def in_memory(cls, *, run: str | None = None) -> "Ledger":
        """Returns a ledger that lives and dies with this process, for notebooks and tests."""
        return cls(":memory:", run=run)

    def close(self) -> None:
        """Closes the file; the ledger cannot be used afterwards."""
        with self._lock:
            self._store.close()

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
        records: int | None = None,
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
            records: how many units there are, as their owner declares; a public number, shown in reports. It may be
                declared later, once. A delta of 1 / records or more is warned of: it allows one record to be published.
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
        if records is not None:
            if isinstance(records, bool) or not isinstance(records, int) or records < 1:
                raise ValueError(f"records must be an integer >= 1 or None, got {records!r}")
            if delta is not None and delta * records >= 1:
                warnings.warn(
                    f"delta {delta:g} of dataset {name!r} is at least 1 / records = {1 / records:g}: a mechanism that "
                    "publishes one record in the clear can satisfy it. Use a delta far below 1 / records",
                    stacklevel=2,
                )
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
                    "allow_unproven, created_at, records) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (name, *terms.values(), now(), records),
                )
                self._seal(db, name)
                return
            if records is not None and existing.records is None:
                db.execute("UPDATE datasets SET records = ? WHERE id = ?", (records, existing.id))
                self._seal(db, name)
            elif records is not None:
                terms["records"] = records
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
            compositions = [self._compositions(db, dataset, None) for dataset in datasets]
        first = datasets[0]
        for dataset in datasets:
            if (dataset.adjacency, dataset.unit) != (first.adjacency, first.unit):
                raise ValueError(
                    f"names: dataset {first.name!r} has adjacency {first.adjacency!r} and unit {first.unit!r}, "
                    f"{dataset.name!r} has {dataset.adjacency!r} and {dataset.unit!r}, so no one change of a record is "
                    "meant; ask for datasets that share both, and register data of the same people with the same terms"
                )
        if any(not is_proven(counts) for parts in compositions for counts in parts):
            return math.inf
        accounts = list(zip(datasets, compositions, strict=True))
        filtered = [data for data, parts in accounts if data.accounting == "renyi_filter" and any(parts)]
        together = combinations(parts for data, parts in accounts if data.accounting != "renyi_filter")
        taken = math.fsum(dataset.delta or 0.0 for dataset in filtered)
        left = 0.0 if math.isclose(taken, delta) else delta - taken
        if left < 0 or (filtered and left == 0 and any(together)):
            raise ValueError(
                f"delta={delta!r} leaves nothing beside the registered deltas of the 'renyi_filter' datasets "
                f"{[dataset.name for dataset in filtered]}, which add up to {taken:g}; ask for a larger delta"
            )
        method: Method = "auto" if any(dataset.accounting == "pld" for dataset in datasets) else "rdp"
        rest = max(pld_epsilon(counts, left, first.adjacency, method) for counts in together)
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
            compositions = self._compositions(db, dataset, partition)
        return max(0.0, dataset.epsilon - max(used(dataset, proven(counts)) for counts in compositions))

    def events(self, name: str) -> dict[str | None, DpEvent]:
        """Returns what was reserved, composed per partition; key None holds the releases on the whole dataset."""
        with self._transaction("DEFERRED") as db:
            rows = db.execute(_HISTORY.format("1"), (_dataset(db, name).id,)).fetchall()
            composed = {history: compose(self._parsed(db, history)) for history in {row["history"] for row in rows}}
        return {row["partition"] or None: composed[row["history"]] for row in rows}

    def report(self, *, delta: float = 1e-5) -> dict[str, Any]:
        """Returns the whole account as plain data, ready for JSON.

        Args:
            delta: used for datasets that have none registered.

        Returns:
            {"path", "schema_version", "head", "datasets": [...]}. Each dataset has its terms, with the number of
            `records` as declared or None; at its `delta` the `headline` (text) and `proven_epsilon` and `remaining`
            (numbers, None for infinity); the number of `partitions`; `spends`, one row per partition and event, at
            most 1000 of `rows` in all; `runs`, who spent, from where, in which run, with which version, at most the
            latest 1000; `open`, at most 1000 spends that did not commit (running, failed or killed): they count in
            full; and `holds`, the room that live holds keep, in no number of the report.
        """
        with self._transaction("DEFERRED") as db:
            datasets = [Dataset(**row) for row in db.execute(f"SELECT {_TERMS} FROM datasets ORDER BY name")]
            entries = [readout.entry(db, dataset, delta, _live_holds(db, dataset)) for dataset in datasets]
        for entry in entries:  # Outside the transaction: this may compute PLDs.
            epsilon = self.epsilon(entry["name"], delta=entry["delta"])
            entry["headline"] = "inf (empirical only)" if entry.pop("unproven") else f"{epsilon:.6g}"
            entry["proven_epsilon"] = readout.finite(self.proven_epsilon(entry["name"], delta=entry["delta"]))
            entry["remaining"] = readout.finite(self.remaining(entry["name"]))
        head = self.head
        return {
            "path": self._path,
            "schema_version": SCHEMA_VERSION,
            "head": {"ledger": head.ledger, "spend": head.spend, "link": head.link},
            "datasets": entries,
        }

    def report_text(self, *, delta: float = 1e-5, timezone: datetime.tzinfo = datetime.UTC) -> str:
        """Returns `report` for people, with times in a time zone; datasets with equal accounts are shown once."""
        return readout.text(self.report(delta=delta), timezone)

    def history(self, name: str | None = None) -> list[dict[str, Any]]:
        """Returns every spend, of one dataset or of all, the oldest first.

        Returns:
            Rows with "spend" (its number), "dataset", "partition", "event" (as `describe` writes it), "label",
            "status", "reserved_at", "finished_at" (UTC), "who", "host", "run", "version", "token" and "link".

        Raises:
            ValueError: unknown dataset.
        """
        with self._transaction("DEFERRED") as db:
            return readout.history(db, None if name is None else _dataset(db, name).id)

    def by_day(
        self, name: str, *, delta: float | None = None, timezone: datetime.tzinfo = datetime.UTC
    ) -> list[dict[str, Any]]:
        """Returns how epsilon grew: one row per day on which something was spent on a dataset.

        Args:
            name: a registered dataset.
            delta: by default the registered one.
            timezone: in which a day is a day.

        Returns:
            Rows with "day" (ISO), "dataset", "spends" (of that day), "epsilon" (of everything until its end) and
            "delta".

        Raises:
            ValueError: unknown dataset, or no delta is given or registered.
        """
        with self._transaction("DEFERRED") as db:
            dataset = _dataset(db, name)
            delta = dataset.delta if delta is None else delta
            if delta is None:
                raise ValueError(f"delta is needed: dataset {name!r} has none registered")
            return readout.by_day(db, dataset, delta, timezone)

    # --- The file -----------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """How far the ledger has come: kept elsewhere, it shows later whether the ledger has lost history."""
        return self._store.head

    @property
    def has_head(self) -> bool:
        """Whether the file's head lies beside it; a copy without one does not tell whether its end is missing."""
        return self._store.has_head

    def contains(self, head: Head) -> bool | None:
        """Returns whether the ledger's history goes through `head`; None if that is of another ledger or branch."""
        return self._store.contains(head)

    def damaged(self, what: str) -> LedgerDamaged:
        """Returns the error for a ledger of which something outside tells that it must not be used."""
        return damaged(self._path, what)

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the ledger to a new file, with its head, durably; others may spend meanwhile.

        Raises:
            ValueError: there is such a file already, or no such directory.
            OSError: the copy cannot be written.
        """
        self._store.backup(path)

    # --- Inside -------------------------------------------------------------------------------------------------

    def _seal(self, db: sqlite3.Connection, name: str) -> None:
        row = db.execute("SELECT * FROM datasets WHERE name = ?", (name,)).fetchone()
        db.execute("UPDATE datasets SET seal = ? WHERE id = ?", (seal(row, self._store.identity), row["id"]))

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
            except Unsettled as error:
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
                    steps[request.hold] = add(steps.get(request.hold, {}), request.step)
            self._admit(db, _dataset(db, name), partition, steps, ahead=ahead)

    def _admit(
        self,
        db: sqlite3.Connection,
        dataset: Dataset,
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
        others = add_all(counts for hold, counts in held.items() if hold not in steps)
        own = add_all(maximum(held.get(hold, {}), step) for hold, step in steps.items())
        question = Unsettled(
            self._budgets.setdefault(dataset.id, BudgetCheck(dataset)),
            self._spent(db, dataset, partition),
            others,
            own,
            add_all(steps.values()),
            ahead,
        )
        if not question.is_allowed():
            raise question

    def _reserve(self, requests: Sequence["_Request"], partition: str | None, token: str | None) -> tuple[Spend, ...]:
        """Reserves all of the requests or none."""
        _check_text("partition", partition)
        _check_text("token", token)
        self._prepare(requests)
        return self._settled(lambda db: self._reserve_all(db, requests, partition, token))

    def _prepare(self, requests: Sequence["_Request"]) -> None:
        """Computes what is slow and needed once, the losses of new events, before others have to wait for it."""
        fresh = [request for request in requests if not request.step.keys() <= self._met]
        if not fresh:
            return
        with self._transaction("DEFERRED") as db:
            for request in fresh:
                dataset = _find_dataset(db, request.name)
                for tally in () if dataset is None else self._spent(db, dataset, None):
                    tally.plus(request.step).rdp_epsilon(0.5)
        for request in fresh:
            self._met |= request.step.keys()

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
                number = self._insert(db, dataset, partition, to_json(event), request.label, token)
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
            wanted = maximum(kept, add_all(request.step for request in same))
            added[name] = difference(wanted, kept)
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
                [(status, now(), spend.id) for spend in spends],
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
            compositions = self._compositions(db, dataset, partition)
        delta = dataset.delta if delta is None else delta
        if delta is None:
            raise ValueError(f"delta is needed: dataset {name!r} has none registered")
        if proven_only:
            compositions = [proven(counts) for counts in compositions]
        if step is not None:
            compositions = [add(counts, step) for counts in compositions]
            for counts in compositions:
                check_rules(counts, adjacency=dataset.adjacency, method=dataset.method)
        return max(epsilon_of(dataset, counts, delta) for counts in compositions)

    # --- What was spent -----------------------------------------------------------------------------------------

    def _compositions(self, db: sqlite3.Connection, dataset: Dataset, partition: str | None) -> list[Counts]:
        """Returns the compositions that the dataset's units bear: the releases on everything, plus one part's.

        One composition for a named partition; otherwise every maximal one. Parts with equal histories are merged in
        SQL, so that a million parts cost little.
        """
        whole = db.execute(_HISTORY.format("partition = ''"), (dataset.id,)).fetchone()
        common = self._parsed(db, whole["history"]) if whole else {}
        return maximal(add(common, part) for part in self._parts(db, dataset, partition)) or [common]

    def _parts(self, db: sqlite3.Connection, dataset: Dataset, partition: str | None) -> list[Counts]:
        """Returns the different histories of the parts, or of one part; without those on everything."""
        parts, values = ("partition <> ''", ()) if partition is None else ("partition = ?", (partition,))
        query = f"SELECT DISTINCT history FROM ({_HISTORY.format(parts)})"
        return [self._parsed(db, row["history"]) for row in db.execute(query, (dataset.id, *values)).fetchall()]

    def _parsed(self, db: sqlite3.Connection, history: str) -> Counts:
        counts: dict[DpEvent, int] = {}
        for item in history.split(","):
            event, spends = item.split(":")
            for leaf, count in self._event(db, int(event)).items():
                counts[leaf] = counts.get(leaf, 0) + int(spends) * count
        return counts

    def _event(self, db: sqlite3.Connection, event: int) -> Counts:
        if event not in self._events:
            row = db.execute("SELECT json FROM events WHERE id = ?", (event,)).fetchone()
            self._events[event] = composition(from_json(row["json"]))
        return self._events[event]

    def _spent(self, db: sqlite3.Connection, dataset: Dataset, partition: str | None) -> list[Tally]:
        """Returns what `_compositions` does, from what was read before and the spends that came since."""
        spent = self._accounts.setdefault(dataset.id, _Spent(Tally(dataset.adjacency)))
        last = db.execute("SELECT max(id) FROM spends").fetchone()[0] or 0
        whole, parts_known = spent.whole, spent.parts
        if spent.position is None:
            history = db.execute(_HISTORY.format("partition = ''"), (dataset.id,)).fetchone()
            whole = whole.plus(self._parsed(db, history["history"]) if history else {})
        else:
            query = "SELECT event, partition, count(*) AS spends FROM spends WHERE id > ? AND dataset = ? GROUP BY 1, 2"
            for row in db.execute(query, (spent.position, dataset.id)).fetchall():
                if row["partition"]:
                    parts_known = None
                else:
                    whole = whole.plus(self._event(db, row["event"]), row["spends"])
        # Together, after all that may fail: an interrupt must not count a spend twice.
        spent.whole, spent.parts, spent.position = whole, parts_known, last
        if partition is not None:
            parts = self._parts(db, dataset, partition)
        else:
            if spent.parts is None:
                spent.parts = maximal(self._parts(db, dataset, None))
            parts = spent.parts
        return [spent.whole.plus(part) for part in parts] or [spent.whole]

    def _insert(
        self,
        db: sqlite3.Connection,
        dataset: Dataset,
        partition: str | None,
        text: str,
        label: str,
        token: str | None,
    ) -> int:
        """Writes a reservation and its running total, in the caller's transaction."""
        db.execute("INSERT INTO events (json) VALUES (?) ON CONFLICT DO NOTHING", (text,))
        event = db.execute("SELECT id FROM events WHERE json = ?", (text,)).fetchone()[0]
        terms = terms_of(db.execute("SELECT * FROM datasets WHERE id = ?", (dataset.id,)).fetchone())
        number, (who, host) = self._store.next_spend, author()
        row = {
            "id": number,
            "dataset": dataset.id,
            "partition": partition or "",
            "event": event,
            "label": label,
            "token": token,
            "status": "reserved",
            "run": self._run,
            "version": __version__,
            "reserved_at": now(),
            "who": who,
            "host": host,
        }
        row["link"] = self._store.link({**row, "json": text}, terms)
        db.execute(f"INSERT INTO spends ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
        db.execute(
            "INSERT INTO totals VALUES (?, ?, ?, 1, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "spends = spends + 1, last_at = excluded.last_at, last_label = excluded.last_label",
            (dataset.id, row["partition"], event, row["reserved_at"], row["reserved_at"], label, label),
        )
        return number


class _Spent:
    """What was spent on a dataset, as far as this process has read it.

    Attributes:
        whole: the releases on everything.
        parts: the maximal histories of its parts; None if they have to be read.
        position: number of the last spend that is counted; None before the first reading.
    """

    def __init__(self, nothing: Tally):
        self.whole = nothing
        self.parts: list[Counts] | None = None
        self.position: int | None = None


class _Request(NamedTuple):
    """One event for one dataset."""

    name: str
    hold: str | None
    label: str
    step: Counts


def _find_dataset(db: sqlite3.Connection, name: str) -> Dataset | None:
    row = db.execute(f"SELECT {_TERMS} FROM datasets WHERE name = ?", (name,)).fetchone()
    return None if row is None else Dataset(**row)


def _dataset(db: sqlite3.Connection, name: str) -> Dataset:
    dataset = _find_dataset(db, name)
    if dataset is None:
        known = [row[0] for row in db.execute("SELECT name FROM datasets ORDER BY name LIMIT 20")]
        raise ValueError(f"dataset {name!r} is not registered (registered: {known}); call ledger.register first")
    return dataset


def _check_text(key: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{key} must be a non-empty string or None, got {value!r}")


def _find_token(db: sqlite3.Connection, dataset: Dataset, token: str | None) -> sqlite3.Row | None:
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


def _clock() -> float:
    """Returns seconds since 1970, the same for all processes of a machine."""
    return time.time()


def _live_holds(db: sqlite3.Connection, dataset: Dataset) -> list[sqlite3.Row]:
    query = "SELECT id, json, key, label, run, lapses FROM holds WHERE dataset = ? AND lapses > ? ORDER BY lapses, id"
    return db.execute(query, (dataset.id, _clock())).fetchall()


def _held(db: sqlite3.Connection, dataset: Dataset) -> dict[str | None, Counts]:
    """Returns what each live hold keeps room for."""
    return {row["id"]: composition(from_json(row["json"])) for row in _live_holds(db, dataset)}


def _take(db: sqlite3.Connection, dataset: Dataset, hold: str, step: Counts) -> None:
    """Takes what a hold keeps of `step` out of it, and makes it live on; does nothing without such a live hold."""
    kept = _held(db, dataset).get(hold)
    if kept is not None:
        left = to_json(compose(difference(kept, step)))
        db.execute("UPDATE holds SET json = ? WHERE id = ? AND dataset = ?", (left, hold, dataset.id))
        db.execute("UPDATE holds SET lapses = ? + seconds WHERE id = ?", (_clock(), hold))


# One row per part: what it went through, as "event:spends,event:spends,...", the same text for the same history.
_HISTORY = (
    "SELECT partition, group_concat(event || ':' || spends) AS history FROM (SELECT partition, event, spends "
    "FROM totals WHERE dataset = ? AND {} ORDER BY partition, event) GROUP BY partition"
)
