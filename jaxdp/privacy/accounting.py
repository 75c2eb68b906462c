"""Epsilon of events: privacy loss distributions (PLD) first, Renyi DP (RDP) where PLD has no rule.

dp_accounting computes both. This module counts equal events, applies the noise multiplier under
each adjacency and adds pure events. Its results stay upper bounds for extreme numbers.

Each leaf event stands for a pair of distributions (`s` is its noise multiplier, `q` its sampling
probability):

===========================  ==================================  =================================
event                        add_remove, zero_out                replace_one
===========================  ==================================  =================================
Gaussian                     N(0, s^2), N(1, s^2)                N(-1, s^2), N(1, s^2)
PoissonSampled Gaussian      (1-q) N(0) + q N(1), N(0)           (1-q) N(0) + q N(1),
                                                                 (1-q) N(0) + q N(-1)
TruncatedSubsampledGaussian  dp_accounting (arXiv 2508.15089)    dp_accounting
OwnedGaussian                zero_out only: sum_j w_j N(j,      no rule
                             s^2), N(0, s^2) with the weights
                             w_j of Binomial(records, q)
Laplace, DiscreteLaplace     noise at 0 and at the sensitivity   noise at 0 and at twice it
PoissonSampled Laplace       as PoissonSampled Gaussian          no rule
RandomizedResponse           zero_out: answer against uniform    answers of two records
PureDp, ZCDp                 as stated                           as stated
SampledWithoutReplacement    no rule                             RDP, sensitivity 2
                                                                 (arXiv 1808.00087)
SingleEpochTreeAggregation   zero_out only, RDP                  no rule
RepeatAndSelect              RDP (arXiv 2110.03620)              RDP
OneOf                        RDP, the largest of the events      RDP
MonteCarlo                   the pair of its curves              no rule
===========================  ==================================  =================================

Beside events with a pair, those with RDP only have the pair of their (epsilon, delta) curve
(`jaxdp.privacy.renyi_pairs`).

Under "replace_label" only LabelDp has a rule, that of PureDp, and it has none elsewhere.

Under REPLACE_ONE, dp_accounting 0.6 doubles a Gaussian's sensitivity in its PLD but not in its RDP.
It does not double the sensitivity of Laplace. It composes a `RandomizedResponseDpEvent` once for
any count. So its accountant classes compute single RDP leaves only, and `jaxdp.privacy.renyi`
applies the factor before.

Formal guarantees: every number is an upper bound for adaptive composition of mechanisms. Their
PARAMETERS (the events) must be fixed in advance. Their inputs may depend on earlier outputs (PLD:
Zhu, Dong, Wang 2022, arXiv 2106.08567. RDP: Mironov 2017, arXiv 1702.07476). Losses are rounded
pessimistically ("connect the dots", arXiv 2207.04380) and composed by tilted transforms with a
bound on their rounding (`jaxdp.privacy.convolution`). Gaussians alone have a closed form. Poisson
sampling under replace_one assumes that the worst record and replacement point in opposite
directions. tests/privacy/test_accounting.py checks this in the plane.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxdp.files import check_delta
from jaxdp.privacy.convolution import (
    epsilon_bound,
    log_delta_bound,
    log_delta_curve,
    losses_of,
)
from jaxdp.privacy.events import (
    Counts,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    composition,
    precision,
)
from jaxdp.privacy.gaussian import gaussian_delta, gaussian_epsilon
from jaxdp.privacy.losses import is_symmetric, tamed, total_variation
from jaxdp.privacy.relations import (
    LABELS,
    METHODS,
    RELATIONS,
    Adjacency,
    Method,
    distance_factor,
)
from jaxdp.privacy.renyi import leaf_rdp, total_rdp
from jaxdp.privacy.renyi_conversions import (
    RDP_ORDERS,
    ROUGH_ORDERS,
    default_renyi_order,
    delta_from_rdp,
    epsilon_from_rdp,
    renyi_bound,
    renyi_deltas,
    renyi_epsilon,
)
from jaxdp.privacy.renyi_pairs import RenyiCurve
from jaxdp.privacy.rules import (
    check_rules,
    is_boundless,
    leaf_pure_epsilon,
    leaf_rules,
    pure_epsilon,
)
from jaxdp.privacy.tally import Tally

__all__ = [
    "LABELS",
    "METHODS",
    "RDP_ORDERS",
    "RELATIONS",
    "ROUGH_ORDERS",
    "Adjacency",
    "Method",
    "Tally",
    "check_rules",
    "default_renyi_order",
    "delta",
    "deltas_of_counts",
    "epsilon",
    "epsilon_of_counts",
    "epsilon_of_leaves",
    "merge_gaussians",
    "rdp_epsilon_of_counts",
    "rdp_of_counts",
    "renyi_bound",
    "renyi_deltas",
    "renyi_epsilon",
]

# A result is kept for a composition of at most so many distinct releases.
_LARGEST_CACHED = 256
# The rules by which a composition has a pair of distributions.
_BY_LOSSES = frozenset({"pld", "mixed"})
# A pure epsilon from which the loss of a release is certain.
_CERTAIN = 1e7
# The smallest positive float. A delta that is smaller but not 0 is rounded up to it.
_LEAST_DELTA = 5e-324
# Gaussians may have been merged twice, each time with four roundings.
_ROUNDED_UP = 1 + 2.0**-49
# The deltas for which `delta` covers the tails of losses.
_DEPTHS = (1e-16, 1e-250)
# The deltas near which a curve is tight.
_TARGETS = (0.3, 1e-2, 1e-4, 1e-8, 1e-16, 1e-32, 1e-64, 1e-128)
# Beyond so many releases the grids of their losses may be too coarse.
_MOST_RELEASES = 10**7


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
        method: "auto" (PLD, where parts without a PLD rule stand by their RDP), or only "pld" or
            only "rdp". RDP is above PLD up to PLD's rounding. So "auto" computes both only where
            they may differ the other way, and returns the smaller one: with a part without a PLD
            rule, beyond ten million releases, or where PLD is infinite. Every method includes the
            sum of pure epsilons.

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
    if is_boundless(counts):
        return 1.0
    # A pure release has delta 0 from its epsilon on.
    if not counts or epsilon == math.inf or pure_epsilon(counts, adjacency) <= epsilon:
        return 0.0
    bound = 1.0
    # RDP is above PLD up to the rounding of PLD, so it counts where there is no PLD.
    if "rdp" in rules and "pld" not in rules:
        bound = delta_from_rdp(total_rdp(counts, adjacency), epsilon)
    if rules & _BY_LOSSES:
        with_pairs = _with_pairs(counts, adjacency, rules)
        bound = min(bound, _delta_by_losses(with_pairs, adjacency, epsilon))
    # Delta is 0 for pure releases only, so it never becomes 0 by underflow.
    return min(1.0, max(bound, _LEAST_DELTA))


def epsilon_of_counts(
    counts: Mapping[DpEvent, int], *, delta: float, adjacency: Adjacency, method: Method
) -> float:
    """Returns `epsilon` of a composition that `jaxdp.privacy.events.composition` has flattened."""
    check_delta(delta)
    # In their order: sums in another one differ in the last digits, and a report would too.
    leaves = tuple(counts.items())
    is_small = len(leaves) <= _LARGEST_CACHED
    compute = epsilon_of_leaves if is_small else epsilon_of_leaves.__wrapped__
    return compute(leaves, float(delta), adjacency, method)


# Plans, holds and reports ask for the same epsilon several times.
@functools.lru_cache(maxsize=4096)
def epsilon_of_leaves(
    leaves: tuple[tuple[DpEvent, int], ...], delta: float, adjacency: Adjacency, method: Method
) -> float:
    """Returns `epsilon_of_counts` of hashable counts, from its cache if possible."""
    counts: Mapping[DpEvent, int] = dict(leaves)
    rules = check_rules(counts, adjacency=adjacency, method=method)
    counts = merge_gaussians(counts)
    if not counts:
        return 0.0
    if is_boundless(counts):
        return math.inf
    best = pure_epsilon(counts, adjacency)
    if delta == 0:
        return best
    if rules & _BY_LOSSES:
        by_losses = _epsilon_by_losses(_with_pairs(counts, adjacency, rules), adjacency, delta)
        best = min(best, by_losses)
        is_precise = by_losses < math.inf and sum(counts.values()) <= _MOST_RELEASES
        if ("pld" in rules and is_precise) or "rdp" not in rules:
            return best
    return max(0.0, min(best, epsilon_from_rdp(total_rdp(counts, adjacency), delta)))


def deltas_of_counts(
    counts: Mapping[DpEvent, int],
    epsilons: np.ndarray,
    *,
    least: float,
    adjacency: Adjacency,
    method: Method,
) -> np.ndarray:
    """Returns `delta` of a composition at many epsilons, with few compositions of losses.

    Args:
        counts: A composition that `jaxdp.privacy.events.composition` has flattened.
        epsilons: Finite numbers >= 0, ascending, float64 [N].
        least: The smallest delta of interest. Bounds far below it are loose.
        adjacency: As in `delta`.
        method: As in `delta`.

    Returns:
        Upper bounds on delta in [0, 1], float64 [N], which cannot be written.
    """
    leaves = tuple(counts.items())
    is_small = len(leaves) <= _LARGEST_CACHED
    compute = _deltas_of_leaves if is_small else _deltas_of_leaves.__wrapped__
    deltas = compute(leaves, tuple(epsilons.tolist()), least, adjacency, method)
    # The cache has the same array for all who ask.
    deltas.flags.writeable = False
    return deltas


# A report draws the curves of all data sets again after each stage, which spends from a few.
@functools.lru_cache(maxsize=256)
def _deltas_of_leaves(
    leaves: tuple[tuple[DpEvent, int], ...],
    at: tuple[float, ...],
    least: float,
    adjacency: Adjacency,
    method: Method,
) -> np.ndarray:
    counts: Mapping[DpEvent, int] = dict(leaves)
    epsilons = np.array(at)
    rules = check_rules(counts, adjacency=adjacency, method=method)
    if not counts:
        return np.zeros(len(epsilons))
    if is_boundless(counts):
        return np.ones(len(epsilons))
    deltas = np.ones(len(epsilons))
    if rules & _BY_LOSSES:
        with_pairs = _with_pairs(counts, adjacency, rules)
        deltas = _deltas_by_losses(with_pairs, adjacency, epsilons, least)
    if "rdp" in rules and "pld" not in rules:
        rdp = total_rdp(counts, adjacency)
        by_rdp = [delta_from_rdp(rdp, float(epsilon)) for epsilon in epsilons]
        deltas = np.minimum(deltas, by_rdp)
    deltas = np.asarray(np.clip(deltas, _LEAST_DELTA, 1.0))
    deltas[epsilons >= pure_epsilon(counts, adjacency)] = 0.0
    return deltas


def rdp_epsilon_of_counts(
    counts: Mapping[DpEvent, int],
    *,
    delta: float,
    adjacency: Adjacency,
    orders: Sequence[float] = RDP_ORDERS,
) -> float:
    """Returns only the RDP (or pure) bound, a cheap first check.

    It is infinite where RDP has no rule.
    """
    if is_boundless(counts):
        return math.inf
    if not counts:
        return 0.0
    pure = pure_epsilon(counts, adjacency)
    if not all("rdp" in leaf_rules(leaf, adjacency) for leaf in counts):
        return pure
    return min(pure, epsilon_from_rdp(total_rdp(counts, adjacency, orders), delta, orders))


def rdp_of_counts(counts: Mapping[DpEvent, int], *, order: float, adjacency: Adjacency) -> float:
    """Returns the Renyi DP of a composition at one order > 1.

    It is infinite with a non-private or unproven part.

    Raises:
        ValueError: A part has no RDP rule for this adjacency.
    """
    if is_boundless(counts):
        return math.inf
    check_rules(counts, adjacency=adjacency, method="rdp")
    # Private selection optimises over the whole grid, so the fixed order joins the grid.
    orders = (*RDP_ORDERS, order)
    return math.fsum(
        count * float(leaf_rdp(leaf, adjacency, orders)[-1]) for leaf, count in counts.items()
    )


def merge_gaussians(counts: Mapping[DpEvent, int]) -> Mapping[DpEvent, int]:
    """Returns an equivalent composition with at most one Gaussian."""
    gaussians = {leaf: count for leaf, count in counts.items() if isinstance(leaf, GaussianDpEvent)}
    if sum(gaussians.values()) <= 1:
        return counts
    rest = {leaf: count for leaf, count in counts.items() if leaf not in gaussians}
    # k Gaussians of precisions s_i^-2 are one whose precision is their sum.
    return {GaussianDpEvent(precision(gaussians) ** -0.5): 1, **rest}


# --- Privacy losses -----------------------------------------------------------------------------


def _with_pairs(
    counts: Mapping[DpEvent, int], adjacency: Adjacency, rules: frozenset[str]
) -> Mapping[DpEvent, int]:
    """Returns a composition with a pair for every leaf. One curve stands for those without."""
    if "pld" in rules:
        return counts
    without = {
        leaf: count for leaf, count in counts.items() if "pld" not in leaf_rules(leaf, adjacency)
    }
    rest = {leaf: count for leaf, count in counts.items() if leaf not in without}
    # A tuple, which can be hashed: the pair of the curve is kept by it.
    divergences = tuple(total_rdp(without, adjacency).tolist())
    curve = RenyiCurve(divergences, pure_epsilon(without, adjacency))
    return {curve: 1, **rest}


def _epsilon_by_losses(counts: Mapping[DpEvent, int], adjacency: Adjacency, delta: float) -> float:
    """Returns the larger epsilon of both directions."""
    certain, rest = _without_certain(counts, adjacency)
    # From the total variation on, epsilon 0 is enough.
    if _largest_delta(rest, adjacency) <= delta:
        return certain
    mu = _only_gaussian(rest, adjacency)
    if mu is not None:
        return certain + gaussian_epsilon(mu, delta)
    bound = 0.0
    for reverse in _directions(rest, adjacency):
        losses = losses_of(rest, adjacency, delta, reverse)
        # A second direction matters only if it is the larger one.
        bound = max(bound, epsilon_bound(losses, delta, enough=bound))
    # Where sampling probabilities are near 1, the closed form of whole Gaussians is tighter.
    unsampled_mu = _only_gaussian(_unsampled(rest), adjacency)
    if unsampled_mu is not None:
        bound = min(bound, gaussian_epsilon(unsampled_mu, delta))
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
    most = _largest_delta(rest, adjacency) * (1 + 1e-12)
    unsampled_mu = _only_gaussian(_unsampled(rest), adjacency)
    if unsampled_mu is not None:
        most = min(most, gaussian_delta(unsampled_mu, epsilon))
    bound = -1.0
    for least in _DEPTHS:
        # Far tails take longer, and are looked at only if delta is small.
        if bound < 100 * least:
            log_deltas = []
            for reverse in _directions(rest, adjacency):
                losses = losses_of(rest, adjacency, least, reverse)
                log_deltas.append(log_delta_bound(losses, epsilon))
            bound = math.exp(max(log_deltas))
    return max(min(most, bound), _LEAST_DELTA)


def _deltas_by_losses(
    counts: Mapping[DpEvent, int], adjacency: Adjacency, epsilons: np.ndarray, least: float
) -> np.ndarray:
    """Returns the larger deltas of both directions at many epsilons."""
    certain, rest = _without_certain(counts, adjacency)
    epsilons = epsilons - certain
    most = np.ones(len(epsilons))
    # Only there do the other releases matter.
    inside = epsilons >= 0
    if not rest or not inside.any():
        return most
    whole_mu = _only_gaussian(_unsampled(rest), adjacency)
    if whole_mu is not None:
        most[inside] = [gaussian_delta(whole_mu, float(value)) for value in epsilons[inside]]
        if _only_gaussian(rest, adjacency) is not None:
            return most
    largest = min(1.0, _largest_delta(rest, adjacency) * (1 + 1e-12))
    most[inside] = np.minimum(most[inside], largest)
    if largest <= least:
        return most
    targets = [delta for delta in _TARGETS if least < delta < largest]
    bounds = []
    for reverse in _directions(rest, adjacency):
        losses = losses_of(rest, adjacency, least, reverse)
        curve = log_delta_curve(losses, epsilons[inside], [*targets, least])
        bounds.append(np.exp(curve))
    most[inside] = np.minimum(most[inside], np.max(bounds, axis=0))
    return most


def _directions(counts: Mapping[DpEvent, int], adjacency: Adjacency) -> tuple[bool, ...]:
    """Returns whether to reverse the pairs: not, and also yes unless that changes no loss."""
    if all(is_symmetric(leaf, adjacency) for leaf in counts):
        return (False,)
    return False, True


def _largest_delta(counts: Mapping[DpEvent, int], adjacency: Adjacency) -> float:
    """Returns a bound on the delta at epsilon 0: the sum of the total variations."""
    return math.fsum(count * total_variation(leaf, adjacency) for leaf, count in counts.items())


def _unsampled(counts: Mapping[DpEvent, int]) -> Mapping[DpEvent, int]:
    """Returns a composition that costs at least as much: samples of a Gaussian are whole.

    By joint convexity, sampling multiplies delta by at most its probability. The closed form of
    whole Gaussians is tighter where a sampling probability is near 1, or delta is below float64's
    tails.
    """
    whole: Counts = Counter()
    for leaf, count in counts.items():
        match leaf:
            case PoissonSampledDpEvent(event=GaussianDpEvent()):
                whole[leaf.event] += count
            case OwnedGaussianDpEvent(noise_multiplier=sigma, records=records):
                whole[GaussianDpEvent(sigma / records)] += count
            case _:
                whole[leaf] += count
    return whole


def _without_certain(
    counts: Mapping[DpEvent, int], adjacency: Adjacency
) -> tuple[float, Mapping[DpEvent, int]]:
    """Returns the pure epsilon of releases whose loss is certain, and the other releases.

    A pure release of a huge epsilon has nearly this loss with nearly probability 1, so that adding
    its epsilon loses nothing.
    """
    rest: Counts = Counter()
    certain_losses = []
    for leaf, count in counts.items():
        loss = leaf_pure_epsilon(leaf, adjacency)
        is_unsampled = isinstance(leaf, PureDpEvent | LaplaceDpEvent | DiscreteLaplaceDpEvent)
        if loss >= _CERTAIN and is_unsampled:
            certain_losses.append(count * loss)
        else:
            rest[tamed(leaf)] += count
    return sum(certain_losses), merge_gaussians(rest)


def _only_gaussian(counts: Mapping[DpEvent, int], adjacency: Adjacency) -> float | None:
    """Returns the distance of the pair in standard deviations if all releases are Gaussians.

    It is rounded up.
    """
    if not all(isinstance(leaf, GaussianDpEvent) for leaf in counts):
        return None
    return distance_factor(adjacency) * math.sqrt(precision(counts)) * _ROUNDED_UP
