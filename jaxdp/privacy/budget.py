"""The check of a spend against a dataset's budget. RDP decides where it suffices, and few PLDs
decide the rest.
"""

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxdp.privacy.accounting import (
    RDP_ORDERS,
    ROUGH_ORDERS,
    Adjacency,
    Method,
    Tally,
    check_rules,
    epsilon_of_counts,
    rdp_of_counts,
    renyi_bound,
    renyi_epsilon,
)
from jaxdp.privacy.events import Counts, DpEvent, UnprovenDpEvent, compose, describe

Accounting = Literal["pld", "rdp", "renyi_filter"]

# 3 * 0.1 is 0.30000000000000004 in binary. A budget of 0.3 must still allow three spends of 0.1.
ROUNDING = 1e-12
_REMEMBERED = 64
# `combinations` enumerates at most this many combinations of parts. Beyond them it uses an upper
# bound.
COMBINATIONS = 1000


class BudgetExceeded(RuntimeError):
    """A spend that its dataset's budget does not allow. Nothing ran and nothing was charged.

    Attributes:
        dataset: The dataset's name.
        budget: The registered (epsilon, delta).
        would_spend: Epsilon at the budget's delta, with this spend and all room that others hold.
        held: The part of `would_spend` that is room held by others, or 0.0.
    """

    def __init__(
        self,
        message: str,
        *,
        dataset: str,
        budget: tuple[float, float],
        would_spend: float,
        held: float = 0.0,
    ):
        super().__init__(message)
        self.dataset = dataset
        self.budget = budget
        self.would_spend = would_spend
        self.held = held


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The terms of a dataset in the ledger's file."""

    id: int
    name: str
    adjacency: Adjacency
    unit: str
    epsilon: float | None
    delta: float | None
    accounting: Accounting
    renyi_order: float | None
    allow_unproven: bool
    records: int | None

    @property
    def method(self) -> Method:
        """The method of `jaxdp.privacy.accounting` that computes this dataset's numbers."""
        return "auto" if self.accounting == "pld" else "rdp"

    @property
    def orders(self) -> tuple[float, ...]:
        """The Renyi orders of the first check. Where PLD decides, a few are enough."""
        return RDP_ORDERS if self.accounting == "rdp" else ROUGH_ORDERS

    @property
    def renyi_bound(self) -> float:
        """The largest Renyi loss at the fixed order that converts to the budget."""
        assert self.epsilon is not None and self.delta is not None and self.renyi_order is not None
        return renyi_bound(self.epsilon, self.delta, self.renyi_order)


