"""Epsilon of events: privacy loss distributions (PLD) first, Renyi DP (RDP) where PLD has no rule.

dp_accounting computes both. This module counts equal events, applies the noise multiplier under each adjacency and adds
pure events. Its results stay upper bounds for extreme numbers.

Each leaf event stands for a pair of distributions (`s` is its noise multiplier, `q` its sampling probability):

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

Under REPLACE_ONE, dp_accounting 0.6 doubles a Gaussian's sensitivity in its PLD but not in its RDP. It does not double
the sensitivity of Laplace. It composes a `RandomizedResponseDpEvent` once for any count. Its accountant classes
therefore compute single RDP leaves only, and `_rdp_event` applies the factor before.

Formal guarantees: every number is an upper bound for adaptive composition of mechanisms. Their PARAMETERS (the events)
must be fixed in advance. Their inputs may depend on earlier outputs (PLD: Zhu, Dong, Wang 2022, arXiv 2106.08567. RDP:
Mironov 2017, arXiv 1702.07476). Losses are rounded pessimistically ("connect the dots", arXiv 2207.04380). A reserve of
1e-11 of delta (1e-17 per event beyond a million) covers the float64 error of the FFT. Poisson sampling under
replace_one assumes that the worst record and replacement point in opposite directions. tests/privacy/test_accounting.py
checks this in the plane.
"""

import contextlib
import copy
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_delta, compute_epsilon
from scipy import special

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
    TruncatedSubsampledGaussianDpEvent,
    UnprovenDpEvent,
    ZCDpEvent,
    composition,
    precision,
    to_json,
)

Adjacency = Literal["add_remove", "replace_one", "zero_out"]
Method = Literal["auto", "pld", "rdp"]

RELATIONS: Mapping[str, NeighboringRelation] = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}
METHODS = ("auto", "pld", "rdp")
RDP_ORDERS: tuple[float, ...] = tuple(DEFAULT_RDP_ORDERS)
# For grids, brackets and first checks. The smallest ones find the scale of many losses of little weight.
_WHOLE_ORDERS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024)
ROUGH_ORDERS = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, *map(float, _WHOLE_ORDERS))

# Log-sum-exp at small orders errs by about 1e-14 / (order - 1). dp_accounting reads a negative RDP as "no loss".
_RDP_SLACK = 1e-13
# Above this epsilon the RDP bound is precise enough, so that no PLD is built.
_MAX_PLD_EPSILON = 1e5


def epsilon(event: DpEvent, *, delta: float, adjacency: Adjacency = "add_remove", method: Method = "auto") -> float:
    """Returns an upper bound on the epsilon at which `event` is (epsilon, delta)-DP.

    Args:
        event: One release or a composition of them (`jaxdp.privacy.events`). A million equal releases cost one PLD.
        delta: A number in [0, 1). At 0 only releases with a pure proof are finite, and their epsilons add up.
        adjacency: "add_remove", "replace_one" or "zero_out" (a record against the zero or null record).
        method: "auto" (PLD, or RDP where a part has no PLD rule), or only "pld" or only "rdp". RDP is above PLD up to
            PLD's rounding. So "auto" computes both only where rounding may matter, and returns the smaller one: for a
            delta below 1e-9, a very large epsilon, or a grid that is coarser than wanted. Every method includes the sum
            of pure epsilons.

    Returns:
        Epsilon >= 0. It is 0 for an empty composition, and `math.inf` with a `NonPrivateDpEvent` or an unproven part.

    Raises:
        ValueError: An argument or event is unknown, or a part has no rule for this adjacency and method.
    """
    return epsilon_of_counts(composition(event), delta=delta, adjacency=adjacency, method=method)


