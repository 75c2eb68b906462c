"""What a ledger says: the terms, epsilon and report of each dataset, and the state of its file."""

import dataclasses
import datetime
import os
import sqlite3
from collections.abc import Sequence
from typing import Any, Self

from jaxdp.files import check_delta
from jaxdp.files.text import finite, up
from jaxdp.privacy import contacts, explanations, group_privacy, report_text, reports, trade_offs
from jaxdp.privacy.accounting import Adjacency, check_rules
from jaxdp.privacy.compositions import proven
from jaxdp.privacy.datasets import dataset_of, datasets, paid_for
from jaxdp.privacy.events import Counts, DpEvent, compose, composition
from jaxdp.privacy.explanations import By, Explanation
from jaxdp.privacy.group_privacy import GroupPrivacy
from jaxdp.privacy.spends import Spends
from jaxdp.privacy.spent_epsilon import largest_epsilon, remaining_epsilon, total_epsilon
from jaxdp.privacy.statements import RenyiStatement, renyi_statement
from jaxdp.privacy.store import SCHEMA_VERSION, Head, LedgerDamaged, Store, damaged
from jaxdp.privacy.terms import Dataset
from jaxdp.privacy.trade_offs import TradeOff


class LedgerReader:
    """The questions that a `Ledger` answers. None of them changes the file."""

    def __init__(self, path: str, *, read_only: bool):
        self._store = Store(path, read_only=read_only)
        self._path = self._store.path
        self._transaction = self._store.transaction
        self._spends = Spends()

    @property
    def path(self) -> str:
        """The path of the file, or ":memory:"."""
        return self._path

    def close(self) -> None:
        """Closes the file. The ledger cannot be used afterwards."""
        # No thread is inside of a transaction then.
        with self._store.lock:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- Terms -----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names of all datasets, sorted."""
        with self._transaction("DEFERRED") as db:  # a read takes no lock
            return [dataset.name for dataset in datasets(db)]

    def adjacency(self, name: str) -> Adjacency:
        """Returns a dataset's neighbouring relation."""
        return self._dataset(name).adjacency

    def unit(self, name: str) -> str:
        """Returns a dataset's unit of privacy."""
        return self._dataset(name).unit

    def delta(self, name: str) -> float | None:
        """Returns a dataset's registered delta, or None."""
        return self._dataset(name).delta

    def records(self, name: str) -> int | None:
        """Returns a dataset's declared number of units, or None."""
        return self._dataset(name).records

    def contacts(self, name: str) -> dict[str, str]:
        """Returns "owner", "purpose", "contact" and "approver" of a dataset, "" where unknown."""
        with self._transaction("DEFERRED") as db:
            dataset_of(db, name)
            return contacts.current(contacts.rows(db), name)

    def contact_history(self, name: str | None = None) -> list[dict[str, Any]]:
        """Returns every change of `contacts` of one dataset or of all, the oldest first.

        Returns:
            Rows with "number", "dataset", the four fields from then on, "at" (UTC), "who", "host",
            "spend" and "after" (number and link of the last spend before), and "link".
        """
        with self._transaction("DEFERRED") as db:
            # For the error of a dataset that is not registered.
            name = None if name is None else dataset_of(db, name).name
            history = contacts.rows(db)
        return [row for row in history if name in (None, row["dataset"])]

    def _dataset(self, name: str) -> Dataset:
        with self._transaction("DEFERRED") as db:
            return dataset_of(db, name)

    def paid(self, name: str, token: str) -> bool:
        """Returns whether a spend with this token was charged to a dataset.

        The next spend with the token is then a replay.
        """
        check_text("token", token)
        with self._transaction("DEFERRED") as db:
            return paid_for(db, dataset_of(db, name), token) is not None

    def labels_of(self, token: str) -> list[str]:
        """Returns the labels of the spends with this token in all accounts, sorted.

        One release has one token, and an account may have been renamed.
        """
        check_text("token", token)
        with self._transaction("DEFERRED") as db:
            rows = db.execute("SELECT label FROM spends WHERE token = ? ORDER BY label", (token,))
            return [row["label"] for row in rows]

    # --- Epsilon ---------------------------------------------------------------------------------

    def epsilon(
        self, name: str, *, delta: float | None = None, partition: str | None = None
    ) -> float:
        """Returns epsilon of everything reserved so far, under the dataset's adjacency.

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

    def would_cost(
        self, name: str, event: DpEvent, *, delta: float | None = None, partition: str | None = None
    ) -> float:
        """Returns `epsilon(name, delta=, partition=)` as it would be after spending `event`.

        It spends nothing. The budget does not count here, but `check` tests it. For a
        "renyi_filter" dataset the answer is the epsilon of its bound, or more if the bound does not
        allow the event.

        Raises:
            ValueError: As in `epsilon`. The event is unknown or has no accounting rule for the
                dataset's adjacency.
        """
        return self._epsilon(name, delta, partition, step=composition(event))

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
        check_delta(delta)
        # All are read in one transaction, and so at one instant.
        accounts = []
        with self._transaction("DEFERRED") as db:
            for name in dict.fromkeys(names):  # a name counts once
                dataset = dataset_of(db, name)
                accounts.append((dataset, self._spends.compositions(db, dataset, None)))
        return total_epsilon(accounts, delta)

    def remaining(self, name: str, *, partition: str | None = None) -> float:
        """Returns the budget's epsilon minus the spent epsilon, at the budget's delta.

        It is infinite without a budget. The next event may cost less than its own epsilon. Room
        that is held counts as free, and unproven releases do not count. For a "renyi_filter"
        dataset it is the share of the Renyi bound that is left, times the budget's epsilon.
        """
        dataset, compositions = self._borne(name, partition)
        return remaining_epsilon(dataset, compositions)

    def _borne(self, name: str, partition: str | None) -> tuple[Dataset, list[Counts]]:
        """Returns a dataset, and what its units bear.

        Callers compute epsilon of it after the transaction, because a PLD is slow.
        """
        with self._transaction("DEFERRED") as db:
            dataset = dataset_of(db, name)
            return dataset, self._spends.compositions(db, dataset, partition)

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
        dataset, compositions = self._borne(name, partition)
        delta = _delta_for(dataset, delta)
        if proven_only:
            compositions = [proven(counts) for counts in compositions]
        if step is not None:
            compositions = [counts + step for counts in compositions]
            # What is spent was checked when it was charged. The step alone is new.
            for counts in compositions:
                check_rules(counts, adjacency=dataset.adjacency, method=dataset.method)
        # The maximum over parts: a unit lies in one of them.
        return largest_epsilon(dataset, compositions, delta)

    def explain(self, name: str, *, delta: float | None = None, by: By = "event") -> Explanation:
        """Returns what each group of releases adds to epsilon, alone and beside the others.

        The numbers do not depend on the order of the releases. They are no shares: the sum of
        `alone` is usually above epsilon, and the sum of `marginal` usually below it. A group on
        parts that bear less than others has a marginal of 0.

        Args:
            name: A registered dataset.
            delta: The delta, by default the registered one. One of them is needed.
            by: What the releases of a group have in common: the "event" of a spend, the "type" of
                mechanism (events are then divided into their leaves), the "label" up to its first
                colon, which is that of an account, or the "run".

        Returns:
            An `Explanation` with at most 50 groups. Every epsilon is an upper bound as in
            `epsilon`, exact for Gaussians and pure releases alone. A `marginal` is a difference of
            two bounds, each at most 3e-4 of epsilon above the PLD's. For a "renyi_filter" dataset
            the numbers are shares of its bound, in units of the budget's epsilon, and add up.

        Raises:
            ValueError: As in `epsilon`, or `by` is unknown.
        """
        explanations.check_grouping(by)
        with self._transaction("DEFERRED") as db:
            dataset = dataset_of(db, name)
            units, sizes = explanations.spent_groups(db, dataset, by)
        delta = _delta_for(dataset, delta)
        return explanations.explained(dataset, units, sizes, by=by, delta=delta)

    def trade_off(
        self, name: str, *, slack: float | None = None, partition: str | None = None
    ) -> TradeOff:
        """Returns the trade-off curve (f-DP) of everything reserved so far, and its mu.

        It bounds the two error rates of every attacker who decides whether a record was in the
        data, for neighbours in both directions. Epsilon at every delta follows from it.

        Args:
            name: A registered dataset.
            slack: The probability of events that `mu_up_to_slack` leaves out, in [0, 1). By default
                the registered delta. One of them is needed.
            partition: A part whose units are meant. The default is the worst of all parts.

        Returns:
            A `TradeOff` of at most 400 points. The curve is never above the trade-off function that
            the accounting proves. It is exact at the points where one of 200 lines touches it. It
            is 0 for a release without a proof.

        Raises:
            ValueError: As in `epsilon`. `slack` is not in [0, 1).
        """
        dataset, compositions = self._borne(name, partition)
        slack = dataset.delta if slack is None else slack
        if slack is None:
            raise ValueError(f"slack is needed: dataset {name!r} has no delta. Give 1e-5.")
        check_delta(slack, name="slack")
        return trade_offs.trade_off_of(dataset, compositions, slack)

    def renyi(self, name: str, *, partition: str | None = None) -> RenyiStatement:
        """Returns the Renyi DP and the zCDP of everything reserved so far, for other accountants.

        Renyi DP at equal orders adds up over releases, and so does rho. So another accountant may
        add what it counts itself. Epsilon from these statements is usually above `epsilon`.

        Args:
            name: A registered dataset.
            partition: A part whose units are meant. The default is the maximum over all parts.

        Returns:
            A `RenyiStatement` of upper bounds. A "renyi_filter" dataset has its one order, and its
            bound once anything was spent.
        """
        dataset, compositions = self._borne(name, partition)
        return renyi_statement(dataset, compositions)

    def group_privacy(
        self,
        name: str,
        sizes: Sequence[int] = group_privacy.SIZES,
        *,
        delta: float | None = None,
        partition: str | None = None,
    ) -> GroupPrivacy:
        """Returns epsilon for several units together, such as the members of a family.

        It bounds what all releases tell about whether all of them are in the data or none is, and
        under "replace_one" and "zero_out" about what all of them contain. If batches are truncated,
        they are among the examples that the sampler counts.

        Args:
            name: A registered dataset.
            sizes: The numbers of units, from 1 to 1000.
            delta: The delta, by default the registered one. One of them is needed.
            partition: The part in which all of them are. The default is the worst of all parts. No
                bound is given for units in several parts.

        Returns:
            A `GroupPrivacy` of upper bounds. They are those of the accounting for a sum of which
            the units move as many norms, if every event has such a rule
            (`jaxdp.privacy.group_privacy`). They are exact for Gaussians. Other compositions and
            "renyi_filter" datasets are converted from one unit, which is far looser.

        Raises:
            ValueError: As in `epsilon`, or a size is out of range.
        """
        dataset, compositions = self._borne(name, partition)
        delta = _delta_for(dataset, delta)
        sizes = group_privacy.check_sizes(sizes)
        return group_privacy.group_privacy_of(dataset, compositions, delta, sizes)

    # --- Reports ---------------------------------------------------------------------------------

    def events(self, name: str) -> dict[str | None, DpEvent]:
        """Returns the reserved events, composed per partition.

        Key None holds the releases on the whole dataset.
        """
        with self._transaction("DEFERRED") as db:
            spent_by_part = self._spends.by_part(db, dataset_of(db, name))
        return {part: compose(counts) for part, counts in spent_by_part.items()}

    def report(self, *, delta: float = 1e-5) -> dict[str, Any]:
        """Returns the whole account as plain data for JSON.

        Args:
            delta: The delta for datasets that have none registered.

        Returns:
            {"path", "schema_version", "head", "contacts", "datasets": [...]}. "contacts" is the
            number of rows of `contact_history`. Each dataset has its terms, its `contacts`, its
            `delta`, the declared number of `records` or None, and the number of `partitions`. At
            its `delta` it has the `headline` (text), `proven_epsilon` and `remaining` (None for
            infinity). `spends` has one row per partition and event, at most 1000 of `rows`.
            `charges` and `unfinished` are the numbers of all spends and of those that did not
            commit. `runs` lists the latest 1000 runs that spent, with user, host and version.
            `open` has at most 1000 spends that did not commit (running, failed or killed) and count
            in full. `holds` count in no number.
        """
        # Everything is read in one transaction, so that rows, numbers and head belong together.
        with self._transaction("DEFERRED") as db:
            head = self._store.last()
            history = contacts.rows(db)
            accounts = [
                (
                    dataset,
                    reports.entry(db, dataset, delta),
                    self._spends.compositions(db, dataset, None),
                )
                for dataset in datasets(db)
            ]
        # Outside the transaction, because PLDs are slow.
        entries = []
        for dataset, entry, compositions in accounts:
            entry |= contacts.current(history, dataset.name)
            at_delta = entry["delta"]
            # Whatever the proven part is, the whole has no bound.
            if entry.pop("unproven"):
                entry["headline"] = "inf (empirical only)"
            else:
                epsilon = largest_epsilon(dataset, compositions, at_delta)
                entry["headline"] = up(epsilon)
            proven_parts = [proven(counts) for counts in compositions]
            proven_epsilon = largest_epsilon(dataset, proven_parts, at_delta)
            entry["proven_epsilon"] = finite(proven_epsilon)
            entry["remaining"] = finite(remaining_epsilon(dataset, compositions))
            entries.append(entry)
        return {
            "path": self._path,
            "schema_version": SCHEMA_VERSION,
            "head": dataclasses.asdict(head),
            "contacts": len(history),
            "datasets": entries,
        }

    def report_text(self, *, delta: float = 1e-5, timezone: datetime.tzinfo = datetime.UTC) -> str:
        """Returns `report` as text, with times in a time zone.

        Datasets with equal accounts are shown once.
        """
        return report_text.text(self.report(delta=delta), timezone)

    def history(self, name: str | None = None) -> list[dict[str, Any]]:
        """Returns every spend of one dataset or of all, the oldest first.

        Returns:
            Rows with "spend" (its number), "dataset", "partition", "event" (as `describe` writes
            it), "label", "status", "reserved_at", "finished_at" (UTC), "who", "host", "run",
            "version", "token" and "link".
        """
        with self._transaction("DEFERRED") as db:
            return reports.history(db, None if name is None else dataset_of(db, name))

    def by_day(
        self, name: str, *, delta: float | None = None, timezone: datetime.tzinfo = datetime.UTC
    ) -> list[dict[str, Any]]:
        """Returns the growth of epsilon, one row for each day that had spends on a dataset.

        Days are those of a time zone.

        Returns:
            Rows with "day" (ISO), "dataset", "spends" (of that day), "epsilon" (of everything until
            its end) and "delta". By default it is the registered one.
        """
        dataset, rows = self._spent(name)
        return reports.by_day(rows, dataset, _delta_for(dataset, delta), timezone)

    def growth(
        self, name: str, *, delta: float | None = None, points: int = 40
    ) -> list[dict[str, Any]]:
        """Returns the growth of epsilon in at most `points` rows.

        A row stands for one spend, or for equally many spends.

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
        dataset, rows = self._spent(name)
        return reports.growth(rows, dataset, _delta_for(dataset, delta), points)

    def _spent(self, name: str) -> tuple[Dataset, list[sqlite3.Row]]:
        """Returns a dataset and its spends. Epsilon of them is computed after the transaction."""
        with self._transaction("DEFERRED") as db:
            dataset = dataset_of(db, name)
            return dataset, reports.spent(db, dataset)

    # --- The file --------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The position of the ledger's last spend.

        A copy kept elsewhere shows later whether history was lost.
        """
        return self._store.head

    @property
    def has_head(self) -> bool:
        """Whether the file's head lies beside it.

        Without a head, missing last spends cannot be detected.
        """
        return self._store.has_head

    def contains(self, head: Head) -> bool | None:
        """Returns whether the ledger's history contains `head`.

        It returns None if `head` is of another ledger or branch.
        """
        return self._store.contains(head)

    def damaged(self, what: str) -> LedgerDamaged:
        """Returns the error for a ledger that must not be used.

        It is for a caller that knows from elsewhere what the ledger lacks.
        """
        return damaged(self._path, what)

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the ledger durably to a new file, with its head. Others may spend meanwhile.

        Raises:
            ValueError: There is such a file already, or no such directory.
            OSError: The copy cannot be written.
        """
        self._store.backup(path)


def check_text(key: str, value: object) -> None:
    """Raises ValueError for a value that is neither None nor a non-empty string."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{key} must be a non-empty string or None, got {value!r}.")


def _delta_for(dataset: Dataset, delta: float | None) -> float:
    delta = dataset.delta if delta is None else delta
    if delta is None:
        raise ValueError(
            f"delta is needed: dataset {dataset.name!r} has none registered. Give one."
        )
    check_delta(delta)
    return delta