class Unsettled(Exception):
    """A question that the budget denies or that needs a PLD.

    Args:
        check: The check of the dataset.
        spent: The compositions that are spent.
        others: The events for which others hold room.
        own: `step`, with everything for which its own holds keep room.
        step: The requested events.
        ahead: Whether more such steps are likely to follow.

    Raises:
        ValueError: No accounting rule covers an event together with the others.
    """

    def __init__(
        self,
        check: "BudgetCheck",
        spent: Sequence[Tally],
        others: Counts,
        own: Counts,
        step: Counts,
        ahead: bool,
    ):
        super().__init__()
        self._check, self._spent, self._others, self._own, self._step = (
            check,
            spent,
            others,
            own,
            step,
        )
        self._ahead = ahead
        self._after = [tally.plus(others).plus(own) for tally in spent]
        for tally in self._after:
            check.check_rules(tally)
        limited = check.dataset.epsilon is not None and not check.dataset.allow_unproven
        self._lacks_proof = limited and not is_proven(step)

    def is_allowed(self) -> bool:
        """Returns whether the budget is known to allow the step."""
        return not self._lacks_proof and all(map(self._check.known, self._after))

    def decide(self) -> bool:
        """Computes what the check does not know. Returns False if the budget certainly denies the
        step.
        """
        verdicts = [self._check.known(tally) for tally in self._after]
        if self._lacks_proof or False in verdicts:
            return False
        for tally, verdict in zip(self._after, verdicts, strict=True):
            if verdict is None:
                step = self._step if self._ahead else Counter[DpEvent]()
                self._check.decide(tally, step, remember=_REMEMBERED + len(self._after))
        return True

    def refusal(self) -> BudgetExceeded:
        """Returns the error that explains the refusal."""
        dataset = self._check.dataset
        assert dataset.epsilon is not None and dataset.delta is not None
        event, budget = describe(compose(self._step)), (dataset.epsilon, dataset.delta)
        what = f"dataset {dataset.name!r}, budget epsilon {dataset.epsilon:g} at delta {dataset.delta:g}"
        if self._lacks_proof:
            return BudgetExceeded(
                f"{what}: {event} has no proof, so its epsilon is infinite. Nothing was run or "
                "charged. Register the dataset without a budget or with allow_unproven=True to "
                "accept empirical privacy.",
                dataset=dataset.name,
                budget=budget,
                would_spend=math.inf,
            )
        if dataset.accounting == "renyi_filter":
            what += f" by the Renyi filter at order {dataset.renyi_order:g} (shares of its bound, in units of epsilon)"
        alone = [tally.plus(self._own) for tally in self._spent]
        before, without, would = (
            max(used(dataset, tally.counts) for tally in counted)
            for counted in (self._spent, alone, self._after)
        )
        held = would - without if without < would else 0.0
        return BudgetExceeded(
            f"{what}: {before:.6g} is spent and {event} would make it {would:.6g}"
            + (f", {held:.6g} of which is room that others hold" if held else "")
            + ". Nothing was run or charged. "
            + (
                "Wait until the others are done (the report lists their holds), or use"
                if held
                else "Use"
            )
            + " more noise, fewer steps or other data. privacy.calibrate_noise computes the noise.",
            dataset=dataset.name,
            budget=budget,
            would_spend=would,
            held=held,
        )


class BudgetCheck:
    """Decides whether compositions fit a dataset's budget, with few PLDs.

    Composition is monotone. A part of a fitting composition fits, and a superset of an exceeding
    one exceeds. So a few known compositions answer most questions. RDP, where it suffices, is
    cheap.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self._fitting: list[Tally] = []
        self._exceeding: list[Tally] = []
        self._last: Tally | None = None

    def check_rules(self, tally: Tally) -> None:
        """Raises ValueError if no accounting rule covers the composition."""
        ways = {"pld", "rdp"} if self.dataset.method == "auto" else {self.dataset.method}
        if ways.isdisjoint(tally.rules):
            check_rules(tally.counts, adjacency=self.dataset.adjacency, method=self.dataset.method)

    def known(self, tally: Tally) -> bool | None:
        """Returns whether a composition fits, or None if that needs a PLD."""
        dataset = self.dataset
        if dataset.epsilon is None or dataset.delta is None:
            return True
        if dataset.accounting == "renyi_filter":
            return renyi_spent(dataset, tally.counts) <= dataset.renyi_bound * (1 + ROUNDING)
        if any(fitting.covers(tally) for fitting in self._fitting):
            return True
        if any(tally.covers(exceeding) for exceeding in self._exceeding):
            return False
        if tally.rdp_epsilon(dataset.delta) <= dataset.epsilon * (1 + ROUNDING):
            return True
        return False if dataset.accounting == "rdp" else None

    def decide(self, tally: Tally, step: Counts, *, remember: int) -> None:
        """Decides a composition and likely later ones, so that a loop of spends rarely needs
        another PLD.

        Args:
            tally: The composition to decide.
            step: The last step. It is empty if no similar step will follow.
            remember: The number of verdicts to keep, enough for all compositions of one question.
        """
        single = Tally(tally.adjacency).plus(step)
        recent = tally.minus(self._last) if self._last and tally.covers(self._last) else single
        self._last = tally
        repeats = all(
            tally.others[leaf] > count for leaf, count in single.others.items()
        )  # `others` has no Gaussians
        if not self._computed(tally, remember) or not single or not repeats:
            return
        # Twice the spends since the last decision are a guess at the next ones. The guess doubles
        # while spends grow. Near the budget it halves until it fits. So the number of PLDs is
        # logarithmic in the number of spends.
        share = 2.0
        while recent:
            ahead = tally.plus_share(recent, share)
            fits = self.known(ahead)
            if fits or (fits is None and self._computed(ahead, remember)):
                return
            if (
                share * max(recent.others.values(), default=0) <= 1
                and share * recent.precision <= single.precision
            ):
                return
            share /= 2

    def _computed(self, tally: Tally, remember: int) -> bool:
        dataset = self.dataset
        assert dataset.epsilon is not None and dataset.delta is not None
        fits = epsilon_of(dataset, tally.counts, dataset.delta) <= dataset.epsilon * (1 + ROUNDING)
        if fits:
            self._fitting = [tally, *(old for old in self._fitting if not tally.covers(old))][
                :remember
            ]
        else:
            self._exceeding = [tally, *(old for old in self._exceeding if not old.covers(tally))][
                :remember
            ]
        return fits


# --- Compositions -------------------------------------------------------------------------------


def maximal(compositions: Iterable[Counts]) -> list[Counts]:
    """Returns the compositions that no other one covers. Equal ones are returned once."""
    maximal: list[Counts] = []
    for counts in sorted(compositions, key=Counter.total, reverse=True):
        if not any(counts <= larger for larger in maximal):
            maximal.append(counts)
    return maximal


def combinations(datasets: Iterable[Sequence[Counts]]) -> list[Counts]:
    """Returns the maximal sums of one composition of every dataset, or compositions that cover all
    sums.
    """
    sums: list[Counts] = [Counter()]
    for parts in datasets:
        if len(sums) * len(parts) > COMBINATIONS:
            parts = [functools.reduce(operator.or_, parts)]
        sums = maximal(counts + part for counts in sums for part in parts)
    return sums


def is_proven(counts: Counts) -> bool:
    """Returns whether every release has a proof."""
    return not any(isinstance(leaf, UnprovenDpEvent) for leaf in counts)


def proven(counts: Counts) -> Counts:
    """Returns a composition without the releases that have no proof."""
    return Counter(
        {leaf: count for leaf, count in counts.items() if not isinstance(leaf, UnprovenDpEvent)}
    )


def renyi_spent(dataset: Dataset, counts: Counts) -> float:
    """Returns the Renyi loss of a composition at the dataset's order."""
    assert dataset.renyi_order is not None
    return rdp_of_counts(counts, order=dataset.renyi_order, adjacency=dataset.adjacency)