def delta(event: DpEvent, *, epsilon: float, adjacency: Adjacency = "add_remove", method: Method = "auto") -> float:
    """Returns an upper bound, in [0, 1], on the delta at which `event` is (epsilon, delta)-DP.

    The arguments mean the same as in `epsilon`. The bound is 1 with a `NonPrivateDpEvent` or an unproven part.

    Raises:
        ValueError: As in `epsilon`, or `epsilon` is negative or NaN.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon!r}.")
    counts: Mapping[DpEvent, int] = composition(event)
    rules = check_rules(counts, adjacency=adjacency, method=method)
    counts = merge_gaussians(counts)
    if not counts:
        return 0.0
    if _is_boundless(counts):
        return 1.0
    if _pure_epsilon(counts, adjacency) <= epsilon:
        return 0.0
    bound, coarse = 1.0, False
    if "pld" in rules:
        scale = _scale(counts, adjacency, 1e-5)
        total, coarse = _total_pld(counts, adjacency, scale), _is_coarse(counts, adjacency, scale)
        if total is not None:
            bound = min(bound, float(total.get_delta_for_epsilon(epsilon)) + _fft_slack(counts))
    if "rdp" in rules and (coarse or not _fine(counts) < bound < 1):
        bound = min(bound, float(compute_delta(RDP_ORDERS, _total_rdp(counts, adjacency), epsilon)[0]))
    return bound


def epsilon_of_counts(counts: Mapping[DpEvent, int], *, delta: float, adjacency: Adjacency, method: Method) -> float:
    """Returns `epsilon` of a composition that `jaxdp.privacy.events.composition` has flattened."""
    return _epsilon_of_leaves(tuple(counts.items()), delta, adjacency, method)


@functools.lru_cache(maxsize=128)  # Plans, holds and reports ask for the same epsilon several times.
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
    bound, coarse, pure = math.inf, True, _pure_epsilon(counts, adjacency)
    if "pld" in rules and delta > _fft_slack(counts):
        scale = _scale(counts, adjacency, delta)
        total, coarse = _total_pld(counts, adjacency, scale), _is_coarse(counts, adjacency, scale)
        if total is not None:
            bound = float(total.get_epsilon_for_delta(delta - _fft_slack(counts)))
    if bound > 0 and "rdp" in rules and (coarse or bound == math.inf or delta < _fine(counts)):
        bound = min(bound, _epsilon_from_rdp(_total_rdp(counts, adjacency), delta))
    return max(0.0, min(bound, pure))


def rdp_epsilon_of_counts(
    counts: Mapping[DpEvent, int], *, delta: float, adjacency: Adjacency, orders: Sequence[float] = RDP_ORDERS
) -> float:
    """Returns only the RDP (or pure) bound, a cheap first check. It is infinite where RDP has no rule."""
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
    """The proven part of a composition that grows by small steps, with the losses that a first check by RDP needs.

    One precision stands for all Gaussians: the sum of count / noise_multiplier^2. A method that adds returns a new
    tally and copies a dictionary of the distinct leaves that are not Gaussians.

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
        gaussian: Counts = Counter({GaussianDpEvent(self.precision**-0.5): 1} if self.precision else {})
        return gaussian + self.others

    def plus(self, step: Mapping[DpEvent, int], times: int = 1) -> "Tally":
        """Returns the composition with the proven part of `step` added `times` times."""
        total = copy.copy(self)
        total.others = self.others.copy()
        # A growing sum loses digits. It is computed anew now and then, and always where that costs little.
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
                    total._sums = total._sums + times * count * _losses(leaf, self.adjacency, self.orders)
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
        """Returns whether this composition contains another one and therefore costs at least as much."""
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
        bound = math.inf if np.isinf(rdp).all() else _epsilon_from_rdp(np.asarray(rdp), delta, self.orders)
        return float(min(pure, bound))

    def _known_sums(self) -> np.ndarray:
        if self._sums is None or self._age > 256:
            losses = (count * _losses(leaf, self.adjacency, self.orders) for leaf, count in self.others.items())
            self._sums, self._age = sum(losses, np.zeros(len(self.orders) + 1)), 0
        return self._sums


