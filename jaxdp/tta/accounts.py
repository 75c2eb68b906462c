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
from jaxdp.tta.streams import Batch, Stream, Unit

Units = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Sum:
    """A noisy sum of a stream under way.

    Attributes:
        release: its name among the releases that a unit visits.
        batches: the units of the records of each batch in it.
    """

    release: Hashable
    batches: tuple[Units, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class Visits:
    """What a `StreamAccount` has counted; as private as the stream's plan is.

    Attributes:
        counts: {unit: {release: number of the unit's records in it}}.
        lengths: {release: number of batches in it}, of the releases of `serve`.
        tokens: {token of a batch that the till released: the release that it entered}.
        unfinished: {name of a state in the middle of an update: the sum that it holds}.
        run: the workdir whose notes hold all of these visits; None for visits that live in memory only.
    """

    counts: Mapping[Hashable, Mapping[Hashable, int]] = dataclasses.field(default_factory=dict, repr=False)
    lengths: Mapping[Hashable, int] = dataclasses.field(default_factory=dict, repr=False)
    tokens: Mapping[str, Hashable] = dataclasses.field(default_factory=dict, repr=False)
    unfinished: Mapping[str, Sum] = dataclasses.field(default_factory=dict, repr=False)
    run: str | None = None


class StreamAccount:
    """Charges a ledger for the updates of a stream, exactly and no more than that.

    Formal guarantees. Every release t is a sum over a batch, in which each record's contribution has norm at most
    clip_norm, plus Gaussian noise of standard deviation sigma * clip_norm, and depends on other batches only through
    earlier releases. Let unit u own m_t of the records of release t, according to a public plan. Replacing what u's
    records hold ("replace_one") moves release t by at most 2 m_t clip_norm; zeroing them ("zero_out"), by half as
    much. Releases with m_t = 0 are the same function of earlier releases, so they add nothing (McSherry 2009: parallel
    composition). Adaptive composition of the others (Dong, Roth, Su 2022, arXiv:1905.02383) makes the transcript

        mu-GDP with mu = (2 / sigma) sqrt(s_u),  s_u = sum_t m_t^2     (replace_one; half of it under zero_out),

    and the data set owes the largest s_u. Two records in one release cost four visits, not two, because their
    contributions may point the same way. Gaussians compose exactly, so each growth g of max_u s_u is charged as one
    Gaussian of noise multiplier sigma / sqrt(g): the ledger then holds Gaussians of total precision
    (max_u s_u) / sigma^2, which compose to the mu above and no more. It is attained by opposite contributions of norm
    clip_norm. A batch that does not raise the maximum is charged nothing.

    Charges precede the bodies of `spend`, stay if a body fails, and come on top of whatever the data set has spent
    before; a fresh account on it never gains from an older one. Threads may share an account. What is assumed: the plan
    is public, so neighbours differ in what a unit's records hold, not in when they come, and the noise multiplier is
    fixed in advance (unless the data set is registered with accounting="renyi_filter").

    Ids of units stay in this object: they reach neither the ledger nor messages. `visits` says who came when.

    Args:
        account: `ledger.account(name)` of a data set that is registered with "replace_one" or "zero_out". Its unit is
            what `spend` is given.
        event: one release, `GaussianDpEvent(noise_multiplier)`, or `NonPrivateDpEvent()` (also: no noise), which is
            charged once and makes epsilon infinite.
        visits: the attribute `visits` of an earlier account of the same data set and event, to continue it: as it was
            last, and in one account only. Releases made after they were copied would be forgotten, since those that
            did not raise the maximum are not in the ledger either. After a crash leave visits out: `serve` reads those
            of its workdir, and what lived in memory is paid again.

    Raises:
        ValueError: data set registered with "add_remove"; another event; `visits` for which this ledger holds no
            charge.
    """

    def __init__(self, account: Account, *, event: DpEvent, visits: Visits | None = None):
        if account.adjacency == "add_remove":
            raise ValueError(
                f"dataset {account.name!r} is registered with adjacency 'add_remove', which a stream of batches cannot "
                "satisfy: removing a record shifts all later ones across batch boundaries, so every later batch "
                "changes. Register it with adjacency='replace_one' or 'zero_out'"
            )
        visits = Visits() if visits is None else visits
        self._account = account
        self._adjacency: Adjacency = account.adjacency
        self._event = _one_release(event)
        self._lock = threading.Lock()
        self._counts = {unit: dict(releases) for unit, releases in visits.counts.items()}
        self._lengths, self._tokens = dict(visits.lengths), dict(visits.tokens)
        self._unfinished, self._run = dict(visits.unfinished), visits.run
        self._worst = max(map(_cost, self._counts.values()), default=0)
        if not self._is_charged():
            raise ValueError(
                f"visits holds {self._worst} visits of one unit, but the ledger has no such charge on dataset "
                f"{account.name!r}: continue with the ledger that the visits were charged to, or leave visits out"
            )

    @property
    def event(self) -> DpEvent:
        """The event of one release."""
        return self._event

    @property
    def worst(self) -> int:
        """max_u s_u, the number of single visits that the data set owes."""
        return self._worst

    @property
    def visits(self) -> Visits:
        """All that was counted; private, see `Visits`."""
        with self._lock:
            counts = {unit: dict(releases) for unit, releases in self._counts.items()}
            return Visits(counts, dict(self._lengths), dict(self._tokens), dict(self._unfinished), self._run)

    @contextlib.contextmanager
    def spend(self, units: Iterable[Hashable], *, release: Hashable) -> Iterator[None]:
        """Charges for one batch of a loop of one's own, then runs the body, which may touch the batch.

        Args:
            units: for each record of the batch, its unit.
            release: identity of the noisy sum that the batch enters. Batches that share one sum (accumulation) share
                it; noise that is drawn anew is another release. One name for two sums charges too much, two names for
                one sum too little.

        Raises:
            BudgetExceeded: before the body runs; nothing is charged, and the account stays as it was.
            ValueError: the account belongs to a workdir of `serve`.
        """
        with contextlib.ExitStack() as reservation:
            with self._lock:  # between looking and charging nobody else may come, but bodies run side by side
                self._count(tuple(units), release, reservation, label="test-time adaptation")
            yield

    def batch(self, units: Iterable[Hashable], *, entering: Sum, run: str | None = None) -> "BatchPayment":
        """Returns the payment of one batch, for a release of the till.

        Args:
            units: for each record of the batch, its unit.
            entering: the noisy sum that the batch enters, as it is before it.
            run: the workdir in whose notes the visits are; None for none.
        """
        return BatchPayment(self, tuple(units), entering, run)

    def charged(self, release: Hashable) -> bool:
        """Whether records have been charged for this release."""
        return any(release in releases for releases in self._counts.values())

    def check_run(self, run: str | None) -> None:
        """Raises ValueError if anything was counted that is not of this workdir; None is no workdir."""
        with self._lock:
            self._check_run(run)

    def unfinished(self, state: str) -> Sum | None:
        """The sum that a state in the middle of an update holds, if this account charged it and it has not gone on."""
        with self._lock:
            held = self._unfinished.get(state)
            return held if held is not None and self._lengths[held.release] == len(held.batches) else None

    def leave_unfinished(self, state: str, held: Sum) -> None:
        """Notes what a state holds that leaves `serve` in the middle of an update; forgets states that have gone on."""
        with self._lock:
            newest = {n: s for n, s in self._unfinished.items() if self._lengths[s.release] == len(s.batches)}
            self._unfinished = newest | {state: held}

    def epsilons(self, *, delta: float) -> "Epsilons":
        """Returns `epsilons` of this account's visits so far."""
        return epsilons(self._event, visits=self._worst, delta=delta, adjacency=self._adjacency)

    def describe(self, *, delta: float) -> str:
        """Returns both figures in one line, with delta and adjacency: what to print beside a result."""
        sample, unit = self.epsilons(delta=delta)
        return (
            f"epsilon {sample:.4g} for a record visited once, {unit:.4g} for the unit visited most "
            f"(sum of squares {self._worst}), at delta {delta:g} under {self._adjacency}"
        )

    def _enter(
        self, payment: "BatchPayment", reservation: contextlib.ExitStack, label: str, token: str
    ) -> tuple[Sum, Sequence[tuple[Account, DpEvent]]]:
        """Charges for a batch that enters a sum, unless its token was counted; returns the sum with it in it."""
        entering, charged = payment.entering, []
        batches = (*entering.batches, payment.units)
        with self._lock:
            release = self._tokens.get(token)
            if release is None:
                release, units = entering.release, payment.units
                if self._lengths.get(release, len(entering.batches)) != len(entering.batches):
                    # The sum went on with another batch. Going on with this one makes another sum of all its records.
                    release, units = f"{release}+{token[:16]}", tuple(unit for batch in batches for unit in batch)
                charged = self._count(units, release, reservation, label=label, token=token, run=payment.run)
                self._tokens[token], self._lengths[release] = release, len(batches)
        return Sum(release, batches), charged

    def _check_run(self, run: str | None) -> None:
        if self._counts and self._run != run:
            raise ValueError(
                "account has charged batches that are not of this workdir. A process that goes on in a workdir would "
                "forget those, although charges of the one made the others cheaper: make a StreamAccount for each "
                "workdir and use it there only, or serve one longer stream in one workdir"
            )

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
        self._check_run(run)
        after = {}
        for unit, count in Counter(units).items():
            releases = self._counts.get(unit, {})
            after[unit] = {**releases, release: releases.get(release, 0) + count}
        worst = max(self._worst, *map(_cost, after.values())) if after else self._worst
        charge = self._charge(worst - self._worst)
        if charge is not None:
            # A token is free a second time. That is right among the visits of one workdir only: others count afresh.
            token = token if run is not None else None
            reservation.enter_context(self._account.spend(charge, label=label, token=token))
        self._counts.update(after)
        self._worst, self._run = worst, run
        return [] if charge is None else [(self._account, charge)]

    @property
    def ledger(self) -> Ledger:
        """The ledger that is charged."""
        return self._account.ledger

    def _charge(self, growth: int) -> DpEvent | None:
        if growth == 0:
            return None
        if isinstance(self._event, GaussianDpEvent):
            return GaussianDpEvent(self._event.noise_multiplier / math.sqrt(growth))
        return self._event if self._worst == 0 else None

    def _is_charged(self) -> bool:
        if self._worst == 0:
            return True
        spent = composition(self._account.ledger.events(self._account.name).get(None, NoOpDpEvent()))
        if NonPrivateDpEvent() in spent:
            return True
        if not isinstance(self._event, GaussianDpEvent):
            return False
        precision = math.fsum(n / e.noise_multiplier**2 for e, n in spent.items() if isinstance(e, GaussianDpEvent))
        return precision * self._event.noise_multiplier**2 >= self._worst * (1 - 1e-9)


class BatchPayment:
    """The payment of one batch of a stream; `StreamAccount.batch` makes it.

    Attributes:
        entered: the noisy sum with the batch in it, once it is reserved.
    """

    entered: Sum

    def __init__(self, account: StreamAccount, units: Units, entering: Sum, run: str | None):
        self.units, self.entering, self.run = units, entering, run
        self._account = account

    @contextlib.contextmanager
    def reserve(self, *, label: str, token: str) -> Iterator[Sequence[tuple[Account, DpEvent]]]:
        """Charges the batch and yields what it charged; nothing, if the token was counted already.

        Raises:
            BudgetExceeded, ValueError: as `StreamAccount.spend`.
        """
        with contextlib.ExitStack() as reservation:
            self.entered, charged = self._account._enter(self, reservation, label, token)
            yield charged


def stream_event(event: DpEvent, stream: Iterable[Batch], *, unit: Unit = "photograph", accumulate: int = 1) -> DpEvent:
    """Returns what `serve` charges in all for a stream that it serves from a new state, for a plan or a hold.

        with account.hold(stream_event(method.event, stream)) as hold:
            serve(adapter, stream, account=StreamAccount(hold.account(account), event=method.event))

    Args:
        event: one release, as in `StreamAccount`.
        stream: a `Stream`, of which no image is read, or any iterable of `Batch`.
        unit: whom the account protects, as in `serve`.
        accumulate: of the `Adapter`.
    """
    visitors = stream.visitors(unit) if isinstance(stream, Stream) else (batch.visitors(unit) for batch in stream)
    with Ledger.in_memory() as ledger:
        ledger.register("stream", adjacency="replace_one", unit=unit)
        account = StreamAccount(ledger.account("stream"), event=event)
        for number, units in enumerate(visitors):
            with account.spend(units, release=number // accumulate):
                pass
        return ledger.events("stream").get(None, NoOpDpEvent())


class Epsilons(NamedTuple):
    """The two figures of a stream, to be quoted together.

    Attributes:
        sample: epsilon of a record that is visited once.
        unit: epsilon of the unit that is visited most.
    """

    sample: float
    unit: float


def epsilons(event: DpEvent, *, visits: int, delta: float, adjacency: Adjacency) -> Epsilons:
    """Returns epsilon for one visit and for `visits` of them, of the release `event`.

    Args:
        event: one release, `GaussianDpEvent(noise_multiplier)` or `NonPrivateDpEvent()`.
        visits: s = sum_t m_t^2 >= 0 of the unit, m_t being the number of its records in release t.
        delta: in [0, 1).
        adjacency: "replace_one" or "zero_out".

    Raises:
        ValueError: for other values.
    """
    if adjacency == "add_remove":
        raise ValueError("adjacency 'add_remove' does not fit a stream of batches; use 'replace_one' or 'zero_out'")
    if visits < 0:
        raise ValueError(f"visits must be at least 0, got {visits}")
    event = _one_release(event)

    def at(times: int) -> float:
        if isinstance(event, GaussianDpEvent) and times > 0:
            return epsilon(GaussianDpEvent(event.noise_multiplier / math.sqrt(times)), delta=delta, adjacency=adjacency)
        return math.inf if times > 0 else 0.0

    return Epsilons(at(1), at(visits))


def _cost(releases: Mapping[Hashable, int]) -> int:
    return sum(count**2 for count in releases.values())


def _one_release(event: DpEvent) -> DpEvent:
    """Returns the canonical form of an event that is one Gaussian or nothing private."""
    leaves = composition(event)
    leaf = next(iter(leaves), None)
    if sum(leaves.values()) != 1 or not isinstance(leaf, GaussianDpEvent | NonPrivateDpEvent):
        raise ValueError(f"event must be one GaussianDpEvent or NonPrivateDpEvent, got {event!r}")
    return leaf
