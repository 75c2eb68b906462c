"""The cost of a stream of private updates.

Disjoint batches compose in parallel, and visits of one unit sequentially.

    ledger.register("ward 3", adjacency="replace_one", unit="patient", epsilon=8.0, delta=1e-6)
    account = StreamAccount(ledger.account("ward 3"), event=method.event)
    with account.spend(batch.units, release=adapter.release_name(state)):
        state, logits = adapter.step(state, batch.images)  # touch the batch here only

With correlated noise the release is a period, and every reset begins one. So the number of a batch
does not name the period, and a period under two names is charged too little.

The epsilon of a method counts one visit. One photograph under 15 corruptions makes 15 visits. A
noise multiplier of 0.619 gives epsilon 20 at delta 1e-6 for a sample, and 137 for a photograph.
`epsilons` returns both.
"""

import contextlib
import dataclasses
import itertools
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp.data import identifiers
from jaxdp.files import check_choice
from jaxdp.privacy import Account, Head, Ledger
from jaxdp.privacy.accounting import Adjacency, epsilon
from jaxdp.privacy.events import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    composition,
)
from jaxdp.release import OwnProcess
from jaxdp.tta.streams import Batch, Stream, Unit

Units = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Sum:
    """A noisy sum that batches of a stream enter."""

    # Its name among the releases that a unit visits.
    release: Hashable
    # The units of the records of each batch in it.
    batches: tuple[Units, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass
class Visits:
    """The visits that a `StreamAccount` has counted. They reveal which unit is in which batch.

    Attributes:
        counts: {unit: {release: number of the unit's records in it}}. Units are identifiers
            (`jaxdp.data.ids`).
        lengths: {release: number of batches in it}, for the releases of `serve`.
        tokens: {token of a batch that the till released: the release that it entered}.
        unfinished: {name of a state in the middle of an update: the sum that it holds}.
        run: The workdir whose notes hold all of these visits. None means that they live in memory
            only.
        charged: The charged data set, and the head of its ledger after the last charge.
    """

    counts: dict[Hashable, dict[Hashable, int]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    lengths: dict[Hashable, int] = dataclasses.field(default_factory=dict, repr=False)
    tokens: dict[str, Hashable] = dataclasses.field(default_factory=dict, repr=False)
    unfinished: dict[str, Sum] = dataclasses.field(default_factory=dict, repr=False)
    run: str | None = None
    charged: tuple[str, Head] | None = None

    def copy(self) -> "Visits":
        """Returns a copy that does not change with this one."""
        return Visits(
            counts={unit: dict(releases) for unit, releases in self.counts.items()},
            lengths=dict(self.lengths),
            tokens=dict(self.tokens),
            unfinished=dict(self.unfinished),
            run=self.run,
            charged=self.charged,
        )

    def under_way(self, state: str) -> Sum | None:
        """Returns the sum that an unfinished state holds.

        It is None if the sum was not charged here, or has grown since.
        """
        held = self.unfinished.get(state)
        if held is None or self.lengths[held.release] != len(held.batches):
            return None
        return held


class StreamAccount:
    """An account that charges a ledger exactly for the updates of a stream.

    Unit ids stay in this object. They reach neither the ledger nor messages. Threads may share an
    account. A forked process may not use it, because two copies would not know of the visits of
    each other.

    Ids are identifiers as `jaxdp.data.ids` defines them: text that is compared as bytes after
    Unicode NFC, without outer blanks. So 1 and "1" are one unit, "007" and "7" are two, and
    floating point is refused.

    Args:
        account: `ledger.account(name)` of a data set that is registered with "replace_one" or
            "zero_out". `spend` gets ids of its unit.
        event: One release: `GaussianDpEvent(noise_multiplier)`, or `NonPrivateDpEvent()` for no
            noise. The latter is charged once and makes epsilon infinite.
        visits: The newest `visits` of an earlier account of the same data set and event, to
            continue it. Only one account may continue them. Older visits lack later releases, and
            the ledger holds only those that raised the maximum. After a crash leave visits out:
            `serve` reads the visits of its workdir, others are paid again.
        unit: The unit that `serve` charges: "photograph" (`Batch.units`) or "sample" (a photograph,
            one corruption).

    Attributes:
        event, unit, ledger: The event and the unit as given, and the charged ledger.
        worst: max_u s_u, the number of single visits that the data set owes.

    Raises:
        ValueError: The data set is registered with "add_remove", the event or the unit is another
            one, or this ledger holds no charge for `visits`. Or "sample" is charged to a data set
            that is registered with unit="photograph".

    Formal guarantees:
        Every release t is a sum over a batch plus Gaussian noise of standard deviation sigma *
        clip_norm. Each record's contribution to the sum has norm at most clip_norm. The release
        depends on other batches only through earlier releases. Unit u owns m_t of the records of
        release t, and m_t is public. Replacing the contents of u's records ("replace_one") moves
        release t by at most 2 m_t clip_norm. Zeroing them ("zero_out") moves it by at most half as
        much. Releases with m_t = 0 are the same function of earlier releases, so they add nothing
        (McSherry 2009: parallel composition). Adaptive composition of the others (Dong, Roth, Su
        2022, arXiv:1905.02383) makes the transcript mu-GDP with

            mu = (2 / sigma) sqrt(s_u),  s_u = sum_t m_t^2

        under replace_one, and half of it under zero_out. With correlated noise a release is a
        period: C G with noise of sigma times the sensitivity of C, which m_t records of a unit move
        by at most m_t times as much as one, wherever they are in the period.

        The data set owes the largest s_u. Two records in one release cost four visits, not two,
        because their contributions may point the same way. Gaussians compose exactly. So each
        growth g of max_u s_u is charged as one Gaussian of noise multiplier sigma / sqrt(g). The
        ledger then holds Gaussians of total precision (max_u s_u) / sigma^2, which compose to the
        mu above and no more. Opposite contributions of norm clip_norm attain it. A batch that does
        not raise the maximum is charged nothing.

        `spend` charges before its body runs. The charge stays if the body fails, and adds to the
        earlier charges of the data set. A new account gains nothing from an older one. Assumptions:
        neighbours differ in the contents of a unit's records, not in when they come. The noise
        multiplier is fixed in advance, unless the data set is registered with
        accounting="renyi_filter".
    """

    def __init__(
        self,
        account: Account,
        *,
        event: DpEvent,
        visits: Visits | None = None,
        unit: Unit = "photograph",
    ):
        check_adjacency(account.adjacency, f"adjacency of dataset {account.name!r}")
        check_choice("unit", unit, Unit)
        if unit == "sample" and account.unit == "photograph":
            raise ValueError(
                f"unit must be 'photograph', got 'sample', because dataset {account.name!r} is "
                "registered with unit='photograph', and a photograph has several samples in a "
                "stream of several domains. Register a data set with unit='sample' to protect them."
            )
        self.event = _one_release(event)
        self.unit = unit
        self.ledger = account.ledger
        self._account = account
        self._adjacency = account.adjacency
        self._lock = threading.Lock()
        self._process = OwnProcess()
        self._visits = Visits() if visits is None else _identified(visits)
        self.worst = max(map(_cost, self._visits.counts.values()), default=0)
        if not self._is_charged():
            raise ValueError(
                f"visits holds {self.worst} visits of one unit, but the ledger has no such charge "
                f"on dataset {account.name!r}. Continue with the ledger that the visits were "
                "charged to, or leave visits out."
            )

    @property
    def visits(self) -> Visits:
        """A copy of all visits so far. They are private, see `Visits`."""
        self._check_process()
        with self._lock:
            return self._visits.copy()

    @contextlib.contextmanager
    def spend(self, units: Iterable[Hashable], *, release: Hashable) -> Iterator[None]:
        """Charges for one batch of a custom loop, then runs the body, which may read the batch.

        Args:
            units: The unit of each record of the batch: texts, whole numbers, or tuples of them.
            release: The name of the noisy sum that the batch enters. Batches of one sum
                (accumulation) share the name. A new noise draw needs a new name. Two sums under one
                name are charged too much, one sum under two names is charged too little.
                `Adapter.release_name` names it.

        Raises:
            BudgetExceeded: The budget does not allow the batch. The body has not run, nothing is
                charged or counted.
            ValueError: The account belongs to a workdir of `serve`, or a unit is missing.
            TypeError: A unit is no identifier. Nothing is charged.
            RuntimeError: The process was forked from the one that made the account.
        """
        self._check_process()
        with contextlib.ExitStack() as reservation:
            with self._lock:  # makes the check and the charge atomic, while bodies run in parallel
                self._count(tuple(units), release, reservation, label="test-time adaptation")
            yield

    def _check_process(self) -> None:
        """Refuses a forked copy.

        Two accounts that continue the same visits would both call a visit the first one.
        """
        self._process.check(f"the StreamAccount of {self._account.name!r}")

    def check_run(self, run: str | None) -> None:
        """Raises ValueError if any counted visit belongs to another workdir.

        None stands for no workdir.
        """
        if self._visits.counts and self._visits.run != run:
            raise ValueError(
                "account has charged batches outside of this workdir. A process that resumes in "
                "the workdir would not know them, although they made its batches cheaper. Make "
                "one StreamAccount for each workdir, or serve one longer stream in one workdir."
            )

    def leave_unfinished(self, state: str, held: Sum) -> None:
        """Notes the sum that a state holds when `serve` ends in the middle of an update.

        It drops sums that have grown.
        """
        self._check_process()
        with self._lock:
            visits = self._visits
            # A sum that another batch has entered since is not that of the unfinished state any
            # more.
            sums = {name: visits.under_way(name) for name in visits.unfinished}
            current = {name: held for name, held in sums.items() if held is not None}
            visits.unfinished = current | {state: held}

    def epsilons(self, *, delta: float) -> "Epsilons":
        """Returns `epsilons` of this account's visits so far."""
        return epsilons(self.event, visits=self.worst, delta=delta, adjacency=self._adjacency)

    def _enter(
        self, payment: "BatchPayment", reservation: contextlib.ExitStack, label: str, token: str
    ) -> tuple[Sum, Sequence[tuple[Account, DpEvent]]]:
        """Charges for a batch that enters a sum, unless its token was counted.

        Returns the new sum and the charges.
        """
        entering = payment.entering
        batches = (*entering.batches, payment.units)
        self._check_process()
        with self._lock:
            tokens = self._visits.tokens
            lengths = self._visits.lengths
            if token in tokens:
                return Sum(tokens[token], batches), []  # a repeat after a crash, bit for bit
            release = entering.release
            units = payment.units
            if lengths.get(release, len(entering.batches)) != len(entering.batches):
                # Another batch has entered the sum since. With this batch it is another sum of all
                # its records.
                release = f"{release}+{token[:16]}"
                units = tuple(itertools.chain.from_iterable(batches))
            charged = self._count(
                units, release, reservation, label=label, token=token, run=payment.run
            )
            tokens[token] = release
            lengths[release] = len(batches)
        return Sum(release, batches), charged

    def _count(
        self,
        units: Units,
        release: Hashable,
        reservation: contextlib.ExitStack,
        *,
        label: str,
        token: str | None = None,
        run: str | None = None,
    ) -> list[tuple[Account, DpEvent]]:
        """Charges for one more batch of a release, counts its visits, and returns the charges."""
        self.check_run(run)
        units = tuple(identifiers(units, "units"))
        after = {unit: dict(self._visits.counts.get(unit, {})) for unit in units}
        for unit, count in Counter(units).items():
            after[unit][release] = after[unit].get(release, 0) + count
        worst = max([self.worst, *map(_cost, after.values())])
        charged = []
        # Without noise one charge is all.
        if worst > self.worst and (isinstance(self.event, GaussianDpEvent) or self.worst == 0):
            charge = _composed(self.event, worst - self.worst)
            # A token is free the second time. That is right only for visits of one workdir: others
            # count afresh.
            if run is None:
                token = None
            reservation.enter_context(self._account.spend(charge, label=label, token=token))
            charged.append((self._account, charge))
            self._visits.charged = self._account.name, self.ledger.head
        # Only now: a refused charge raises above and counts no visit.
        self._visits.counts.update(after)
        self._visits.run = run
        self.worst = worst
        return charged

    def _is_charged(self) -> bool:
        """Returns whether this data set of this ledger was charged for the visits."""
        charged = self._visits.charged  # None in visits of earlier versions
        if charged is not None:
            name, head = charged
            # Other releases about the data set may have cost as much.
            if name != self._account.name or not self.ledger.contains(head):
                return False
        spent = composition(self.ledger.events(self._account.name).get(None, NoOpDpEvent()))
        if self.worst == 0 or NonPrivateDpEvent() in spent:
            return True
        if not isinstance(self.event, GaussianDpEvent):
            return False
        # The precisions 1 / sigma^2 of composed Gaussians add up.
        precisions = [
            count / event.noise_multiplier**2
            for event, count in spent.items()
            if isinstance(event, GaussianDpEvent)
        ]
        visits = math.fsum(precisions) * self.event.noise_multiplier**2
        return visits >= self.worst * (1 - 1e-9)  # up to rounding


@dataclasses.dataclass
class BatchPayment:
    """The payment of one batch of a stream, for a release of the till."""

    account: StreamAccount
    # The unit of each record of the batch.
    units: Units
    # The noisy sum before the batch enters it.
    entering: Sum
    # The workdir in whose notes the visits are.
    run: str | None = None
    # The noisy sum with the batch in it, set by `reserve`.
    entered: Sum = dataclasses.field(init=False)

    @contextlib.contextmanager
    def reserve(self, *, label: str, token: str) -> Iterator[Sequence[tuple[Account, DpEvent]]]:
        """Charges the batch, unless the token was counted, and yields the charges.

        Raises the errors of `spend`.
        """
        with contextlib.ExitStack() as reservation:
            self.entered, charged = self.account._enter(self, reservation, label, token)
            yield charged


def event(
    release: DpEvent,
    stream: Iterable[Batch],
    *,
    unit: Unit = "photograph",
    accumulate: int = 1,
    updates: int = 1,
    reset_every: int | None = None,
) -> DpEvent:
    """Returns the total charge of `serve` for a stream from a new state, for a budget or a hold.

        with account.hold(tta.event(method.event, stream)) as hold:
            serve(adapter, stream, account=StreamAccount(hold.account(account), event=method.event))

    Args:
        release, unit: The `event` and the `unit` of the `StreamAccount`.
        stream: A `Stream`, of which no image is read, or any iterable of `Batch`.
        accumulate: The `accumulate` of the `Adapter`.
        updates: The `updates` of the private method, more than 1 for correlated noise.
        reset_every: The `reset_every` of the `Adapter`. With correlated noise it begins new
            periods, as do the resets of the stream. Those of a monitor do so too, at places that
            are not known here. They may move two visits of a unit into one period, or out of it. So
            units that come back in a stream with such a monitor may owe more or less than this.
    """
    if isinstance(stream, Stream):
        arrivals: Iterable[Any] = zip(stream.visitors(unit), stream.resets, strict=True)
    else:
        arrivals = ((batch.visitors(unit), batch.reset) for batch in stream)
    with Ledger.in_memory() as ledger:
        ledger.register("stream", adjacency="replace_one", unit=unit)
        account = StreamAccount(ledger.account("stream"), event=release)
        row = 0
        begun = 0
        for number, (units, reset) in enumerate(arrivals):
            is_due = reset_every is not None and number % reset_every == 0
            if reset or is_due:
                row = 0
            if number % accumulate == 0 and row == 0:
                begun = number
            with account.spend(units, release=begun):
                pass
            if (number + 1) % accumulate == 0:
                row = (row + 1) % updates
        return ledger.events("stream").get(None, NoOpDpEvent())


class Epsilons(NamedTuple):
    """The two epsilons of a stream, to be quoted together."""

    sample: float  # of a record with one visit
    unit: float  # of the unit with the most visits


def epsilons(event: DpEvent, *, visits: int, delta: float, adjacency: Adjacency) -> Epsilons:
    """Returns the epsilon of one visit and of `visits` visits.

    Args:
        event: One release, `GaussianDpEvent(noise_multiplier)` or `NonPrivateDpEvent()`.
        visits: s = sum_t m_t^2 >= 0, where the unit has m_t records in release t.
        delta: In [0, 1).
        adjacency: "replace_one" or "zero_out".
    """
    check_adjacency(adjacency)
    if visits < 0:
        raise ValueError(f"visits must be at least 0, got {visits}.")
    release = _one_release(event)
    return Epsilons(
        sample=epsilon(release, delta=delta, adjacency=adjacency),
        unit=epsilon(_composed(release, visits), delta=delta, adjacency=adjacency),
    )


def check_adjacency(adjacency: Adjacency, field: str = "adjacency") -> None:
    """Raises ValueError for an adjacency that a stream of batches cannot satisfy."""
    if adjacency not in ("replace_one", "zero_out"):
        raise ValueError(
            f"{field} must be 'replace_one' or 'zero_out', got {adjacency!r}, which a stream of "
            "batches cannot satisfy. A removed record shifts all later records, so every later "
            "batch changes."
        )


def _composed(release: DpEvent, times: int) -> DpEvent:
    if times == 0:
        return NoOpDpEvent()
    if isinstance(release, GaussianDpEvent):
        return GaussianDpEvent(release.noise_multiplier / math.sqrt(times))  # = `times` Gaussians
    return release


def _identified(visits: Visits) -> Visits:
    """Returns a copy whose units are identifiers. Visits of units that become one add up."""
    copy = visits.copy()
    counts: dict[Hashable, Counter[Hashable]] = {}
    names = identifiers(copy.counts, "visits")
    for unit, releases in zip(names, copy.counts.values(), strict=True):
        counts.setdefault(unit, Counter()).update(releases)
    copy.counts = {unit: dict(releases) for unit, releases in counts.items()}
    return copy


def _cost(releases: Mapping[Hashable, int]) -> int:
    # k records of a unit in one sum move it by k clip norms, which costs as much as k^2 sums.
    # Different sums have independent noise, and their costs add up.
    return sum(count**2 for count in releases.values())


def _one_release(event: DpEvent) -> DpEvent:
    leaves = composition(event)
    leaf = next(iter(leaves), None)
    if sum(leaves.values()) != 1 or not isinstance(leaf, GaussianDpEvent | NonPrivateDpEvent):
        raise ValueError(f"event must be one GaussianDpEvent or NonPrivateDpEvent, got {event!r}.")
    return leaf
