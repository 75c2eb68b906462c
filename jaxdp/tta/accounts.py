"""What a stream of private updates costs: parallel over disjoint batches, sequential where a unit comes back.

    ledger.register("ward 3", adjacency="replace_one", unit="patient", epsilon=8.0, delta=1e-6)
    account = StreamAccount(ledger.account("ward 3"), event=method.event)
    with account.spend(batch.units, release=step // adapter.accumulate):
        ...  # touch the batch here

The epsilon that is quoted for a method counts one visit. The same photograph under 15 corruptions is 15 visits: a noise
multiplier of 0.619 gives epsilon 20 at delta 1e-6 for a sample, and 137 for a photograph. `epsilons` returns both.
"""

import contextlib
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxdp.privacy import Account, Ledger
from jaxdp.privacy.accounting import Adjacency, epsilon
from jaxdp.privacy.events import DpEvent, GaussianDpEvent, NonPrivateDpEvent, NoOpDpEvent, composition
from jaxdp.tta.method import check_name
from jaxdp.tta.streams import Batch, Stream, Unit

Units = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Sum:
    """A noisy sum of a stream under way."""

    release: Hashable  # its name among the releases that a unit visits
    batches: tuple[Units, ...] = dataclasses.field(default=(), repr=False)  # units of the records of each batch in it


@dataclasses.dataclass
class Visits:
    """What a `StreamAccount` has counted; as private as it is who comes in which batch.

    Attributes:
        counts: {unit: {release: number of the unit's records in it}}.
        lengths: {release: number of batches in it}, of the releases of `serve`.
        tokens: {token of a batch that the till released: the release that it entered}.
        unfinished: {name of a state in the middle of an update: the sum that it holds}.
        run: the workdir whose notes hold all of these visits; None for visits that live in memory only.
    """

    counts: dict[Hashable, dict[Hashable, int]] = dataclasses.field(default_factory=dict, repr=False)
    lengths: dict[Hashable, int] = dataclasses.field(default_factory=dict, repr=False)
    tokens: dict[str, Hashable] = dataclasses.field(default_factory=dict, repr=False)
    unfinished: dict[str, Sum] = dataclasses.field(default_factory=dict, repr=False)
    run: str | None = None

    def copy(self) -> "Visits":
        """Returns a copy that does not change with this one."""
        counts = {unit: dict(releases) for unit, releases in self.counts.items()}
        return Visits(counts, dict(self.lengths), dict(self.tokens), dict(self.unfinished), self.run)

    def under_way(self, state: str) -> Sum | None:
        """The sum that a state in the middle of an update holds, if it was charged here and has not gone on."""
        held = self.unfinished.get(state)
        return held if held is not None and self.lengths[held.release] == len(held.batches) else None