def _losses(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    """Returns the Renyi DP of a leaf at every order and then its pure epsilon. A loss without a rule is infinite."""
    ruled = not _is_boundless([leaf]) and "rdp" in _leaf_rules(leaf, adjacency)
    rdp = _leaf_rdp(leaf, adjacency, orders) if ruled else np.full(len(orders), math.inf)
    return np.append(rdp, _leaf_pure_epsilon(leaf, adjacency))


def rdp_of_counts(counts: Mapping[DpEvent, int], *, order: float, adjacency: Adjacency) -> float:
    """Returns the Renyi DP of a composition at one order > 1. It is infinite with a non-private or unproven part.

    Raises:
        ValueError: A part has no RDP rule for this adjacency.
    """
    if _is_boundless(counts):
        return math.inf
    check_rules(counts, adjacency=adjacency, method="rdp")
    # Private selection optimises over the whole grid, so the fixed order joins the grid.
    orders = (*RDP_ORDERS, order)
    return math.fsum(count * float(_leaf_rdp(leaf, adjacency, orders)[-1]) for leaf, count in counts.items())


def check_rules(counts: Mapping[DpEvent, int], *, adjacency: Adjacency, method: Method) -> frozenset[str]:
    """Returns which of "pld" and "rdp" have a rule for every leaf.

    Raises:
        ValueError: Neither has. The message names events without a rule.
    """
    if adjacency not in RELATIONS:
        raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}.")
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}.")
    asked = ("pld", "rdp") if method == "auto" else (method,)
    missing = {way: [leaf for leaf in counts if way not in _leaf_rules(leaf, adjacency)] for way in asked}
    rules = frozenset(way for way in asked if not missing[way])
    if not rules:
        details = ", ".join(f"{way.upper()} has none for {to_json(missing[way][0])}" for way in asked)
        raise ValueError(
            f"no accounting rule covers this composition under {adjacency!r} adjacency: {details}. Register another "
            "adjacency, charge a bound that has a rule (the event unsampled, PureDpEvent, ZCDpEvent) or use unproven()."
        )
    return rules


@functools.lru_cache(maxsize=2**16)
def _leaf_rules(leaf: DpEvent, adjacency: Adjacency) -> frozenset[str]:
    if isinstance(leaf, NonPrivateDpEvent | UnprovenDpEvent):
        return frozenset({"pld", "rdp"})
    by_pld = _pld_rule(leaf, adjacency) is not None
    accountant = RdpAccountant(neighboring_relation=RELATIONS[adjacency])
    by_rdp = isinstance(leaf, PureDpEvent) or accountant.supports(_rdp_event(leaf, adjacency))
    return frozenset(way for way, has_rule in {"pld": by_pld, "rdp": by_rdp}.items() if has_rule)


def _is_boundless(counts: Iterable[DpEvent]) -> bool:
    return any(isinstance(leaf, NonPrivateDpEvent | UnprovenDpEvent) for leaf in counts)


def _epsilon_from_rdp(rdp: np.ndarray, delta: float, orders: Sequence[float] = RDP_ORDERS) -> float:
    return float(compute_epsilon(orders, rdp, delta)[0])


# --- Pure epsilon -----------------------------------------------------------------------------------------------


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
            log_p, log_q = _randomized_response(leaf, adjacency)
            return float(np.max(np.abs(log_p - log_q)))
        case PoissonSampledDpEvent(event=LaplaceDpEvent()) if adjacency != "replace_one":
            # This form of log(1 - q + q exp(1/s)) does not overflow for a large 1/s.
            q, loss = leaf.sampling_probability, 1 / leaf.event.noise_multiplier
            return float(np.logaddexp(math.log1p(-q), math.log(q) + loss))
    return math.inf


# --- Privacy loss distributions ---------------------------------------------------------------------------------


# Composed losses of many distinct leaves, the last used one at the end. A new leaf does not compose the others again.
_COMPOSED: list[tuple[Adjacency, float, Counts, pld.PrivacyLossDistribution]] = []
_COMPOSED_KEPT, _COMPOSED_LEAST = 4, 16


def _total_pld(counts: Mapping[DpEvent, int], adjacency: Adjacency, scale: float) -> pld.PrivacyLossDistribution | None:
    """Composes all leaves on one grid. Returns None where epsilon would be above `_MAX_PLD_EPSILON`."""
    if not scale <= _MAX_PLD_EPSILON:
        return None
    interval = _interval(counts, adjacency, scale)
    gaussians = [leaf for leaf in counts if isinstance(leaf, GaussianDpEvent)]
    rest: Counts = Counter({leaf: count for leaf, count in counts.items() if leaf not in gaussians})
    done: Counts = Counter()
    total = pld.identity(value_discretization_interval=interval)
    for kept in list(_COMPOSED) if len(rest) >= _COMPOSED_LEAST else ():
        if kept[:2] == (adjacency, interval) and len(done) < len(kept[2]) <= len(rest) and kept[2] <= rest:
            done, total = kept[2:]
    for leaf, count in (rest - done).items():
        total = total.compose(_self_compose(leaf_pld(leaf, adjacency, interval), count))
    if len(rest) >= _COMPOSED_LEAST:
        others = [kept for kept in _COMPOSED if kept[2] is not done]
        _COMPOSED[:] = [*others, (adjacency, interval, rest, total)][-_COMPOSED_KEPT:]
    for leaf in gaussians:
        total = total.compose(leaf_pld(leaf, adjacency, interval))
    return total