def epsilon_of(dataset: Dataset, counts: Counts, delta: float) -> float:
    """Returns epsilon of a composition at `delta`, by the dataset's accounting."""
    if dataset.accounting != "renyi_filter":
        return pld_epsilon(counts, delta, dataset.adjacency, dataset.method)
    spent, bound = renyi_spent(dataset, counts), dataset.renyi_bound
    if spent == 0 or math.isinf(spent):
        return spent
    if spent > bound * (
        1 + ROUNDING
    ):  # Only unspent events exceed the bound, because the filter refuses them.
        bound = spent
    assert dataset.renyi_order is not None
    return math.inf if delta == 0 else renyi_epsilon(bound, delta, dataset.renyi_order)


def used(dataset: Dataset, counts: Counts) -> float:
    """Returns the part of the budget's epsilon that a composition uses."""
    assert dataset.epsilon is not None and dataset.delta is not None
    if dataset.accounting == "renyi_filter":
        return renyi_spent(dataset, counts) / dataset.renyi_bound * dataset.epsilon
    return epsilon_of(dataset, counts, dataset.delta)


def pld_epsilon(counts: Counts, delta: float, adjacency: Adjacency, method: Method) -> float:
    """Returns `epsilon_of_counts`, cached for compositions with few distinct releases."""
    if len(counts) > 256:
        return epsilon_of_counts(counts, delta=delta, adjacency=adjacency, method=method)
    return remembered_epsilon(frozenset(counts.items()), delta, adjacency, method)


@functools.lru_cache(maxsize=4096)
def remembered_epsilon(
    counts: frozenset[tuple[DpEvent, int]], delta: float, adjacency: Adjacency, method: Method
) -> float:
    """Returns `epsilon_of_counts` of hashable counts, from its cache if possible."""
    return epsilon_of_counts(dict(counts), delta=delta, adjacency=adjacency, method=method)
