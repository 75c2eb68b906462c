"""The ledger: one durable account of everything that was released about each private dataset.

    ledger = Ledger("ledger.sqlite")
    ledger.register("cifar10/train", adjacency="add_remove", unit="example", epsilon=8.0, delta=1e-5)
    with ledger.spend("cifar10/train", event, label="dp-sgd epoch 3"):
        ...  # touch the private data here
    ledger.epsilon("cifar10/train")

The ledger stores events and recomputes epsilon from their counts. The call of `spend` reserves on
disk. The end of the `with` marks the reservation committed. After an exception or a kill -9 the
reservation stays spent. Check and reservation are one SQLite transaction (WAL, synchronous=FULL),
so threads and processes of one machine share a file and its budgets. Keep the file on a local disk,
because SQLite's locks do not hold on most network file systems.

A ledger that lost history is refused. Every spend is linked to all earlier ones, and
`ledger.sqlite.head` beside the file records the last spend (`jaxdp.privacy.store`). Move and copy
both files together, or use `backup`.

Formal guarantees. For every registered dataset, the releases made inside `spend` bodies are jointly
(`Ledger.epsilon`, delta)-DP for the registered adjacency and unit, provided each body's release
satisfies its event:

* ``accounting="pld"`` or ``"rdp"``: The sequence of events is fixed in advance. Each mechanism may
  use all earlier outputs (adaptive inputs: DP-SGD, tuning on released numbers). Outputs must not
  influence the events (noise, sampling, number of steps) or the moment to stop. If outputs stop a
  run early, quote the planned total (the budget), not the smaller number spent.
* ``accounting="renyi_filter"``: Events may be chosen fully adaptively. One Renyi order is fixed at
  registration. Spending stops before the sum of Renyi losses at that order passes the bound that
  converts to (epsilon, delta) (Feldman and Zrnic 2021, arXiv 2008.11193, and Lecuyer 2021, arXiv
  2103.01379). A sum of adaptively chosen losses is not itself a bound. So `Ledger.epsilon` reports
  the registered budget once anything was spent.
* Partitions. `spend(..., partition="a")` says that the release reads only part "a" of a fixed
  division of the dataset into disjoint parts. The dataset's epsilon is then the maximum over parts
  of (releases on everything plus releases on that part). A record's part must not depend on other
  records. Its content, identity or arrival time may decide, but not a rank or a cluster. Under
  "replace_one", a record and its replacement must also lie in the same part. Assign parts by a
  stable public attribute (slot, arrival time, hospital). The guarantee then hides a record's
  content, not its part. Otherwise a replacement changes two parts at once. Then spend with
  `partition=None`, which composes with everything.
* Holds. `Ledger.hold` keeps room for a plan and changes no epsilon. `Hold` says when unused room
  may go back.
* One record in several datasets. `Ledger.epsilon` covers one dataset, and `Ledger.total` covers
  several.
"""

import contextlib
import dataclasses
import datetime
import math
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from jaxdp.privacy import books, readout
from jaxdp.privacy.accounting import (
    RELATIONS,
    Adjacency,
    Method,
    check_rules,
    default_renyi_order,
    renyi_bound,
)
from jaxdp.privacy.budget import (
    Accounting,
    BudgetCheck,
    BudgetExceeded,
    Dataset,
    Unsettled,
    combinations,
    epsilon_of,
    is_proven,
    pld_epsilon,
    proven,
    used,
)
from jaxdp.privacy.cautions import warn_if_weak
from jaxdp.privacy.events import Counts, DpEvent, compose, composition, describe, from_json, to_json
from jaxdp.privacy.store import SCHEMA_VERSION, Head, LedgerDamaged, Store, damaged, now

__all__ = [
    "Account",
    "Accounting",
    "BudgetExceeded",
    "Head",
    "Hold",
    "Ledger",
    "LedgerDamaged",
    "Reservation",
    "Spend",
]

DAY = 86400.0
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Spend:
    """One charge.

    Attributes:
        id: The number of the reservation in this ledger.
        dataset: The dataset's name.
        event: The canonical event that is charged.
        replay: True if the token was already paid for, so that nothing new was charged.
    """

    id: int
    dataset: str
    event: DpEvent
    replay: bool


Charged = TypeVar("Charged", Spend, tuple[Spend, ...])


class Reservation(Generic[Charged]):
    """A charge on disk, as `Ledger.spend` and `Ledger.spend_all` return it.

    `with reservation as spend:` runs the body that the charge pays for. It marks the charge
    committed, or failed if the body raises. A reservation that is never entered stays charged, with
    status "reserved".

    Attributes:
        charged: The `Spend`, or a tuple of them, that `with` yields.
    """

    def __init__(self, ledger: "Ledger", charged: Charged):
        self.charged: Charged = charged
        self._ledger = ledger
        self._entered = False

    def __enter__(self) -> Charged:
        if self._entered:
            raise RuntimeError(
                f"the reservation of {self.charged!r} was entered before, and a charge pays for "
                "one body. Call spend again, with the same token if it is the same release."
            )
        self._entered = True
        return self.charged

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        spends = (self.charged,) if isinstance(self.charged, Spend) else self.charged
        # The error of the body hides a failure to write the mark. The charge counts in any case.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self._ledger._finish(spends, "committed" if kind is None else "failed")