def _interval(counts: Mapping[DpEvent, int], adjacency: Adjacency, scale: float) -> float:
    """Returns a grid on which rounding adds about 1e-4 of epsilon. Every interval is sound.

    Connect-the-dots adds at most about interval^2 / 8 per leaf. The floor keeps grids small. Intervals are powers of
    two, so that nearby compositions share cached leaves.
    """
    return 2.0 ** round(math.log2(max(_intervals(counts, adjacency, scale))))


def _is_coarse(counts: Mapping[DpEvent, int], adjacency: Adjacency, scale: float) -> bool:
    """Returns whether the grid's rounding may cost more than RDP does."""
    wanted, floor = _intervals(counts, adjacency, scale)
    return floor > wanted


def _intervals(counts: Mapping[DpEvent, int], adjacency: Adjacency, scale: float) -> tuple[float, float]:
    """Returns the grid for the precision that is wanted, and the finest one that is affordable."""
    wanted = min(scale * 1e-4, math.sqrt(4e-4 * scale / sum(counts.values())))
    return wanted, max(scale * 2.0**-20, max(_loss_range(leaf, adjacency) for leaf in counts) * 2.0**-18, 1e-12)


def _fft_slack(counts: Mapping[DpEvent, int]) -> float:
    """Returns the delta that covers the FFT's rounding. The error of a million Gaussians is 3e-12."""
    return max(1e-11, 1e-17 * sum(counts.values()))


def _fine(counts: Mapping[DpEvent, int]) -> float:
    """Returns the delta below which the FFT's rounding may cost more than RDP does."""
    return 100 * _fft_slack(counts)


def _self_compose(distribution: pld.PrivacyLossDistribution, count: int) -> pld.PrivacyLossDistribution:
    if count == 1:
        return distribution
    if count <= 100_000:
        return distribution.self_compose(count)
    # Two stages save memory: dp_accounting's tail bound is wide for a huge count of a short distribution.
    inner = math.isqrt(count)
    outer, rest = divmod(count, inner)
    stage = distribution.self_compose(inner, tail_mass_truncation=1e-15 / outer)
    total = _self_compose(stage, outer)
    return total.compose(_self_compose(distribution, rest)) if rest else total


@functools.lru_cache(maxsize=32)  # Up to a few MB each.
def leaf_pld(leaf: DpEvent, adjacency: Adjacency, interval: float) -> pld.PrivacyLossDistribution:
    """Returns the PLD of a leaf on a grid."""
    rule = _pld_rule(leaf, adjacency)
    assert rule is not None, f"no PLD for {leaf!r}"
    return rule(value_discretization_interval=interval)


def _pld_rule(leaf: DpEvent, adjacency: Adjacency) -> Callable[..., pld.PrivacyLossDistribution] | None:
    """Returns the function that builds the PLD of a leaf on a grid, or None if the leaf has none."""
    factor = 2 if adjacency == "replace_one" else 1
    match leaf:
        case PureDpEvent():
            return functools.partial(_discrete_pld, *_worst_pure_pair(leaf.epsilon))
        case RandomizedResponseDpEvent() if adjacency != "add_remove":
            return functools.partial(_discrete_pld, *_randomized_response(leaf, adjacency))
        case GaussianDpEvent():
            return functools.partial(_gaussian_pld, leaf.noise_multiplier, 1.0, adjacency)
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=sigma)):
            return functools.partial(_gaussian_pld, sigma, leaf.sampling_probability, adjacency)
        case LaplaceDpEvent():
            return functools.partial(pld.from_laplace_mechanism, leaf.noise_multiplier, sensitivity=factor)
        case PoissonSampledDpEvent(event=LaplaceDpEvent(noise_multiplier=scale)) if adjacency != "replace_one":
            return functools.partial(pld.from_laplace_mechanism, scale, sampling_prob=leaf.sampling_probability)
        case DiscreteLaplaceDpEvent():
            sensitivity = factor * leaf.sensitivity
            return functools.partial(
                pld.from_discrete_laplace_mechanism, leaf.noise_parameter, sensitivity, use_connect_dots=True
            )
        case TruncatedSubsampledGaussianDpEvent():
            return functools.partial(
                pld.from_truncated_subsampled_gaussian_mechanism,
                dataset_size=leaf.dataset_size,
                sampling_probability=leaf.sampling_probability,
                truncated_batch_size=leaf.truncated_batch_size,
                noise_multiplier=leaf.noise_multiplier,
                neighboring_relation=RELATIONS[adjacency],
            )
    return None


