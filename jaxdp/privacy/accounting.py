"""Epsilon of events: privacy loss distributions (PLD) first, Renyi DP (RDP) where PLD has no rule.

dp_accounting computes both. This module counts equal events, applies the noise multiplier under
each adjacency and adds pure events. Its results stay upper bounds for extreme numbers.

Each leaf event stands for a pair of distributions (`s` is its noise multiplier, `q` its sampling
probability):

=============================  =====================================  =========================================
event                          add_remove, zero_out                   replace_one
=============================  =====================================  =========================================
Gaussian                       N(0, s^2), N(1, s^2)                   N(-1, s^2), N(1, s^2)
PoissonSampled Gaussian        (1-q) N(0) + q N(1), N(0)              (1-q) N(0) + q N(1), (1-q) N(0) + q N(-1)
TruncatedSubsampledGaussian    dp_accounting (arXiv 2508.15089)       dp_accounting
Laplace, DiscreteLaplace       noise at 0 and at the sensitivity      noise at 0 and at twice the sensitivity
PoissonSampled Laplace         as PoissonSampled Gaussian             no rule
RandomizedResponse             zero_out only: answer against uniform  answers of two records
PureDp, ZCDp                   as stated                              as stated
SampledWithoutReplacement      no rule                                RDP, sensitivity 2 (arXiv 1808.00087)
SingleEpochTreeAggregation     zero_out only, RDP                     no rule
RepeatAndSelect                RDP (arXiv 2110.03620)                 RDP
=============================  =====================================  =========================================

Under REPLACE_ONE, dp_accounting 0.6 doubles a Gaussian's sensitivity in its PLD but not in its RDP.
It does not double the sensitivity of Laplace. It composes a `RandomizedResponseDpEvent` once for
any count. Its accountant classes therefore compute single RDP leaves only, and `_rdp_event` applies
the factor before.

Formal guarantees: every number is an upper bound for adaptive composition of mechanisms. Their
PARAMETERS (the events) must be fixed in advance. Their inputs may depend on earlier outputs (PLD:
Zhu, Dong, Wang 2022, arXiv 2106.08567. RDP: Mironov 2017, arXiv 1702.07476). Losses are rounded
pessimistically ("connect the dots", arXiv 2207.04380) and composed by tilted transforms with a
bound on their rounding (`jaxdp.privacy.convolution`). Gaussians alone have a closed form. Poisson
sampling under replace_one assumes that the worst record and replacement point in opposite
directions. tests/privacy/test_accounting.py checks this in the plane.
"""

import contextlib
import copy
import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    compute_delta,
    compute_epsilon,
)

from jaxdp.privacy.convolution import epsilon_bound, log_delta_bound, losses_of
from jaxdp.privacy.events import (
    ComposedDpEvent,
    Counts,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    UnprovenDpEvent,
    ZCDpEvent,
    composition,
    precision,
    to_json,
)
from jaxdp.privacy.gaussian import gaussian_delta, gaussian_epsilon
from jaxdp.privacy.losses import Adjacency as Adjacency
from jaxdp.privacy.losses import (
    has_distribution,
    is_symmetric,
    randomized_response,
    sampled_loss,
    tamed,
    total_variation,
)

Method = Literal["auto", "pld", "rdp"]

RELATIONS: Mapping[str, NeighboringRelation] = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}
METHODS = ("auto", "pld", "rdp")
RDP_ORDERS: tuple[float, ...] = tuple(DEFAULT_RDP_ORDERS)
# For grids, brackets and first checks. The smallest ones find the scale of many losses of little
# weight.
_WHOLE_ORDERS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024)
ROUGH_ORDERS = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, *map(float, _WHOLE_ORDERS))

# Log-sum-exp at small orders errs by about 1e-14 / (order - 1). dp_accounting reads a negative RDP
# as "no loss".
_RDP_SLACK = 1e-13
# A pure epsilon from which the loss of a release is certain.
_CERTAIN = 1e7
# The smallest positive float. A delta that is smaller but not 0 is rounded up to it.
_LEAST_DELTA = 5e-324
# Gaussians may have been merged twice, each time with four roundings.
_ROUNDED_UP = 1 + 2.0**-49
# The deltas for which `delta` covers the tails of losses.
_DEPTHS = (1e-16, 1e-250)