class StreamAccount:
    """Charges a ledger for the updates of a stream, exactly and no more than that.

    Formal guarantees. Every release t is a sum over a batch, in which each record's contribution has norm at most
    clip_norm, plus Gaussian noise of standard deviation sigma * clip_norm, and depends on other batches only through
    earlier releases. Let unit u own m_t of the records of release t, a public number. Replacing what u's records hold
    ("replace_one") moves release t by at most 2 m_t clip_norm; zeroing them ("zero_out"), by half as much. Releases
    with m_t = 0 are the same function of earlier releases, so they add nothing (McSherry 2009: parallel composition).
    Adaptive composition of the others (Dong, Roth, Su 2022, arXiv:1905.02383) makes the transcript

        mu-GDP with mu = (2 / sigma) sqrt(s_u),  s_u = sum_t m_t^2     (replace_one; half of it under zero_out),

    and the data set owes the largest s_u. Two records in one release cost four visits, not two, because their
    contributions may point the same way. Gaussians compose exactly, so each growth g of max_u s_u is charged as one
    Gaussian of noise multiplier sigma / sqrt(g): the ledger then holds Gaussians of total precision
    (max_u s_u) / sigma^2, which compose to the mu above and no more. Opposite contributions of norm clip_norm attain
    it. A batch that does not raise the maximum is charged nothing.

    Charges precede the bodies of `spend`, stay if a body fails, and add to what the data set has spent before; a fresh
    account on it never gains from an older one. Threads may share an account. Assumptions: neighbours differ in what a
    unit's records hold, not in when they come, and the noise multiplier is fixed in advance (unless the data set is
    registered with accounting="renyi_filter").

    Ids of units stay in this object: they reach neither the ledger nor messages. `visits` says who came when.

    Args:
        account: `ledger.account(name)` of a data set that is registered with "replace_one" or "zero_out". Its unit is
            what `spend` is given.
        event: one release, `GaussianDpEvent(noise_multiplier)`, or `NonPrivateDpEvent()` (also: no noise), which is
            charged once and makes epsilon infinite.
        visits: the attribute `visits` of an earlier account of the same data set and event, to continue it: as it was
            last, and in one account only. Later releases would be forgotten: those that did not raise the maximum are
            not in the ledger. After a crash leave visits out: `serve` reads those of its workdir, and what lived in
            memory is paid again.
        unit: whom `serve` charges for: "photograph", `Batch.units`, or "sample", a photograph under one corruption.

    Attributes:
        event, unit: as given; ledger: what is charged.
        worst: max_u s_u, the number of single visits that the data set owes.

    Raises:
        ValueError: data set registered with "add_remove"; another event; `visits` for which this ledger holds no
            charge; an unknown unit.
    """

    def __init__(self, account: Account, *, event: DpEvent, visits: Visits | None = None, unit: Unit = "photograph"):
        check_adjacency(account.adjacency, f"adjacency of dataset {account.name!r}")
        check_name("unit", unit, Unit)
        self.event, self.unit, self.ledger = _one_release(event), unit, account.ledger
        self._account, self._adjacency = account, account.adjacency
        self._lock = threading.Lock()
        self._visits = Visits() if visits is None else visits.copy()
        self.worst = max(map(_cost, self._visits.counts.values()), default=0)
        if not self._is_charged():
            raise ValueError(
                f"visits holds {self.worst} visits of one unit, but the ledger has no such charge on dataset "
                f"{account.name!r}: continue with the ledger that the visits were charged to, or leave visits out"
            )

    @property
    def visits(self) -> Visits:
        """A copy of all that was counted; private, see `Visits`."""
        with self._lock:
            return self._visits.copy()

    @contextlib.contextmanager
    def spend(self, units: Iterable[Hashable], *, release: Hashable) -> Iterator[None]:
        """Charges for one batch of a loop of one's own, then runs the body, which may touch the batch.

        Args:
            units: for each record of the batch, its unit.
            release: identity of the noisy sum that the batch enters. Batches that share one sum (accumulation) share
                it; noise that is drawn anew is another release. One name for two sums charges too much, two names for
                one sum too little.

        Raises:
            BudgetExceeded: before the body runs; nothing is charged or counted.
            ValueError: the account belongs to a workdir of `serve`.
        """
        with contextlib.ExitStack() as reservation:
            with self._lock:  # between looking and charging nobody else may come, but bodies run side by side
                self._count(tuple(units), release, reservation, label="test-time adaptation")
            yield

    def check_run(self, run: str | None) -> None:
        """Raises ValueError if anything was counted that is not of this workdir; None is no workdir."""
        if self._visits.counts and self._visits.run != run:
            raise ValueError(
                "account has charged batches that are not of this workdir. A process that goes on in a workdir would "
                "forget those, although charges of the one made the others cheaper: make a StreamAccount for each "
                "workdir and use it there only, or serve one longer stream in one workdir"
            )

    def leave_unfinished(self, state: str, held: Sum) -> None:
        """Notes what a state holds that leaves `serve` in the middle of an update; forgets states that have gone on."""
        with self._lock:
            here = self._visits
            here.unfinished = {name: sum_ for name in here.unfinished if (sum_ := here.under_way(name))} | {state: held}

    def epsilons(self, *, delta: float) -> "Epsilons":
        """Returns `epsilons` of this account's visits so far."""
        return epsilons(self.event, visits=self.worst, delta=delta, adjacency=self._adjacency)

    def _enter(
        self, payment: "BatchPayment", reservation: contextlib.ExitStack, label: str, token: str
    ) -> tuple[Sum, Sequence[tuple[Account, DpEvent]]]:
        """Charges for a batch that enters a sum, unless its token was counted; returns the sum with it in it."""
        entering, charged = payment.entering, []
        batches = (*entering.batches, payment.units)
        with self._lock:
            tokens, lengths = self._visits.tokens, self._visits.lengths
            release = tokens.get(token)
            if release is None:
                release, units = entering.release, payment.units
                if lengths.get(release, len(entering.batches)) != len(entering.batches):
                    # The sum went on with another batch. Going on with this one makes another sum of all its records.
                    release, units = f"{release}+{token[:16]}", tuple(unit for batch in batches for unit in batch)
                charged = self._count(units, release, reservation, label=label, token=token, run=payment.run)
                tokens[token], lengths[release] = release, len(batches)
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
        """Charges for one more batch of a release, counts its visits and returns what it charged."""
        self.check_run(run)
        after = {unit: dict(self._visits.counts.get(unit, {})) for unit in units}
        for unit, count in Counter(units).items():
            after[unit][release] = after[unit].get(release, 0) + count
        worst = max([self.worst, *map(_cost, after.values())])
        charged = []
        # Without noise one charge is all.
        if worst > self.worst and (isinstance(self.event, GaussianDpEvent) or self.worst == 0):
            charge = _composed(self.event, worst - self.worst)
            # A token is free a second time. That is right among the visits of one workdir only: others count afresh.
            token = token if run is not None else None
            reservation.enter_context(self._account.spend(charge, label=label, token=token))
            charged.append((self._account, charge))
        self._visits.counts.update(after)
        self.worst, self._visits.run = worst, run
        return charged

    def _is_charged(self) -> bool:
        spent = composition(self.ledger.events(self._account.name).get(None, NoOpDpEvent()))
        if self.worst == 0 or NonPrivateDpEvent() in spent:
            return True
        if not isinstance(self.event, GaussianDpEvent):
            return False
        precision = math.fsum(n / e.noise_multiplier**2 for e, n in spent.items() if isinstance(e, GaussianDpEvent))
        return precision * self.event.noise_multiplier**2 >= self.worst * (1 - 1e-9)