def _gaussian_pld(
    sigma: float, q: float, adjacency: Adjacency, value_discretization_interval: float
) -> pld.PrivacyLossDistribution:
    """Returns the PLD of a Poisson-sampled Gaussian, ten times faster than dp_accounting except under replace_one."""
    interval = value_discretization_interval
    if adjacency == "replace_one":
        relation = NeighboringRelation.REPLACE_ONE
        return pld.from_gaussian_mechanism(
            sigma, value_discretization_interval=interval, sampling_prob=q, neighboring_relation=relation
        )
    remove = _gaussian_pmf(sigma, q, AdjacencyType.REMOVE, interval)
    add = None if q == 1 else _gaussian_pmf(sigma, q, AdjacencyType.ADD, interval)
    return pld.PrivacyLossDistribution(remove, add)


def _gaussian_pmf(sigma: float, q: float, direction: AdjacencyType, interval: float) -> pld_pmf.PLDPmf:
    """Returns the losses of M = (1-q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2) (REMOVE) or reversed."""
    bounds = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=direction).connect_dots_bounds()
    first, last = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    grid = np.arange(first, last + 1) * interval
    # The density ratio of M to N(0) at x is 1 - q + q exp((x - 1/2) / sigma^2). It rises in x, so the hockey-stick
    # divergence at each grid point integrates one tail, beyond the x where the ratio is exp(grid) or exp(-grid).
    ratio = grid if direction == AdjacencyType.REMOVE else -grid
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_odds = np.where(
            ratio < 1, np.log1p(np.expm1(ratio) / q), ratio - math.log(q) + np.log1p((q - 1) * np.exp(-ratio))
        )
    x = np.where(np.isnan(log_odds), -np.inf, 0.5 + sigma * sigma * log_odds) / sigma
    sign = -1 if direction == AdjacencyType.REMOVE else 1
    log_n0, log_n1 = special.log_ndtr(sign * x), special.log_ndtr(sign * (x - 1 / sigma))
    log_m = np.logaddexp(math.log1p(-q) + log_n0, math.log(q) + log_n1) if q < 1 else log_n1
    upper, lower = (log_m, log_n0) if direction == AdjacencyType.REMOVE else (log_n0, log_m)
    deltas = np.clip(np.exp(upper) - np.exp(grid + lower), 0.0, 1.0)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)