@dataclasses.dataclass(frozen=True)
class Account:
    """One dataset of a ledger to spend from, as `Ledger.account` and `Hold.account` return it.

    Attributes:
        ledger: The ledger.
        name: A dataset that is registered in it.
        label: Who spends, for the report. It precedes the labels of single spends. Never put data
            in it.
        held: The hold whose room the spends use, or None.

    Raises:
        ValueError: The dataset is not registered, or `label` is not a string.
    """

    ledger: "Ledger"
    name: str
    label: str = ""
    held: "Hold | None" = None

    def __post_init__(self) -> None:
        _check_label(self.label)
        self.ledger.adjacency(self.name)

    @property
    def adjacency(self) -> Adjacency:
        """The dataset's neighbouring relation."""
        return self.ledger.adjacency(self.name)

    @property
    def unit(self) -> str:
        """The dataset's unit of privacy."""
        return self.ledger.unit(self.name)

    @property
    def delta(self) -> float | None:
        """The delta that the dataset was registered with, or None."""
        return self.ledger.delta(self.name)

    def labelled(self, label: str | None) -> str:
        """Returns the label of one spend: "account's label: spend's label", or the only non-empty
        one.
        """
        return ": ".join(part for part in (self.label, label) if part)

    def spend(
        self,
        event: DpEvent,
        *,
        label: str | None = None,
        partition: str | None = None,
        token: str | None = None,
    ) -> Reservation[Spend]:
        """Charges `event` as `Ledger.spend` does. The report shows `labelled(label)`."""
        return self.ledger.spend(self, event, label=label or "", partition=partition, token=token)

    def epsilon(self, *, delta: float | None = None) -> float:
        """Returns `Ledger.epsilon` of this dataset."""
        return self.ledger.epsilon(self.name, delta=delta)

    def remaining(self) -> float:
        """Returns `Ledger.remaining` of this dataset."""
        return self.ledger.remaining(self.name)

    def paid(self, token: str) -> bool:
        """Returns whether a spend with this token was charged (`Ledger.paid`)."""
        return self.ledger.paid(self.name, token)

    def would_cost(self, event: DpEvent, *, delta: float | None = None) -> float:
        """Returns `epsilon` as it would be after spending `event` (`Ledger.would_cost`)."""
        return self.ledger.would_cost(self.name, event, delta=delta)

    def check(self, event: DpEvent) -> None:
        """Raises the errors that spending `event` would raise (`Ledger.check`)."""
        self.ledger.check([(self, event)])

    def hold(
        self,
        event: DpEvent,
        *,
        key: str | None = None,
        label: str | None = None,
        seconds: float = DAY,
    ) -> "Hold":
        """Keeps room for `event` (`Ledger.hold`). `hold.account(account)` spends from the room."""
        return self.ledger.hold([(self, event)], key=key, label=label or "", seconds=seconds)


Requests = Sequence[tuple[str | Account, DpEvent]]


class Hold:
    """Room for later events that only this hold can spend, as `Ledger.hold` returns it.

    `with hold:` closes it at the end. A hold that is not closed lapses by itself. Others can then
    spend its room. The accounting decides whether the proof allows that (early stopping, see the
    module's text):

    * ``accounting="renyi_filter"``: always.
    * ``accounting="pld"`` or ``"rdp"``: only if no released output was the reason to stop, as after
      a crash, an error or a full disk. The proof needs the number of releases fixed in advance.
      Otherwise spend the whole plan, or quote the plan or the budget and not the smaller number
      spent.

    Attributes:
        ledger: The ledger.
        names: The datasets on which it holds room.
    """

    def __init__(self, ledger: "Ledger", id: str, added: Mapping[str, Counts], *, nested: bool):
        self.ledger, self.names = ledger, tuple(added)
        self._id, self._added, self._closed = id, added if nested else None, False

    def account(self, account: str | Account, *, label: str = "") -> Account:
        """Returns an account whose spends use the room of this hold.

        A spend takes the events that it shares with the hold out of the hold. Its other events must
        fit beside everything that is spent and held. A replayed token takes nothing. If the hold
        was closed or taken over or has lapsed, spends are ordinary.

        Args:
            account: A dataset's name, or an account.
            label: The new account's label. "" keeps the label of `account`.

        Raises:
            ValueError: The hold has no room on that dataset.
        """
        name, kept = (
            (account.name, account.label) if isinstance(account, Account) else (account, "")
        )
        if name not in self.names:
            raise ValueError(
                f"the hold is on {list(self.names)}, not on {name!r}. Name {name!r} in ledger.hold."
            )
        return Account(self.ledger, name, label or kept, self)

    def left(self, name: str) -> DpEvent:
        """Returns the events for which the hold, with any hold that it extends, keeps room, or a
        `NoOpDpEvent`.
        """
        return self.ledger._held_left(self._id, name)

    def close(self) -> None:
        """Returns the unspent room, once. A hold that extends another one returns only the room
        that it added.
        """
        with self.ledger._store.lock:
            if not self._closed:
                self.ledger._release(self._id, self._added)
                self._closed = True

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # A hold that cannot be closed lapses. The error of the body hides that failure.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self.close()