@dataclasses.dataclass
class BatchPayment:
    """The payment of one batch of a stream, for a release of the till."""

    account: StreamAccount
    units: Units  # of each record of the batch
    entering: Sum  # the noisy sum that the batch enters, as it is before it
    run: str | None = None  # the workdir in whose notes the visits are
    entered: Sum = dataclasses.field(init=False)  # the noisy sum with the batch in it, once it is reserved

    @contextlib.contextmanager
    def reserve(self, *, label: str, token: str) -> Iterator[Sequence[tuple[Account, DpEvent]]]:
        """Charges the batch, unless the token was counted, and yields what it charged; errors as `spend`."""
        with contextlib.ExitStack() as reservation:
            self.entered, charged = self.account._enter(self, reservation, label, token)
            yield charged


def event(release: DpEvent, stream: Iterable[Batch], *, unit: Unit = "photograph", accumulate: int = 1) -> DpEvent:
    """Returns what `serve` charges in all for a stream that it serves from a new state, for a budget or a hold.

        with account.hold(tta.event(method.event, stream)) as hold:
            serve(adapter, stream, account=StreamAccount(hold.account(account), event=method.event))

    Args:
        release, unit: `event` and `unit` of the `StreamAccount`.
        stream: a `Stream`, of which no image is read, or any iterable of `Batch`.
        accumulate: of the `Adapter`.
    """
    visitors = stream.visitors(unit) if isinstance(stream, Stream) else (batch.visitors(unit) for batch in stream)
    with Ledger.in_memory() as ledger:
        ledger.register("stream", adjacency="replace_one", unit=unit)
        account = StreamAccount(ledger.account("stream"), event=release)
        for number, units in enumerate(visitors):
            with account.spend(units, release=number // accumulate):
                pass
        return ledger.events("stream").get(None, NoOpDpEvent())


class Epsilons(NamedTuple):
    """The two figures of a stream, to be quoted together."""

    sample: float  # of a record that is visited once
    unit: float  # of the unit that is visited most


def epsilons(event: DpEvent, *, visits: int, delta: float, adjacency: Adjacency) -> Epsilons:
    """Returns epsilon for one visit and for `visits` of them; ValueError for arguments out of range.

    Args:
        event: one release, `GaussianDpEvent(noise_multiplier)` or `NonPrivateDpEvent()`.
        visits: s = sum_t m_t^2 >= 0 of the unit, m_t being the number of its records in release t.
        delta: in [0, 1).
        adjacency: "replace_one" or "zero_out".
    """
    check_adjacency(adjacency)
    if visits < 0:
        raise ValueError(f"visits must be at least 0, got {visits}")
    once = _one_release(event)
    of = [epsilon(_composed(once, times), delta=delta, adjacency=adjacency) for times in (1, visits)]
    return Epsilons(*of)


def check_adjacency(adjacency: Adjacency, field: str = "adjacency") -> None:
    """Raises ValueError for an adjacency that does not fit a stream of batches."""
    if adjacency not in ("replace_one", "zero_out"):
        raise ValueError(
            f"{field} must be 'replace_one' or 'zero_out', got {adjacency!r}, which a stream of batches cannot "
            "satisfy: removing a record shifts all later ones across batch boundaries, so every later batch changes"
        )


def _composed(release: DpEvent, times: int) -> DpEvent:
    """The event of so many visits to releases of one kind."""
    if times == 0:
        return NoOpDpEvent()
    if isinstance(release, GaussianDpEvent):
        return GaussianDpEvent(release.noise_multiplier / math.sqrt(times))
    return release


def _cost(releases: Mapping[Hashable, int]) -> int:
    return sum(count**2 for count in releases.values())


def _one_release(event: DpEvent) -> DpEvent:
    """The canonical form of an event that is one Gaussian or nothing private."""
    leaves = composition(event)
    leaf = next(iter(leaves), None)
    if sum(leaves.values()) != 1 or not isinstance(leaf, GaussianDpEvent | NonPrivateDpEvent):
        raise ValueError(f"event must be one GaussianDpEvent or NonPrivateDpEvent, got {event!r}")
    return leaf
