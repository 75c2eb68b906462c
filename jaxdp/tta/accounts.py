"""What a stream of private updates costs: parallel over disjoint batches, sequential where a unit comes back.

    ledger.register("ward 3", adjacency="replace_one", unit="patient", epsilon=8.0, delta=1e-6)
    account = StreamAccount(ledger, "ward 3", event=method.event)
    with account.spend(batch.units, release=step // adapter.accumulate):
        ...  # touch the batch here

The epsilon that is quoted for a method counts one visit. The same photograph under 15 corruptions is 15 visits: a noise
multiplier of 0.619 gives epsilon 20 at delta 1e-6 for a sample, and 137 for a photograph. `epsilons` returns both.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxdp.privacy.accounting import Adjacency, epsilon
from jaxdp.privacy.events import DpEvent, GaussianDpEvent, NonPrivateDpEvent, NoOpDpEvent, composition
from jaxdp.privacy.ledger import Ledger

Visits = Mapping[Hashable, Mapping[Hashable, int]]


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

    Ids of units stay in this object: they reach neither the ledger nor messages. `visits` says who came when; keep it
    as private as the stream's plan is.

    Args:
        ledger: where the data set is registered.
        dataset: its name; registered with "replace_one" or "zero_out", unit being what `spend` is given.
        event: one release, `GaussianDpEvent(noise_multiplier)`, or `NonPrivateDpEvent()` (also: no noise), which is
            charged once and makes epsilon infinite.
        label: for people who read the ledger's report.
        visits: the attribute `visits` of an earlier account of the same data set and event, to continue it: as it was
            last, and in one account only. Releases made after they were copied would be forgotten, since those that
            did not raise the maximum are not in the ledger either; after a crash leave visits out and pay again.

    Raises:
        ValueError: data set unknown or registered with "add_remove"; another event; `visits` for which this ledger
            holds no charge.
    """

    def __init__(
        self,
        ledger: Ledger,
        dataset: str,
        *,
        event: DpEvent,
        label: str = "test-time adaptation",
        visits: Visits | None = None,
    ):
        adjacency = ledger.adjacency(dataset)
        if adjacency == "add_remove":
            raise ValueError(
                f"dataset {dataset!r} is registered with adjacency 'add_remove', which a stream of batches cannot "
                "satisfy: removing a record shifts all later ones across batch boundaries, so every later batch "
                "changes. Register it with adjacency='replace_one' or 'zero_out'"
            )
        self._ledger, self._dataset, self._label = ledger, dataset, label
        self._lock = threading.Lock()
        self._adjacency: Adjacency = adjacency
        self._event = _one_release(event)
        self._visits = {unit: dict(releases) for unit, releases in (visits or {}).items()}
        self._worst = max(map(_cost, self._visits.values()), default=0)
        if not self._is_charged():
            raise ValueError(
                f"visits holds {self._worst} visits of one unit, but the ledger has no such charge on dataset "
                f"{dataset!r}: continue with the ledger that the visits were charged to, or leave visits out"
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
    def visits(self) -> dict[Hashable, dict[Hashable, int]]:
        """{unit: {release: number of the unit's records in it}}; private, see above."""
        return {unit: dict(releases) for unit, releases in self._visits.items()}

    @contextlib.contextmanager
    def spend(self, units: Iterable[Hashable], *, release: Hashable) -> Iterator[None]:
        """Charges for one batch, then runs the body, which may touch the batch.

        Args:
            units: for each record of the batch, its unit.
            release: identity of the noisy sum that the batch enters. Batches that share one sum (accumulation) share
                it; noise that is drawn anew is another release. One name for two sums charges too much, two names for
                one sum too little.

        Raises:
            BudgetExceeded: before the body runs; nothing is charged, and the account stays as it was.
        """
        with contextlib.ExitStack() as reservation:
            with self._lock:  # between looking and charging nobody else may come, but bodies run side by side
                after = {}
                for unit, count in Counter(units).items():
                    releases = self._visits.get(unit, {})
                    after[unit] = {**releases, release: releases.get(release, 0) + count}
                worst = max(self._worst, *map(_cost, after.values())) if after else self._worst
                charge = self._charge(worst - self._worst)
                if charge:
                    reservation.enter_context(self._ledger.spend(self._dataset, charge, label=self._label))
                self._visits.update(after)
                self._worst = worst
            yield

    def charged(self, release: Hashable) -> bool:
        """Whether records have been charged for this release."""
        return any(release in releases for releases in self._visits.values())

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

    def _charge(self, growth: int) -> DpEvent | None:
        if growth == 0:
            return None
        if isinstance(self._event, GaussianDpEvent):
            return GaussianDpEvent(self._event.noise_multiplier / math.sqrt(growth))
        return self._event if self._worst == 0 else None

    def _is_charged(self) -> bool:
        if self._worst == 0:
            return True
        spent = composition(self._ledger.events(self._dataset).get(None, NoOpDpEvent()))
        if NonPrivateDpEvent() in spent:
            return True
        if not isinstance(self._event, GaussianDpEvent):
            return False
        precision = math.fsum(n / e.noise_multiplier**2 for e, n in spent.items() if isinstance(e, GaussianDpEvent))
        return precision * self._event.noise_multiplier**2 >= self._worst * (1 - 1e-9)


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