class Ledger:
    """The account of all releases about the datasets registered in it.

    The module's text states its guarantees. Threads may share a ledger. Processes open the same
    path. All methods raise ValueError for a dataset that is not registered.

    Args:
        path: The SQLite file, made if it does not exist. Its directory must exist. A file of the
            first release is migrated once, and `path.version1` keeps a copy of it.
        run: An identifier of this run, stored with every spend. It is random by default.
        read_only: Whether to write nothing, so that copies on read-only storage can be opened.

    Raises:
        LedgerDamaged: The file lost history or is inconsistent. The error is a ValueError.
        ValueError: The file is not a ledger, cannot be opened or made, or a newer jaxdp wrote it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, run: str | None = None, read_only: bool = False
    ):
        self._run = run or secrets.token_hex(8)
        self._store = Store(os.fspath(path), read_only=read_only)
        self._path = self._store.path
        self._transaction = self._store.transaction
        self._budgets: dict[int, BudgetCheck] = {}
        self._spends = books.Spends()
        self._met: set[DpEvent] = set()

    @classmethod
    def in_memory(cls, *, run: str | None = None) -> "Ledger":
        """Returns a ledger that exists only in this process, for notebooks and tests."""
        return cls(":memory:", run=run)

    def close(self) -> None:
        """Closes the file. The ledger cannot be used afterwards."""
        with self._store.lock:
            self._store.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- Datasets and spending -------------------------------------------------------------------

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
        """Registers a private dataset. Registering it again with the same terms does nothing.

        Args:
            name: The dataset's name in this ledger.
            adjacency: The neighbouring relation: "add_remove" one unit, "replace_one" by another,
                or "zero_out" one (replace it by the zero or null record).
            unit: The unit of privacy in words: "example", "user", "patient".
            records: The public number of units. It may be declared later, once. A delta of 1 /
                records or more gives a `PrivacyWarning`, because it allows one record to be
                published.
            epsilon: The budget. None records spends without limiting them. Above 10 gives a
                `PrivacyWarning`.
            delta: The budget's delta, and the default delta of queries. 0 allows pure releases
                only.
            accounting: "pld" (PLD, or RDP where an event has no PLD rule), "rdp" or "renyi_filter".
                The filter's budget holds under fully adaptive choice of events (see the module's
                text).
            renyi_order: For "renyi_filter", the order > 1, which never changes. The default admits
                most of a mechanism whose Renyi loss is proportional to the order, such as the
                Gaussian's.
            allow_unproven: Whether a budget allows `privacy.unproven(...)` releases. The headline
                epsilon is then infinite, and the budget limits the proven part.

        Raises:
            ValueError: An argument is impossible, or the dataset is registered with other terms.
        """
        if not name or not isinstance(name, str):
            raise ValueError(f"name must be a non-empty string, got {name!r}.")
        if not unit or not isinstance(unit, str):
            raise ValueError(
                f"unit must be a non-empty string such as 'example' or 'user', got {unit!r}."
            )
        if adjacency not in RELATIONS:
            raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}.")
        if accounting not in ("pld", "rdp", "renyi_filter"):
            raise ValueError(
                f"accounting must be 'pld', 'rdp' or 'renyi_filter', got {accounting!r}."
            )
        if delta is not None and not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta!r}.")
        if epsilon is not None and (not 0 < epsilon < math.inf or delta is None):
            raise ValueError(
                "a budget needs a finite epsilon > 0 and a delta (0.0 for pure releases), got "
                f"{epsilon=}, {delta=}."
            )
        if accounting == "renyi_filter":
            if epsilon is None or not delta:
                raise ValueError(
                    f"accounting='renyi_filter' needs a budget with delta > 0, got {epsilon=}, "
                    f"{delta=}."
                )
            renyi_order = (
                default_renyi_order(epsilon, delta) if renyi_order is None else float(renyi_order)
            )
            if not 1 < renyi_order < math.inf or renyi_bound(epsilon, delta, renyi_order) <= 0:
                raise ValueError(
                    f"renyi_order={renyi_order!r} leaves nothing to spend of epsilon={epsilon!r} "
                    f"at delta={delta!r}. Use a larger order, or leave it out."
                )
        elif renyi_order is not None:
            raise ValueError(f"renyi_order={renyi_order!r} needs accounting='renyi_filter'.")
        if records is not None and (type(records) is not int or records < 1):
            raise ValueError(f"records must be an integer >= 1 or None, got {records!r}.")
        warn_if_weak(epsilon=epsilon, delta=delta, records=records)
        terms = {
            "adjacency": adjacency,
            "unit": unit,
            "epsilon": None if epsilon is None else float(epsilon),
            "delta": None if delta is None else float(delta),
            "accounting": accounting,
            "renyi_order": renyi_order,
            "allow_unproven": bool(allow_unproven),
            "records": records,
        }
        with self._transaction() as db:
            existing = books.find_dataset(db, name)
            if existing is None:
                row = {"name": name, **terms, "created_at": now()}
                values = ", ".join("?" * len(row))
                db.execute(
                    f"INSERT INTO datasets ({', '.join(row)}) VALUES ({values})",
                    tuple(row.values()),
                )
                self._store.seal(name)
                return
            if records is not None and existing.records is None:
                db.execute("UPDATE datasets SET records = ? WHERE id = ?", (records, existing.id))
                self._store.seal(name)
            if records is None or existing.records is None:
                del terms["records"]
            different = [
                f"{key} {getattr(existing, key)!r}, not {value!r}"
                for key, value in terms.items()
                if getattr(existing, key) != value
            ]
            if different:
                raise ValueError(
                    f"dataset {name!r} is already registered with {', '.join(different)}. Terms "
                    "never change, because earlier guarantees rest on them. Use the same terms, "
                    "or another name for other data."
                )

    def account(self, name: str, *, label: str = "") -> Account:
        """Returns an account of a dataset, with the arguments and errors of `Account`."""
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
        """Charges `event` to a dataset. `with` runs the body that it pays for, and marks the charge
        committed.

        Check and reservation are one transaction, on disk before this returns. If the body raises,
        the process dies or `with` is never entered, the reservation stays spent.

        Args:
            name: A registered dataset, or an account of this ledger.
            event: What the body releases, in the vocabulary of `jaxdp.privacy.events`.
            partition: The part of a fixed division into disjoint parts that the body reads. None is
                the whole dataset.
            label: A label for the report. An account puts its own label in front. Never put data in
                it.
            token: A text that makes a retry after a crash free. A second spend with the same
                dataset and token is not charged again and yields `replay=True`, whatever the status
                of the first. The token must therefore determine the released value bit for bit:
                program, inputs, noise key, hardware. Fresh noise needs a fresh token.

        Returns:
            A `Reservation`, to be entered once. `with` yields its `Spend`.

        Raises:
            BudgetExceeded: The budget does not allow the event. Nothing has run or been charged.
            ValueError: The event is unknown or has no accounting rule for this dataset's adjacency.
                The token was used for another event or partition. The account is of another ledger.
            OSError: The file cannot be written. Before the body, nothing runs or is charged. After
                it, the release counts, but its mark in the report stays "reserved".
        """
        (spend,) = self._reserve([self._request(name, event, label)], partition, token)
        return Reservation(self, spend)

    def spend_all(
        self, requests: Requests, *, label: str = "", token: str | None = None
    ) -> Reservation[tuple[Spend, ...]]:
        """Charges an event to each of several datasets or to none. `with` runs the body that they
        pay for.

        Args:
            requests: Pairs of a registered dataset, or an account of this ledger, and an event. A
                dataset that is named twice pays twice.
            label: As in `spend`.
            token: As in `spend`, one for all. Each dataset may then be named only once.

        Returns:
            A `Reservation`, to be entered once. `with` yields one `Spend` per request.

        Raises:
            BudgetExceeded, ValueError, OSError: As in `spend`, for the first dataset that cannot
                pay. None is charged.
        """
        asked = [self._request(account, event, label) for account, event in requests]
        names = [request.name for request in asked]
        if token is not None and len(set(names)) < len(names):
            raise ValueError(
                f"with a token each dataset pays once, but requests names {sorted(names)}."
            )
        return Reservation(self, self._reserve(asked, None, token))

    def hold(
        self, requests: Requests, *, key: str | None = None, label: str = "", seconds: float = DAY
    ) -> Hold:
        """Keeps room for events that will be spent later, on all of several datasets or on none.

        Spends and holds of others, in any process, must fit beside the room that is held. A hold is
        not a spend: `epsilon`, `remaining` and `events` ignore it, and the report lists it apart. A
        spend on any part takes from it.

        Under an account that spends from a hold already, this extends that hold by the room that it
        lacks. Closing the new hold returns what it added. The `key` and `seconds` of the first one
        stay.

        Args:
            requests: Pairs of a registered dataset, or an account of this ledger, and an event. A
                dataset that is named twice gets room for the sum. Accounts that spend from a hold
                must share it.
            key: The holder. A hold replaces the one with the same key. A restarted program thus
                replaces its old hold by one for the events that `paid` shows unpaid.
            label: A label for the report. Never put data in it.
            seconds: The time after which the hold lapses, from the moment it was made or last spent
                from.

        Returns:
            A `Hold`. Spend from it through `hold.account(name)`. Its text says when room may be
            returned.

        Raises:
            BudgetExceeded: Some dataset has no room beside everything that is spent and that others
                hold. Nothing is held.
            ValueError, OSError: As in `spend`, or `key` or `seconds` is impossible.
        """
        asked = [self._request(account, event, label) for account, event in requests]
        _check_text("key", key)
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be finite and > 0, got {seconds!r}.")
        outer = {request.hold for request in asked if request.hold is not None}
        if len(outer) > 1:
            raise ValueError(
                f"requests has accounts that spend from {len(outer)} different holds. Hold for the "
                "accounts of one at a time."
            )
        return self._settled(
            lambda db: self._make_hold(db, asked, min(outer, default=None), key, float(seconds))
        )

    # --- Questions -------------------------------------------------------------------------------

    def adjacency(self, name: str) -> Adjacency:
        """Returns a dataset's neighbouring relation."""
        with self._transaction("DEFERRED") as db:
            return books.dataset_of(db, name).adjacency

    def unit(self, name: str) -> str:
        """Returns a dataset's unit of privacy."""
        with self._transaction("DEFERRED") as db:
            return books.dataset_of(db, name).unit

    def delta(self, name: str) -> float | None:
        """Returns a dataset's registered delta, or None."""
        with self._transaction("DEFERRED") as db:
            return books.dataset_of(db, name).delta

    def paid(self, name: str, token: str) -> bool:
        """Returns whether a spend with this token was charged to a dataset, so that the next one
        would be a replay.
        """
        _check_text("token", token)
        with self._transaction("DEFERRED") as db:
            return books.paid_for(db, books.dataset_of(db, name), token) is not None

    def would_cost(
        self, name: str, event: DpEvent, *, delta: float | None = None, partition: str | None = None
    ) -> float:
        """Returns `epsilon(name, delta=, partition=)` as it would be after spending `event`. It
        spends nothing.

        The budget does not count here, but `check` tests it. For a "renyi_filter" dataset the
        answer is the epsilon of its bound, or more if the bound does not allow the event.

        Raises:
            ValueError: As in `epsilon`. The event is unknown or has no accounting rule for the
                dataset's adjacency.
        """
        return self._epsilon(name, delta, partition, step=composition(event))

    def check(self, requests: Requests) -> None:
        """Raises the errors that `spend_all` of the same requests would raise. It changes nothing.

        It counts the room that others hold. Under an account of a hold, it uses the room of that
        hold. Another process may take the room right afterwards, unless `hold` keeps it.
        """
        asked = [self._request(account, event, "") for account, event in requests]
        self._settled(lambda db: self._admit(db, asked, None, ahead=True), "DEFERRED")

    def epsilon(
        self, name: str, *, delta: float | None = None, partition: str | None = None
    ) -> float:
        """Returns epsilon of everything reserved so far, as (epsilon, delta)-DP under the dataset's
        adjacency.

        Args:
            name: A registered dataset.
            delta: The delta, by default the registered one. One of them is needed.
            partition: A part whose units are meant. The default is the maximum over all parts.

        Returns:
            Epsilon >= 0. It is `math.inf` if a release is unproven or not private, or if delta is 0
            and not all are pure.
        """
        return self._epsilon(name, delta, partition)

    def proven_epsilon(
        self, name: str, *, delta: float | None = None, partition: str | None = None
    ) -> float:
        """Returns `epsilon` of the releases that have a proof. It is never the headline."""
        return self._epsilon(name, delta, partition, proven_only=True)

    def total(self, names: Sequence[str], *, delta: float) -> float:
        """Returns epsilon, at `delta`, for a record that may be in all of several datasets.

        Changing such a record changes every dataset at once, each to a neighbour. So all releases
        compose as if they were made about one dataset: the PLD (or RDP) of the sum of the
        compositions. In each dataset the record lies in one part. The result is the maximum over
        all choices of parts. Releases may read the datasets in turn, each with a view of all
        earlier outputs. Adaptive composition does not ask which input a mechanism reads.

        Events of a "renyi_filter" dataset may be chosen adaptively. Once anything was spent on it,
        it counts as one interactive mechanism that is (registered epsilon, registered delta)-DP.
        Epsilons and deltas of concurrent interactive mechanisms add up (Vadhan and Zhang 2023,
        arXiv 2207.08335, and Lyu 2022, arXiv 2207.09397). The result is the sum of the registered
        epsilons and of the other datasets' epsilon at `delta` less the registered deltas.

        Args:
            names: Registered datasets of one adjacency and unit. A dataset that is named twice
                counts once.
            delta: A number in [0, 1).

        Returns:
            Epsilon >= 0. It is `math.inf` if a release is unproven or not private. With very many
            parts it is an upper bound.

        Raises:
            ValueError: A dataset is unknown, or `names` is empty. Adjacencies or units differ. The
                events have no common accounting rule. `delta` leaves nothing beside the registered
                deltas of "renyi_filter" datasets.
        """
        if isinstance(names, str) or not names:
            raise ValueError(f"names must be a sequence of one or more datasets, got {names!r}.")
        if not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta!r}.")
        with self._transaction("DEFERRED") as db:
            datasets = [books.dataset_of(db, name) for name in dict.fromkeys(names)]
            accounts = [
                (dataset, self._spends.compositions(db, dataset, None)) for dataset in datasets
            ]
        first = datasets[0]
        for dataset in datasets:
            if (dataset.adjacency, dataset.unit) != (first.adjacency, first.unit):
                raise ValueError(
                    f"names: dataset {first.name!r} has adjacency {first.adjacency!r} and unit "
                    f"{first.unit!r}, {dataset.name!r} has {dataset.adjacency!r} and "
                    f"{dataset.unit!r}, so no single change is meant. Ask for datasets that share "
                    "both, and register data of the same people with the same terms."
                )
        if not all(is_proven(counts) for _, parts in accounts for counts in parts):
            return math.inf
        filtered = [
            data for data, parts in accounts if data.accounting == "renyi_filter" and any(parts)
        ]
        together = combinations(
            parts for data, parts in accounts if data.accounting != "renyi_filter"
        )
        taken = math.fsum(dataset.delta or 0.0 for dataset in filtered)
        left = 0.0 if math.isclose(taken, delta) else delta - taken
        if left < 0 or (filtered and left == 0 and any(together)):
            raise ValueError(
                f"delta={delta!r} leaves nothing beside the registered deltas of the "
                f"'renyi_filter' datasets {[dataset.name for dataset in filtered]}, which add up "
                f"to {taken:g}. Ask for a larger delta."
            )
        method: Method = (
            "auto" if any(dataset.accounting == "pld" for dataset in datasets) else "rdp"
        )
        rest = max(pld_epsilon(counts, left, first.adjacency, method) for counts in together)
        return rest + math.fsum(dataset.epsilon or 0.0 for dataset in filtered)

    def remaining(self, name: str, *, partition: str | None = None) -> float:
        """Returns the budget's epsilon minus the spent epsilon, at the budget's delta. It is
        infinite without a budget.

        The next event may cost less than its own epsilon. Room that is held counts as free, and
        unproven releases do not count. For a "renyi_filter" dataset it is the share of the Renyi
        bound that is left, times the budget's epsilon.
        """
        with self._transaction("DEFERRED") as db:
            dataset = books.dataset_of(db, name)
            if dataset.epsilon is None or dataset.delta is None:
                return math.inf
            compositions = self._spends.compositions(db, dataset, partition)
        return max(
            0.0, dataset.epsilon - max(used(dataset, proven(counts)) for counts in compositions)
        )

    def events(self, name: str) -> dict[str | None, DpEvent]:
        """Returns the reserved events, composed per partition. Key None holds the releases on the
        whole dataset.
        """
        with self._transaction("DEFERRED") as db:
            parts = self._spends.by_part(db, books.dataset_of(db, name))
        return {part: compose(counts) for part, counts in parts.items()}

    def report(self, *, delta: float = 1e-5) -> dict[str, Any]:
        """Returns the whole account as plain data for JSON.

        Args:
            delta: The delta for datasets that have none registered.

        Returns:
            {"path", "schema_version", "head", "datasets": [...]}. Each dataset has its terms, its
            `delta`, the declared number of `records` or None, and the number of `partitions`. At
            its `delta` it has the `headline` (text), `proven_epsilon` and `remaining` (None for
            infinity). `spends` has one row per partition and event, at most 1000 of `rows`. `runs`
            lists the latest 1000 runs that spent, with user, host and version. `open` has at most
            1000 spends that did not commit (running, failed or killed) and count in full. `holds`
            count in no number.
        """
        with self._transaction("DEFERRED") as db:
            entries = [readout.entry(db, dataset, delta) for dataset in books.datasets(db)]
        for entry in entries:  # outside the transaction, because PLDs are slow
            epsilon = self.epsilon(entry["name"], delta=entry["delta"])
            entry["headline"] = (
                "inf (empirical only)" if entry.pop("unproven") else f"{epsilon:.6g}"
            )
            entry["proven_epsilon"] = readout.finite(
                self.proven_epsilon(entry["name"], delta=entry["delta"])
            )
            entry["remaining"] = readout.finite(self.remaining(entry["name"]))
        head = dataclasses.asdict(self.head)
        return {
            "path": self._path,
            "schema_version": SCHEMA_VERSION,
            "head": head,
            "datasets": entries,
        }

    def report_text(self, *, delta: float = 1e-5, timezone: datetime.tzinfo = datetime.UTC) -> str:
        """Returns `report` as text, with times in a time zone. Datasets with equal accounts are
        shown once.
        """
        return readout.text(self.report(delta=delta), timezone)

    def history(self, name: str | None = None) -> list[dict[str, Any]]:
        """Returns every spend of one dataset or of all, the oldest first.

        Returns:
            Rows with "spend" (its number), "dataset", "partition", "event" (as `describe` writes
            it), "label", "status", "reserved_at", "finished_at" (UTC), "who", "host", "run",
            "version", "token" and "link".
        """
        with self._transaction("DEFERRED") as db:
            return readout.history(db, None if name is None else books.dataset_of(db, name))

    def by_day(
        self, name: str, *, delta: float | None = None, timezone: datetime.tzinfo = datetime.UTC
    ) -> list[dict[str, Any]]:
        """Returns the growth of epsilon: one row for each day, in a time zone, that had spends on a
        dataset.

        Returns:
            Rows with "day" (ISO), "dataset", "spends" (of that day), "epsilon" (of everything until
            its end) and "delta". By default it is the registered one.
        """
        with self._transaction("DEFERRED") as db:
            dataset = books.dataset_of(db, name)
            return readout.by_day(db, dataset, _delta_for(dataset, delta), timezone)

    def growth(
        self, name: str, *, delta: float | None = None, points: int = 40
    ) -> list[dict[str, Any]]:
        """Returns the growth of epsilon in at most `points` rows: one for each spend, or for
        equally many spends.

        Returns:
            Rows with "first_at" and "last_at" (UTC), "spends" (of that row), "epsilon" (of
            everything until its end) and "delta". By default it is the registered one.

        Raises:
            ValueError: `points` is less than 1.
        """
        if points < 1:
            raise ValueError(
                f"points must be at least 1, got {points}. Give the number of rows to return."
            )
        with self._transaction("DEFERRED") as db:
            dataset = books.dataset_of(db, name)
            return readout.growth(db, dataset, _delta_for(dataset, delta), points)

    # --- The file --------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The position of the ledger's last spend. A copy kept elsewhere shows later whether
        history was lost.
        """
        return self._store.head

    @property
    def has_head(self) -> bool:
        """Whether the file's head lies beside it. Without a head, missing last spends cannot be
        detected.
        """
        return self._store.has_head

    def contains(self, head: Head) -> bool | None:
        """Returns whether the ledger's history contains `head`, or None if `head` is of another
        ledger or branch.
        """
        return self._store.contains(head)

    def damaged(self, what: str) -> LedgerDamaged:
        """Returns the error for a ledger that must not be used, when something outside it shows
        that.
        """
        return damaged(self._path, what)

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the ledger durably to a new file, with its head. Others may spend meanwhile.

        Raises:
            ValueError: There is such a file already, or no such directory.
            OSError: The copy cannot be written.
        """
        self._store.backup(path)

    # --- Inside ----------------------------------------------------------------------------------

    def _request(self, account: str | Account, event: DpEvent, label: str) -> "_Request":
        _check_label(label)
        step = composition(event)
        if not isinstance(account, Account):
            return _Request(account, None, label, step)
        if account.ledger is not self:
            raise ValueError(
                f"account {account.name!r} belongs to the ledger {account.ledger._path!r}, not to "
                f"{self._path!r}. Take it from this ledger: ledger.account({account.name!r})."
            )
        hold = None if account.held is None else account.held._id
        return _Request(account.name, hold, account.labelled(label), step)

    def _settled(
        self,
        work: Callable[[sqlite3.Connection], Result],
        mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE",
    ) -> Result:
        """Returns `work(db)` of one transaction, and restarts it whenever a PLD has to decide
        something.
        """
        while True:
            try:
                with self._transaction(mode) as db:
                    return work(db)
            except Unsettled as error:
                unsettled = error
            # This is slow and runs without the write lock. Counts may change meanwhile, so the loop
            # asks again.
            with self._store.lock:
                allowed = unsettled.decide()
            if not allowed:
                raise unsettled.refusal()

    def _admit(
        self,
        db: sqlite3.Connection,
        requests: Sequence["_Request"],
        partition: str | None,
        *,
        ahead: bool,
    ) -> None:
        """Raises unless the sum of the requests to each dataset fits beside everything that is
        spent and held.

        Events that a request takes out of a hold count once. While a program spends what it holds,
        the sum and the verdict do not change.
        """
        for name in dict.fromkeys(request.name for request in requests):
            dataset, nothing = books.dataset_of(db, name), Counter[DpEvent]()
            steps: dict[str | None, Counts] = {}
            for request in requests:
                if request.name == name:
                    steps[request.hold] = steps.get(request.hold, nothing) + request.step
            held = books.held(db, dataset)
            question = Unsettled(
                self._budgets.setdefault(dataset.id, BudgetCheck(dataset)),
                self._spends.tallies(db, dataset, partition),
                others=sum((counts for hold, counts in held.items() if hold not in steps), nothing),
                own=sum((held.get(hold, nothing) | step for hold, step in steps.items()), nothing),
                step=sum(steps.values(), nothing),
                ahead=ahead,
            )
            if not question.is_allowed():
                raise question

    def _reserve(
        self, requests: Sequence["_Request"], partition: str | None, token: str | None
    ) -> tuple[Spend, ...]:
        _check_text("partition", partition)
        _check_text("token", token)
        for request in requests:
            if not request.step.keys() <= self._met:
                # Computing the losses of new events is slow. It happens before the write lock makes
                # others wait.
                with self._transaction("DEFERRED") as db:
                    for tally in self._spends.tallies(db, books.dataset_of(db, request.name), None):
                        tally.plus(request.step).rdp_epsilon(0.5)
                self._met |= request.step.keys()
        return self._settled(lambda db: self._reserve_all(db, requests, partition, token))

    def _reserve_all(
        self,
        db: sqlite3.Connection,
        requests: Sequence["_Request"],
        partition: str | None,
        token: str | None,
    ) -> tuple[Spend, ...]:
        replays = [_replayed(db, request, partition, token) for request in requests]
        fresh = [
            request for request, replay in zip(requests, replays, strict=True) if replay is None
        ]
        self._admit(db, fresh, partition, ahead=True)
        made = iter([self._charge(db, request, partition, token) for request in fresh])
        return tuple(replay or next(made) for replay in replays)

    def _charge(
        self, db: sqlite3.Connection, request: "_Request", partition: str | None, token: str | None
    ) -> Spend:
        dataset, event = books.dataset_of(db, request.name), compose(request.step)
        number = self._store.append(
            dataset.id, partition or "", to_json(event), request.label, token, self._run
        )
        if request.hold is not None:
            books.take(db, dataset, request.hold, request.step)
        return Spend(number, request.name, event, replay=False)

    def _make_hold(
        self,
        db: sqlite3.Connection,
        requests: Sequence["_Request"],
        outer: str | None,
        key: str | None,
        seconds: float,
    ) -> Hold:
        """Makes a hold, or extends the live hold `outer`."""
        now = books.clock()
        db.execute("DELETE FROM holds WHERE lapses <= ?", (now,))
        terms = db.execute("SELECT key, seconds FROM holds WHERE id = ?", (outer,)).fetchone()
        if terms is None:
            outer = None
            db.execute("DELETE FROM holds WHERE key = ?", (key,))
        else:
            key, seconds = terms
        hold = outer or secrets.token_hex(8)
        self._admit(db, [request._replace(hold=hold) for request in requests], None, ahead=False)
        added = {}
        for name in dict.fromkeys(request.name for request in requests):
            dataset, same = (
                books.dataset_of(db, name),
                [request for request in requests if request.name == name],
            )
            kept = books.held(db, dataset).get(hold, Counter())
            wanted = kept | sum((request.step for request in same), Counter[DpEvent]())
            added[name] = wanted - kept
            db.execute(
                "INSERT INTO holds VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET json "
                "= excluded.json",
                (
                    hold,
                    dataset.id,
                    to_json(compose(wanted)),
                    key,
                    same[0].label,
                    self._run,
                    seconds,
                    now + seconds,
                ),
            )
        db.execute("UPDATE holds SET lapses = ? WHERE id = ?", (now + seconds, hold))
        return Hold(self, hold, added, nested=outer is not None)

    def _held_left(self, hold: str, name: str) -> DpEvent:
        with self._transaction("DEFERRED") as db:
            return compose(books.held(db, books.dataset_of(db, name)).get(hold, {}))

    def _release(self, hold: str, added: Mapping[str, Counts] | None) -> None:
        with self._transaction() as db:
            if added is None:
                db.execute("DELETE FROM holds WHERE id = ?", (hold,))
            for name, counts in (added or {}).items():
                books.take(db, books.dataset_of(db, name), hold, counts)

    def _finish(self, spends: Sequence[Spend], status: Literal["committed", "failed"]) -> None:
        with self._transaction() as db:
            rows = [(status, now(), spend.id) for spend in spends]
            db.executemany("UPDATE spends SET status = ?, finished_at = ? WHERE id = ?", rows)

    def _epsilon(
        self,
        name: str,
        delta: float | None,
        partition: str | None,
        *,
        proven_only: bool = False,
        step: Counts | None = None,
    ) -> float:
        """Returns epsilon of all releases, of the proven ones, or of all with a next `step`."""
        with self._transaction("DEFERRED") as db:
            dataset = books.dataset_of(db, name)
            compositions = self._spends.compositions(db, dataset, partition)
        delta = _delta_for(dataset, delta)
        if proven_only:
            compositions = [proven(counts) for counts in compositions]
        if step is not None:
            compositions = [counts + step for counts in compositions]
            for counts in compositions:
                check_rules(counts, adjacency=dataset.adjacency, method=dataset.method)
        return max(epsilon_of(dataset, counts, delta) for counts in compositions)


class _Request(NamedTuple):
    name: str
    hold: str | None
    label: str
    step: Counts


def _check_label(label: object) -> None:
    if not isinstance(label, str):
        raise ValueError(f"label must be a string, got {label!r}.")


def _check_text(key: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{key} must be a non-empty string or None, got {value!r}.")


def _delta_for(dataset: Dataset, delta: float | None) -> float:
    delta = dataset.delta if delta is None else delta
    if delta is None:
        raise ValueError(
            f"delta is needed: dataset {dataset.name!r} has none registered. Give one."
        )
    return delta


def _replayed(
    db: sqlite3.Connection, request: _Request, partition: str | None, token: str | None
) -> Spend | None:
    paid = None if token is None else books.paid_for(db, books.dataset_of(db, request.name), token)
    if paid is None:
        return None
    event = compose(request.step)
    if paid["json"] != to_json(event) or paid["partition"] != (partition or ""):
        raise ValueError(
            f"token {token!r} of dataset {request.name!r} paid for "
            f"{describe(from_json(paid['json']))} on partition {paid['partition'] or None!r}, not "
            f"for {describe(event)} on {partition!r}. A token stands for one release. Use a fresh "
            "one."
        )
    return Spend(paid["id"], request.name, event, replay=True)