def epsilon(
    event: DpEvent, *, delta: float, adjacency: Adjacency = "add_remove", method: Method = "auto"
) -> float:
    """Returns an upper bound on the epsilon at which `event` is (epsilon, delta)-DP.

    Args:
        event: One release or a composition of them (`jaxdp.privacy.events`). A million equal
            releases cost one PLD.
        delta: A number in [0, 1). At 0 only releases with a pure proof are finite, and their
            epsilons add up.
        adjacency: "add_remove", "replace_one" or "zero_out" (a record against the zero or null
            record).
        method: "auto" (PLD, or RDP where a part has no PLD rule), or only "pld" or only "rdp". RDP
            is above PLD up to PLD's rounding. So "auto" computes both only where rounding may
            matter, and returns the smaller one: beyond ten million releases, or where PLD is
            infinite. Every method includes the sum of pure epsilons.

    Returns:
        Epsilon >= 0. It is 0 for an empty composition, and `math.inf` with a `NonPrivateDpEvent` or
        an unproven part.

    Raises:
        ValueError: An argument or event is unknown, or a part has no rule for this adjacency and
            method.
    """
    return epsilon_of_counts(composition(event), delta=delta, adjacency=adjacency, method=method)


def delta(
    event: DpEvent, *, epsilon: float, adjacency: Adjacency = "add_remove", method: Method = "auto"
) -> float:
    """Returns an upper bound, in [0, 1], on the delta at which `event` is (epsilon, delta)-DP.

    The arguments mean the same as in `epsilon`. The bound is 1 with a `NonPrivateDpEvent` or an
    unproven part.

    Raises:
        ValueError: As in `epsilon`, or `epsilon` is negative or NaN.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon!r}.")
    counts: Mapping[DpEvent, int] = composition(event)
    rules = check_rules(counts, adjacency=adjacency, method=method)
    if not counts or epsilon == math.inf:
        return 1.0 if _is_boundless(counts) else 0.0
    if _is_boundless(counts):
        return 1.0
    if _pure_epsilon(counts, adjacency) <= epsilon:
        return 0.0
    if "pld" in rules:
        return _delta_by_losses(counts, adjacency, epsilon)
    bound = float(compute_delta(RDP_ORDERS, _total_rdp(counts, adjacency), epsilon)[0])
    return min(1.0, max(bound, _LEAST_DELTA))


def epsilon_of_counts(
    counts: Mapping[DpEvent, int], *, delta: float, adjacency: Adjacency, method: Method
) -> float:
    """Returns `epsilon` of a composition that `jaxdp.privacy.events.composition` has flattened."""
    return _epsilon_of_leaves(tuple(counts.items()), delta, adjacency, method)


@functools.lru_cache(
    maxsize=128
)  # Plans, holds and reports ask for the same epsilon several times.
def _epsilon_of_leaves(
    leaves: tuple[tuple[DpEvent, int], ...], delta: float, adjacency: Adjacency, method: Method
) -> float:
    counts: Mapping[DpEvent, int] = dict(leaves)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}.")
    rules = check_rules(counts, adjacency=adjacency, method=method)
    counts = merge_gaussians(counts)
    if not counts:
        return 0.0
    if _is_boundless(counts):
        return math.inf
    pure = _pure_epsilon(counts, adjacency)
    if delta == 0:
        return pure
    if "pld" in rules:
        bound = _epsilon_by_losses(counts, adjacency, delta)
        # Beyond ten million releases grids may be too coarse.
        if "rdp" not in rules or (bound < math.inf and sum(counts.values()) <= 10**7):
            return min(pure, bound)
        pure = min(pure, bound)
    return max(0.0, min(pure, _epsilon_from_rdp(_total_rdp(counts, adjacency), delta)))


def rdp_epsilon_of_counts(
    counts: Mapping[DpEvent, int],
    *,
    delta: float,
    adjacency: Adjacency,
    orders: Sequence[float] = RDP_ORDERS,
) -> float:
    """Returns only the RDP (or pure) bound, a cheap first check. It is infinite where RDP has no
    rule.
    """
    if _is_boundless(counts):
        return math.inf
    if not counts:
        return 0.0
    pure = _pure_epsilon(counts, adjacency)
    if not all("rdp" in _leaf_rules(leaf, adjacency) for leaf in counts):
        return pure
    return min(pure, _epsilon_from_rdp(_total_rdp(counts, adjacency, orders), delta, orders))


def merge_gaussians(counts: Mapping[DpEvent, int]) -> Mapping[DpEvent, int]:
    """Returns an equivalent composition with at most one Gaussian."""
    gaussians = {leaf: count for leaf, count in counts.items() if isinstance(leaf, GaussianDpEvent)}
    if sum(gaussians.values()) <= 1:
        return counts
    rest = {leaf: count for leaf, count in counts.items() if leaf not in gaussians}
    return {GaussianDpEvent(precision(gaussians) ** -0.5): 1, **rest}


class Tally:
    """The proven part of a composition that grows by small steps, with the losses that a first
    check by RDP needs.

    One precision stands for all Gaussians: the sum of count / noise_multiplier^2. A method that
    adds returns a new tally and copies a dictionary of the distinct leaves that are not Gaussians.

    Attributes:
        adjacency: The adjacency of the dataset.
        orders: The Renyi orders of the first check.
        precision: The precision of the Gaussians.
        others: The leaves that are not Gaussians.
        rules: Which of "pld" and "rdp" have a rule for every leaf.
    """

    def __init__(self, adjacency: Adjacency, orders: Sequence[float] = RDP_ORDERS):
        self.adjacency: Adjacency = adjacency
        self.orders = orders
        self.precision = 0.0
        self.others: Counts = Counter()
        self.rules = frozenset({"pld", "rdp"})
        self._sums: np.ndarray | None = None  # the sum of `_losses` of the others
        self._age = 0  # the additions since that sum was computed from scratch

    def __bool__(self) -> bool:
        return bool(self.others or self.precision)

    @property
    def counts(self) -> Counts:
        """The leaves, with one Gaussian for all."""
        gaussian: Counts = Counter(
            {GaussianDpEvent(self.precision**-0.5): 1} if self.precision else {}
        )
        return gaussian + self.others

    def plus(self, step: Mapping[DpEvent, int], times: int = 1) -> "Tally":
        """Returns the composition with the proven part of `step` added `times` times."""
        total = copy.copy(self)
        total.others = self.others.copy()
        # A growing sum loses digits. It is computed anew now and then, and always where that costs
        # little.
        if len(self.others) > 64:
            total._sums, total._age = self._known_sums(), self._age + 1
        else:
            total._sums = None
        for leaf, count in step.items():
            if isinstance(leaf, GaussianDpEvent):
                total.precision += times * precision({leaf: count})
            elif not isinstance(leaf, UnprovenDpEvent):
                total.others[leaf] += times * count
                total.rules &= _leaf_rules(leaf, self.adjacency)
                if total._sums is not None:
                    total._sums = total._sums + times * count * _losses(
                        leaf, self.adjacency, self.orders
                    )
        return total

    def plus_share(self, other: "Tally", share: float) -> "Tally":
        """Returns the composition with a share of another one added. Counts are rounded up."""
        total = self.plus({leaf: math.ceil(share * count) for leaf, count in other.others.items()})
        total.precision += share * other.precision
        return total

    def minus(self, other: "Tally") -> "Tally":
        """Returns the part of this composition that exceeds another one."""
        rest = Tally(self.adjacency).plus(self.others - other.others)
        rest.precision = max(0.0, self.precision - other.precision)
        return rest

    def covers(self, other: "Tally") -> bool:
        """Returns whether this composition contains another one and therefore costs at least as
        much.
        """
        if len(other.others) > len(self.others) or other.precision > self.precision * (1 + 1e-12):
            return False
        return all(count <= self.others[leaf] for leaf, count in other.others.items())

    def rdp_epsilon(self, delta: float) -> float:
        """Returns the RDP (or pure) bound on epsilon. It is infinite where RDP has no rule."""
        if not self:
            return 0.0
        sums = self._known_sums()
        if self.precision:
            gaussian = GaussianDpEvent(self.precision**-0.5)
            sums = sums + np.append(_leaf_rdp(gaussian, self.adjacency, self.orders), math.inf)
        *rdp, pure = sums
        bound = (
            math.inf
            if np.isinf(rdp).all()
            else _epsilon_from_rdp(np.asarray(rdp), delta, self.orders)
        )
        return float(min(pure, bound))

    def _known_sums(self) -> np.ndarray:
        if self._sums is None or self._age > 256:
            losses = (
                count * _losses(leaf, self.adjacency, self.orders)
                for leaf, count in self.others.items()
            )
            self._sums, self._age = sum(losses, np.zeros(len(self.orders) + 1)), 0
        return self._sums


def _losses(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    """Returns the Renyi DP of a leaf at every order and then its pure epsilon. A loss without a
    rule is infinite.
    """
    ruled = not _is_boundless([leaf]) and "rdp" in _leaf_rules(leaf, adjacency)
    rdp = _leaf_rdp(leaf, adjacency, orders) if ruled else np.full(len(orders), math.inf)
    return np.append(rdp, _leaf_pure_epsilon(leaf, adjacency))


def rdp_of_counts(counts: Mapping[DpEvent, int], *, order: float, adjacency: Adjacency) -> float:
    """Returns the Renyi DP of a composition at one order > 1. It is infinite with a non-private or
    unproven part.

    Raises:
        ValueError: A part has no RDP rule for this adjacency.
    """
    if _is_boundless(counts):
        return math.inf
    check_rules(counts, adjacency=adjacency, method="rdp")
    # Private selection optimises over the whole grid, so the fixed order joins the grid.
    orders = (*RDP_ORDERS, order)
    return math.fsum(
        count * float(_leaf_rdp(leaf, adjacency, orders)[-1]) for leaf, count in counts.items()
    )


def check_rules(
    counts: Mapping[DpEvent, int], *, adjacency: Adjacency, method: Method
) -> frozenset[str]:
    """Returns which of "pld" and "rdp" have a rule for every leaf.

    Raises:
        ValueError: Neither has. The message names events without a rule.
    """
    if adjacency not in RELATIONS:
        raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}.")
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}.")
    asked = ("pld", "rdp") if method == "auto" else (method,)
    missing = {
        way: [leaf for leaf in counts if way not in _leaf_rules(leaf, adjacency)] for way in asked
    }
    rules = frozenset(way for way in asked if not missing[way])
    if not rules:
        details = ", ".join(
            f"{way.upper()} has none for {to_json(missing[way][0])}" for way in asked
        )
        raise ValueError(
            f"no accounting rule covers this composition under {adjacency!r} adjacency: {details}. "
            "Register another adjacency, charge a bound that has a rule (the event unsampled, "
            "PureDpEvent, ZCDpEvent) or use unproven()."
        )
    return rules


@functools.lru_cache(maxsize=2**16)
def _leaf_rules(leaf: DpEvent, adjacency: Adjacency) -> frozenset[str]:
    if isinstance(leaf, NonPrivateDpEvent | UnprovenDpEvent):
        return frozenset({"pld", "rdp"})
    by_pld = has_distribution(leaf, adjacency)
    accountant = RdpAccountant(neighboring_relation=RELATIONS[adjacency])
    by_rdp = isinstance(leaf, PureDpEvent) or accountant.supports(_rdp_event(leaf, adjacency))
    return frozenset(way for way, has_rule in {"pld": by_pld, "rdp": by_rdp}.items() if has_rule)


def _is_boundless(counts: Iterable[DpEvent]) -> bool:
    return any(isinstance(leaf, NonPrivateDpEvent | UnprovenDpEvent) for leaf in counts)


def _epsilon_from_rdp(rdp: np.ndarray, delta: float, orders: Sequence[float] = RDP_ORDERS) -> float:
    return float(compute_epsilon(orders, rdp, delta)[0])


# --- Pure epsilon -------------------------------------------------------------------------------


def _pure_epsilon(counts: Mapping[DpEvent, int], adjacency: Adjacency) -> float:
    """Returns the sum of pure epsilons (Dwork et al. 2006). It is infinite if a leaf has none."""
    return math.fsum(count * _leaf_pure_epsilon(leaf, adjacency) for leaf, count in counts.items())


def _leaf_pure_epsilon(leaf: DpEvent, adjacency: Adjacency) -> float:
    factor = 2 if adjacency == "replace_one" else 1
    match leaf:
        case PureDpEvent():
            return leaf.epsilon
        case LaplaceDpEvent():
            return factor / float(leaf.noise_multiplier)
        case DiscreteLaplaceDpEvent():
            return factor * float(leaf.noise_parameter * leaf.sensitivity)
        case RandomizedResponseDpEvent() if adjacency != "add_remove":
            return float(np.abs(randomized_response(leaf, adjacency)[0]).max())
        case PoissonSampledDpEvent(event=LaplaceDpEvent()) if adjacency != "replace_one":
            loss = np.array(1 / leaf.event.noise_multiplier)
            return float(sampled_loss(loss, leaf.sampling_probability))
    return math.inf


# --- Privacy losses -----------------------------------------------------------------------------


def _epsilon_by_losses(counts: Mapping[DpEvent, int], adjacency: Adjacency, delta: float) -> float:
    """Returns the larger epsilon of both directions."""
    certain, rest = _without_certain(counts, adjacency)
    if math.fsum(count * total_variation(leaf, adjacency) for leaf, count in rest.items()) <= delta:
        return certain
    mu = _only_gaussian(rest, adjacency)
    if mu is not None:
        return certain + gaussian_epsilon(mu, delta)
    losses = losses_of(rest, adjacency, delta, reverse=False)
    bound = epsilon_bound(losses, delta)
    if not all(is_symmetric(leaf, adjacency) for leaf in rest):
        reversed_losses = losses_of(rest, adjacency, delta, reverse=True)
        bound = max(bound, epsilon_bound(reversed_losses, delta, enough=bound))
    whole = _only_gaussian(_unsampled(rest), adjacency)
    if whole is not None:
        bound = min(bound, gaussian_epsilon(whole, delta))
    return certain + bound


def _delta_by_losses(counts: Mapping[DpEvent, int], adjacency: Adjacency, epsilon: float) -> float:
    """Returns the larger delta of both directions."""
    certain, rest = _without_certain(counts, adjacency)
    if certain > epsilon or not rest:
        return 1.0
    epsilon -= certain
    mu = _only_gaussian(rest, adjacency)
    if mu is not None:
        return gaussian_delta(mu, epsilon)
    symmetric = all(is_symmetric(leaf, adjacency) for leaf in rest)
    most = math.fsum(count * total_variation(leaf, adjacency) for leaf, count in rest.items()) * (
        1 + 1e-12
    )
    whole = _only_gaussian(_unsampled(rest), adjacency)
    if whole is not None:
        most = min(most, gaussian_delta(whole, epsilon))
    bound = -1.0
    for least in _DEPTHS:  # Far tails take longer, and are looked at only if delta is small.
        if bound < 100 * least:
            directions = (losses_of(rest, adjacency, least, way) for way in {False, not symmetric})
            bound = math.exp(max(log_delta_bound(losses, epsilon) for losses in directions))
    return max(min(most, bound), _LEAST_DELTA)


def _unsampled(counts: Mapping[DpEvent, int]) -> Mapping[DpEvent, int]:
    """Returns a composition that costs at least as much: samples of a Gaussian are whole.

    By joint convexity, sampling multiplies delta by at most its probability. The closed form of
    whole Gaussians is tighter where a sampling probability is near 1, or delta is below float64's
    tails.
    """
    whole: Counts = Counter()
    for leaf, count in counts.items():
        sampled = isinstance(leaf, PoissonSampledDpEvent) and isinstance(
            leaf.event, GaussianDpEvent
        )
        whole[leaf.event if sampled else leaf] += count
    return whole


def _without_certain(
    counts: Mapping[DpEvent, int], adjacency: Adjacency
) -> tuple[float, Mapping[DpEvent, int]]:
    """Returns the pure epsilon of releases whose loss is certain, up to a millionth, and the
    others.

    A pure release of a huge epsilon has nearly this loss with nearly probability 1, so that adding
    its epsilon loses nothing.
    """
    rest: Counts = Counter()
    losses = []
    for leaf, count in counts.items():
        loss = _leaf_pure_epsilon(leaf, adjacency)
        if loss >= _CERTAIN and isinstance(
            leaf, PureDpEvent | LaplaceDpEvent | DiscreteLaplaceDpEvent
        ):
            losses.append(count * loss)
        else:
            rest[tamed(leaf)] += count
    return sum(losses), merge_gaussians(rest)


def _only_gaussian(counts: Mapping[DpEvent, int], adjacency: Adjacency) -> float | None:
    """Returns the distance of the pair in standard deviations, rounded up, if all releases are
    Gaussians.
    """
    if not all(isinstance(leaf, GaussianDpEvent) for leaf in counts):
        return None
    return (2 if adjacency == "replace_one" else 1) * math.sqrt(precision(counts)) * _ROUNDED_UP


# --- Renyi DP -----------------------------------------------------------------------------------


def _total_rdp(
    counts: Mapping[DpEvent, int], adjacency: Adjacency, orders: Sequence[float] = RDP_ORDERS
) -> np.ndarray:
    total = np.zeros(len(orders))
    for leaf, count in counts.items():
        total += count * _leaf_rdp(leaf, adjacency, orders)
    return total


def _leaf_rdp(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    if isinstance(leaf, GaussianDpEvent):  # Not cached, because every sum of Gaussians differs.
        sigma: float = leaf.noise_multiplier / (2 if adjacency == "replace_one" else 1)
        with np.errstate(over="ignore"):
            return np.asarray(orders) / 2 / sigma / sigma + _RDP_SLACK
    return _computed_rdp(leaf, adjacency, orders)


@functools.lru_cache(maxsize=2**16)
def _computed_rdp(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    if isinstance(leaf, PureDpEvent):
        alpha, loss = np.asarray(orders), leaf.epsilon
        # This is the Renyi divergence of `_worst_pure_pair`.
        rdp: np.ndarray = (
            np.logaddexp(alpha * loss, (1 - alpha) * loss) - np.logaddexp(loss, 0.0)
        ) / (alpha - 1)
        return rdp + _RDP_SLACK
    accountant = RdpAccountant(orders, RELATIONS[adjacency])
    with _without_unused_orders(), np.errstate(over="ignore"):
        accountant.compose(_rdp_event(tamed(leaf), adjacency))
    return np.asarray(accountant.rdp).clip(0.0) + _RDP_SLACK


@contextlib.contextmanager
def _without_unused_orders() -> Iterator[None]:
    """Drops the log lines about orders at which an RDP series diverges. These are infinite and
    never used.
    """
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _rdp_event(event: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Returns an event whose RDP by dp_accounting, which never doubles a sensitivity, equals the
    RDP of `event`.
    """
    factor = 2 if adjacency == "replace_one" else 1
    match event:
        case GaussianDpEvent() | LaplaceDpEvent():
            return type(event)(event.noise_multiplier / factor)
        case PoissonSampledDpEvent():
            return PoissonSampledDpEvent(
                event.sampling_probability, _rdp_event(event.event, adjacency)
            )
        case SampledWithoutReplacementDpEvent():
            inner = _rdp_event(event.event, adjacency)
            return SampledWithoutReplacementDpEvent(
                event.source_dataset_size, event.sample_size, inner
            )
        case RepeatAndSelectDpEvent():
            return RepeatAndSelectDpEvent(
                _rdp_event(event.event, adjacency), event.mean, event.shape
            )
        # Only inside RepeatAndSelect: epsilon-DP implies epsilon^2/2-zCDP (Bun, Steinke 2016).
        case PureDpEvent():
            return ZCDpEvent(rho=event.epsilon * event.epsilon / 2)
        case ComposedDpEvent():
            return ComposedDpEvent([_rdp_event(child, adjacency) for child in event.events])
        case SelfComposedDpEvent():
            return SelfComposedDpEvent(_rdp_event(event.event, adjacency), event.count)
    return event


def renyi_bound(epsilon: float, delta: float, order: float) -> float:
    """Returns the Renyi DP at `order` that converts to (epsilon, delta). It is <= 0 if the order is
    too small.

    The bound inverts epsilon = rdp + log(1 - 1/order) - log(delta order) / (order - 1) (Canonne,
    Kamath, Steinke 2020, arXiv 2004.00010, Proposition 12).
    """
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def renyi_epsilon(rdp: float, delta: float, order: float) -> float:
    """Returns the epsilon to which `rdp` at `order` converts. It inverts `renyi_bound`."""
    return max(0.0, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def default_renyi_order(epsilon: float, delta: float) -> float:
    """Returns the order at which the bound admits most of a mechanism with Renyi loss proportional
    to the order.
    """
    return max(RDP_ORDERS, key=lambda order: renyi_bound(epsilon, delta, order) / order)
