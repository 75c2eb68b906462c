"""The ledger: one durable account of everything that was released about each private dataset.

    ledger = Ledger("ledger.sqlite")
    ledger.register(
        "cifar10/train", adjacency="add_remove", unit="example", epsilon=8.0, delta=1e-5
    )
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
both files together, or use `backup`. `.ledger.sqlite.anchor` stays where it is: it shows that an
older copy was restored.

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

import functools
import math
import os
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxdp.files import happened
from jaxdp.files.text import finite
from jaxdp.privacy import contacts, holds
from jaxdp.privacy.accounting import Adjacency
from jaxdp.privacy.accounts import (
    DAY,
    Account,
    Hold,
    Requests,
    Reservation,
    Spend,
    check_label,
    check_ledger,
)
from jaxdp.privacy.admission import Admission, Request, names_of, sum_of_steps
from jaxdp.privacy.budget import BudgetExceeded
from jaxdp.privacy.datasets import dataset_of, find_dataset, insert_dataset, paid_for
from jaxdp.privacy.events import Counts, DpEvent, compose, composition, describe, from_json, to_json
from jaxdp.privacy.ledger_reader import LedgerReader, check_text
from jaxdp.privacy.privacy_warnings import warn_if_weak, warn_of_another_contact
from jaxdp.privacy.store import Head, LedgerDamaged
from jaxdp.privacy.terms import Accounting, Terms
from jaxdp.privacy.times import now

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


class Ledger(LedgerReader):
    """The account of all releases about the datasets registered in it.

    The module's text states its guarantees. Threads may share a ledger. Processes open the same
    path. All methods raise ValueError for a dataset that is not registered. The questions are
    methods of `LedgerReader`.

    Args:
        path: The SQLite file, made if it does not exist. Its directory must exist. A file of the
            first release is migrated once, and `path.version1` keeps a copy of it.
        run: An identifier of this run, stored with every spend. It is random by default.
        read_only: Whether to write nothing, to the file or beside it. If nobody has the file open,
            the ledger is read as it is now, and does not show what others spend later.

    Raises:
        LedgerDamaged: The file lost history or is inconsistent. The error is a ValueError.
        ValueError: The file is not a ledger, cannot be opened or made, or a newer jaxdp wrote it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, run: str | None = None, read_only: bool = False
    ):
        super().__init__(os.fspath(path), read_only=read_only)
        self._run = run or secrets.token_hex(8)
        self._admission = Admission(self._store, self._spends)

    @property
    def run(self) -> str:
        """The identifier of this run, which is stored with every spend."""
        return self._run

    @classmethod
    def in_memory(cls, *, run: str | None = None) -> "Ledger":
        """Returns a ledger that exists only in this process, for notebooks and tests."""
        return cls(":memory:", run=run)

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
        owner: str | None = None,
        purpose: str | None = None,
        contact: str | None = None,
        approver: str | None = None,
    ) -> None:
        """Registers a private dataset. Registering it again with the same terms does nothing.

        Args:
            name: The dataset's name in this ledger.
            adjacency: The neighbouring relation: "add_remove" one unit, "replace_one" by another,
                or "zero_out" one (replace it by the zero or null record). "replace_label" replaces
                the label of one unit and protects nothing else: it is for `LabelDpEvent` only,
                and the claim is not one for examples.
            unit: The unit of privacy in words: "example", "user", "patient".
            records: The public number of units. It may be declared later, once. A delta of 1 /
                records or more gives a `PrivacyWarning`, because it allows one record to be
                published.
            epsilon: The budget. None records spends without limiting them. Above 10 gives a
                `PrivacyWarning`.
            delta: The budget's delta, and the default delta of queries. 0 allows pure releases
                only.
            accounting: "pld" (PLD, where an event without a PLD rule stands by its RDP), "rdp" or
                "renyi_filter".
                The filter's budget holds under fully adaptive choice of events (see the module's
                text).
            renyi_order: For "renyi_filter", the order > 1, which never changes. The default admits
                most of a mechanism whose Renyi loss is proportional to the order, such as the
                Gaussian's.
            allow_unproven: Whether a budget allows `privacy.unproven(...)` releases. The headline
                epsilon is then infinite, and the budget limits the proven part.
            owner, purpose, contact, approver: Whom to ask about the data, and what they may be used
                for, for reports. They are no terms: a field that the ledger lacks is filled in.
                One that differs stays as it is and gives a `PrivacyWarning`. `describe` corrects
                it.

        Raises:
            ValueError: An argument is impossible, or the dataset is registered with other terms.
        """
        if not name or not isinstance(name, str):
            raise ValueError(f"name must be a non-empty string, got {name!r}.")
        terms = Terms(
            adjacency=adjacency,
            unit=unit,
            epsilon=epsilon,
            delta=delta,
            accounting=accounting,
            renyi_order=renyi_order,
            allow_unproven=allow_unproven,
            records=records,
        ).checked()
        people = contacts.checked(owner=owner, purpose=purpose, contact=contact, approver=approver)
        # Before the transaction, so that nothing is registered where warnings are errors.
        warn_if_weak(epsilon=epsilon, delta=delta, records=records, unit=unit)
        with self._transaction() as db:
            # Found or inserted in one transaction, so that two programs cannot both insert it.
            dataset = find_dataset(db, name)
            if dataset is None:
                insert_dataset(db, name, terms)
                self._store.seal(name)
                self._fill_in(db, name, people)
                return
            # A program that starts again registers again, which equal terms make harmless.
            dataset.check_unchanged(terms)
            self._fill_in(db, name, people)
            # The number of records may be declared later, once, and is sealed with the terms.
            if records is not None and dataset.records is None:
                db.execute("UPDATE datasets SET records = ? WHERE id = ?", (records, dataset.id))
                self._store.seal(name)

    def describe(
        self,
        name: str,
        *,
        owner: str | None = None,
        purpose: str | None = None,
        contact: str | None = None,
        approver: str | None = None,
        replace: bool = True,
    ) -> None:
        """Sets or corrects whom to ask about a dataset. The history of all changes stays.

        `contacts` returns the fields, and `contact_history` the changes.

        Args:
            name: A registered dataset.
            owner: Who is responsible for the data. None leaves this field and each other as it is,
                and "" says that it is not known.
            purpose: What the data may be used for.
            contact: Where to ask, for example an address.
            approver: Who allowed the use.
            replace: False sets only the fields that the ledger lacks. One that differs then stays
                as it is and gives a `PrivacyWarning`.

        Raises:
            TypeError, ValueError: A field is no text, or is longer than a line of 500 characters.
                The dataset is not registered.
        """
        people = contacts.checked(owner=owner, purpose=purpose, contact=contact, approver=approver)
        with self._transaction() as db:
            dataset_of(db, name)
            if not replace:
                self._fill_in(db, name, people)
                return
            before = contacts.current(contacts.rows(db), name)
            # A call that changes nothing leaves no row in the history.
            if before | people != before:
                self._store.describe(name, people)

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
        """Charges `event` to a dataset.

        `with` runs the body that it pays for, and marks the charge committed. Check and reservation
        are one transaction, on disk before this returns. If the body raises, the process dies or
        `with` is never entered, the reservation stays spent.

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
        self,
        requests: Requests,
        *,
        partition: str | None = None,
        label: str = "",
        token: str | None = None,
    ) -> Reservation[tuple[Spend, ...]]:
        """Charges an event to each of several datasets or to none.

        `with` runs the body that they pay for.

        Args:
            requests: Pairs of a registered dataset, or an account of this ledger, and an event. A
                dataset that is named twice pays twice.
            partition, label: As in `spend`, the part of each dataset.
            token: As in `spend`, one for all. Each dataset may then be named only once.

        Returns:
            A `Reservation`, to be entered once. `with` yields one `Spend` per request.

        Raises:
            BudgetExceeded, ValueError, OSError: As in `spend`, for the first dataset that cannot
                pay. None is charged.
        """
        charges = [self._request(account, event, label) for account, event in requests]
        names = [charge.name for charge in charges]
        # A token stands for one release about a dataset, so it cannot pay for two.
        if token is not None and len(set(names)) < len(names):
            raise ValueError(
                f"with a token each dataset pays once, but requests names {sorted(names)}."
            )
        return Reservation(self, self._reserve(charges, partition, token))

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
        needs = [self._request(account, event, label) for account, event in requests]
        check_text("key", key)
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds must be finite and > 0, got {seconds!r}.")
        outer_holds = {need.hold for need in needs if need.hold is not None}
        if len(outer_holds) > 1:
            raise ValueError(
                f"requests has accounts that spend from {len(outer_holds)} different holds. Hold "
                "for the accounts of one at a time."
            )
        # The only one, or None.
        outer = min(outer_holds, default=None)
        return self._admission.settled(
            lambda db: self._make_hold(db, needs, outer, key, float(seconds))
        )

    def check(self, requests: Requests) -> None:
        """Raises the errors that `spend_all` of the same requests would raise. It changes nothing.

        It counts the room that others hold. Under an account of a hold, it uses the room of that
        hold. Another process may take the room right afterwards, unless `hold` keeps it.
        """
        charges = [self._request(account, event, "") for account, event in requests]
        # A read: others may spend meanwhile.
        self._admission.settled(
            lambda db: self._admission.admit(db, charges, None, more_follow=True), "DEFERRED"
        )

    # --- Inside ----------------------------------------------------------------------------------

    def _fill_in(self, db: sqlite3.Connection, name: str, people: Mapping[str, str]) -> None:
        """Notes the fields that the ledger lacks. Warns of those that differ."""
        known = contacts.current(contacts.rows(db), name)
        missing = {}
        for field, text in people.items():
            if text and not known[field]:
                missing[field] = text
            elif text != known[field]:
                warn_of_another_contact(name, field, registered=known[field], present=text)
        if missing:
            self._store.describe(name, missing)

    def _request(self, account: str | Account, event: DpEvent, label: str) -> Request:
        check_label(label)
        step = composition(event)
        if not isinstance(account, Account):
            return Request(account, None, label, step)
        check_ledger(account, self)
        hold = None if account.held is None else account.held._id
        return Request(account.name, hold, account.labelled(label), step)

    def _reserve(
        self, requests: Sequence[Request], partition: str | None, token: str | None
    ) -> tuple[Spend, ...]:
        """Charges all requests or none, on disk. Requests whose token has paid are free."""
        check_text("partition", partition)
        check_text("token", token)
        # Slow, and so before the transaction.
        self._admission.prepare(requests)
        # Restarted from the first check whenever a PLD had to decide something.
        spends = self._admission.settled(
            lambda db: self._reserve_in(db, requests, partition, token)
        )
        for spend, request in zip(spends, requests, strict=True):
            # A replay pays nothing.
            if not spend.replay:
                # Epsilon is computed only if somebody listens.
                happened("payment", functools.partial(self._payment, spend, request.label))
        return spends

    def _payment(self, spend: Spend, label: str) -> dict[str, Any]:
        """Returns what an event tells about a spend, with epsilon after it as `report` has it."""
        # The default delta of `report`, so that both show one epsilon.
        registered = self.delta(spend.dataset)
        delta = 1e-5 if registered is None else registered
        epsilon = self.epsilon(spend.dataset, delta=delta)
        # Programs of several folders share a log.
        path = self._path if self._path == ":memory:" else os.path.abspath(self._path)
        return {
            "ledger": path,
            "dataset": spend.dataset,
            "spend": spend.id,
            "label": label,
            "charge": describe(spend.event),
            "epsilon": finite(epsilon),
            "delta": delta,
        }

    def _reserve_in(
        self,
        db: sqlite3.Connection,
        requests: Sequence[Request],
        partition: str | None,
        token: str | None,
    ) -> tuple[Spend, ...]:
        # Inside of the transaction, so that no other process pays with the token meanwhile.
        replays = [_replayed(db, request, partition, token) for request in requests]
        unpaid = [
            request for request, replay in zip(requests, replays, strict=True) if replay is None
        ]
        # All are admitted before the first one is charged, so that none is charged alone.
        self._admission.admit(db, unpaid, partition, more_follow=True)
        # Merged back in the order of the requests, which callers zip with.
        charged = iter([self._charge(db, request, partition, token) for request in unpaid])
        return tuple(replay or next(charged) for replay in replays)

    def _charge(
        self, db: sqlite3.Connection, request: Request, partition: str | None, token: str | None
    ) -> Spend:
        dataset = dataset_of(db, request.name)
        # In the canonical form, so that equal requests have one text, and one row of `events`.
        event = compose(request.step)
        # The key of the totals holds no NULL, so "" is the whole dataset.
        number = self._store.append(
            dataset.id, partition or "", to_json(event), request.label, token, self._run
        )
        # What is charged leaves the hold in the same transaction, and never counts twice.
        if request.hold is not None:
            holds.take(db, dataset, request.hold, request.step)
        return Spend(number, request.name, event, replay=False)

    def _make_hold(
        self,
        db: sqlite3.Connection,
        requests: Sequence[Request],
        outer: str | None,
        key: str | None,
        seconds: float,
    ) -> Hold:
        """Makes a hold, or extends the live hold `outer`."""
        # First, so that the hold that this one replaces takes no room.
        terms, is_nested = holds.begin(db, outer, key, self._run, seconds)
        own = [request._replace(hold=terms.id) for request in requests]
        # A hold asks once for its whole plan, so no similar request is likely to follow.
        self._admission.admit(db, own, None, more_follow=False)
        added = {}
        for name in names_of(own):
            needs = [request for request in own if request.name == name]
            added[name] = holds.extend(
                db, dataset_of(db, name), terms, needs[0].label, sum_of_steps(needs)
            )
        holds.renew(db, terms)
        return Hold(self, terms.id, added, nested=is_nested)

    def _held_left(self, hold: str, name: str) -> DpEvent:
        with self._transaction("DEFERRED") as db:
            return compose(holds.held(db, dataset_of(db, name)).get(hold, {}))

    def _release(self, hold: str, added: Mapping[str, Counts] | None) -> None:
        with self._transaction() as db:
            # None is the whole hold. A nested one returns only what it has added.
            if added is None:
                holds.release(db, hold)
            for name, counts in (added or {}).items():
                holds.take(db, dataset_of(db, name), hold, counts)

    def _finish(self, spends: Sequence[Spend], status: Literal["committed", "failed"]) -> None:
        # The mark is in no link, and changes no number.
        with self._transaction() as db:
            rows = [(status, now(), spend.id) for spend in spends]
            db.executemany("UPDATE spends SET status = ?, finished_at = ? WHERE id = ?", rows)


def _replayed(
    db: sqlite3.Connection, request: Request, partition: str | None, token: str | None
) -> Spend | None:
    paid = None if token is None else paid_for(db, dataset_of(db, request.name), token)
    if paid is None:
        return None
    event = compose(request.step)
    # Otherwise one paid token would make any event free.
    if paid["json"] != to_json(event) or paid["partition"] != (partition or ""):
        raise ValueError(
            f"token {token!r} of dataset {request.name!r} paid for "
            f"{describe(from_json(paid['json']))} on partition {paid['partition'] or None!r}, not "
            f"for {describe(event)} on {partition!r}. A token stands for one release. Use a fresh "
            "one."
        )
    return Spend(paid["id"], request.name, event, replay=True)