def _worst_pure_pair(epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log probabilities of binary randomised response under its two inputs."""
    log_p = np.array([0.0, -epsilon]) - np.log1p(np.exp(-epsilon))
    return log_p, log_p[::-1]


def _randomized_response(leaf: RandomizedResponseDpEvent, adjacency: Adjacency) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log probabilities of the answers (true, all others, other record's) under two records."""
    k, p = leaf.num_buckets, leaf.noise_parameter
    true, other = 1 - p + p / k, p / k
    if adjacency == "replace_one":
        log_p = np.log([true, (k - 2) * other, other] if k > 2 else [true, other])
        return log_p, log_p[::-1]
    return np.log([true, (k - 1) * other]), np.log([1 / k, 1 - 1 / k])  # The null record's answer is uniform.


def _discrete_pld(
    log_p: np.ndarray, log_q: np.ndarray, value_discretization_interval: float
) -> pld.PrivacyLossDistribution:
    """Returns the PLD of two finite distributions, by connect-the-dots around each loss (arXiv 2207.04380)."""
    interval = value_discretization_interval

    def pmf(log_upper: np.ndarray, log_lower: np.ndarray) -> pld_pmf.PLDPmf:
        losses = log_upper - log_lower
        grid = np.unique(np.concatenate([np.floor(losses / interval), np.ceil(losses / interval)]).astype(int))
        gaps = np.minimum(grid[:, None] * interval - losses, 0.0)
        return pld_pmf.create_pmf_pessimistic_connect_dots(interval, grid, -np.expm1(gaps) @ np.exp(log_upper))

    mirrored = np.array_equal(log_q, log_p[::-1])
    return pld.PrivacyLossDistribution(pmf(log_p, log_q), None if mirrored else pmf(log_q, log_p))


def _loss_range(leaf: DpEvent, adjacency: Adjacency) -> float:
    """Returns roughly the largest loss of a leaf, to bound its grid. It is not a privacy statement."""
    proxy = _proxy(leaf, adjacency)
    if isinstance(proxy, PureDpEvent):
        return proxy.epsilon
    sigma: float = getattr(proxy, "event", proxy).noise_multiplier
    return 10 / sigma + 0.5 / sigma / sigma  # dp_accounting truncates the Gaussian at exp(-50), ten deviations.


def _scale(counts: Mapping[DpEvent, int], adjacency: Adjacency, delta: float) -> float:
    """Returns roughly the epsilon of a composition, to choose the grid. It is not a privacy statement."""
    proxies: Counts = Counter()
    for leaf, count in counts.items():
        proxies[_proxy(leaf, adjacency)] += count
    return _epsilon_from_rdp(_total_rdp(proxies, "add_remove", ROUGH_ORDERS), delta, ROUGH_ORDERS)


def _proxy(leaf: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Returns an event of similar loss that RDP knows under add_remove, for `_scale` and `_loss_range`."""
    pure = _leaf_pure_epsilon(leaf, adjacency)
    if math.isfinite(pure):
        return PureDpEvent(pure)
    if isinstance(leaf, TruncatedSubsampledGaussianDpEvent):
        leaf = PoissonSampledDpEvent(leaf.sampling_probability, GaussianDpEvent(leaf.noise_multiplier / 2))
    return _rdp_event(leaf, adjacency)


# --- Renyi DP ---------------------------------------------------------------------------------------------------


def _total_rdp(counts: Mapping[DpEvent, int], adjacency: Adjacency, orders: Sequence[float] = RDP_ORDERS) -> np.ndarray:
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
        rdp: np.ndarray = (np.logaddexp(alpha * loss, (1 - alpha) * loss) - np.logaddexp(loss, 0.0)) / (alpha - 1)
        return rdp + _RDP_SLACK
    accountant = RdpAccountant(orders, RELATIONS[adjacency])
    with _without_unused_orders():
        accountant.compose(_rdp_event(leaf, adjacency))
    return np.asarray(accountant.rdp).clip(0.0) + _RDP_SLACK


@contextlib.contextmanager
def _without_unused_orders() -> Iterator[None]:
    """Drops the log lines about orders at which an RDP series diverges. These are infinite and never used."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _rdp_event(event: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Returns an event whose RDP by dp_accounting, which never doubles a sensitivity, equals the RDP of `event`."""
    factor = 2 if adjacency == "replace_one" else 1
    match event:
        case GaussianDpEvent() | LaplaceDpEvent():
            return type(event)(event.noise_multiplier / factor)
        case PoissonSampledDpEvent():
            return PoissonSampledDpEvent(event.sampling_probability, _rdp_event(event.event, adjacency))
        case SampledWithoutReplacementDpEvent():
            inner = _rdp_event(event.event, adjacency)
            return SampledWithoutReplacementDpEvent(event.source_dataset_size, event.sample_size, inner)
        case RepeatAndSelectDpEvent():
            return RepeatAndSelectDpEvent(_rdp_event(event.event, adjacency), event.mean, event.shape)
        case PureDpEvent():  # Only inside RepeatAndSelect: epsilon-DP implies epsilon^2/2-zCDP (Bun, Steinke 2016).
            return ZCDpEvent(rho=event.epsilon * event.epsilon / 2)
        case ComposedDpEvent():
            return ComposedDpEvent([_rdp_event(child, adjacency) for child in event.events])
        case SelfComposedDpEvent():
            return SelfComposedDpEvent(_rdp_event(event.event, adjacency), event.count)
    return event


def renyi_bound(epsilon: float, delta: float, order: float) -> float:
    """Returns the Renyi DP at `order` that converts to (epsilon, delta). It is <= 0 if the order is too small.

    The bound inverts epsilon = rdp + log(1 - 1/order) - log(delta order) / (order - 1) (Canonne, Kamath, Steinke 2020,
    arXiv 2004.00010, Proposition 12).
    """
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def renyi_epsilon(rdp: float, delta: float, order: float) -> float:
    """Returns the epsilon to which `rdp` at `order` converts. It inverts `renyi_bound`."""
    return max(0.0, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def default_renyi_order(epsilon: float, delta: float) -> float:
    """Returns the order at which the bound admits most of a mechanism with Renyi loss proportional to the order."""
    return max(RDP_ORDERS, key=lambda order: renyi_bound(epsilon, delta, order) / order)
