"""The losses of additive noise: Laplace and Gaussian, sampled or not, as pieces of a density."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from jaxdp.privacy.events import OwnedGaussianDpEvent, TruncatedSubsampledGaussianDpEvent
from jaxdp.privacy.loss_distribution import Piece, log_of
from jaxdp.privacy.relations import Adjacency

Intervals = list[tuple[float, np.ndarray]]

# Newton's steps to an edge of a grid, each of which doubles the digits.
_NEWTON_STEPS = 12

# Losses of Laplace noise farther than this from both extremes have a probability below exp(-700).
_LAPLACE_REACH = 1400.0


# --- Sampling -----------------------------------------------------------------------------------


def sampled_loss(loss: np.ndarray, q: float) -> np.ndarray:
    """Returns log(1 - q + q exp(loss)), the loss of a sampled release."""
    if q == 1:
        return loss
    # Each form keeps its digits on one side of 1.
    small = np.log1p(q * np.expm1(np.minimum(loss, 1.0)))
    large = np.logaddexp(math.log1p(-q), math.log(q) + loss)
    return np.where(loss < 1, small, large)


def _unsampled(loss: np.ndarray, q: float) -> np.ndarray:
    """Returns the inverse of `sampled_loss`. It is -inf below the smallest value."""
    if q == 1:
        return loss
    # Losses below log(1 - q) have no inverse: their logarithms are NaN.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # exp(loss) = 1 + (exp(sampled loss) - 1) / q.
        small = np.log1p(np.expm1(np.minimum(loss, 1.0)) / q)
        large = loss - math.log(q) + np.log1p((q - 1) * np.exp(-loss))
    unsampled = np.where(loss < 1, small, large)
    return np.where(np.isnan(unsampled), -math.inf, unsampled)


def _log_odds(q: float) -> float:
    return math.inf if q == 1 else math.log1p(-q) - math.log(q)


def _with_transition(edges: np.ndarray, place: float, scale: float, width: float) -> np.ndarray:
    """Adds edges where log(1 - q + q exp(x / scale)) bends.

    Its poles are at place +- i pi scale.
    """
    first = edges[0]
    last = edges[-1]
    if not first - 4 * scale < place < last + 4 * scale:
        return edges
    # Panels are short near the poles and grow with the distance.
    distances = [math.pi / 4 * scale]
    while distances[-1] < 2 * width and len(distances) < 200:
        distances.append(1.5 * distances[-1])
    left = place - np.array(distances)
    right = place + np.array(distances)
    near = np.concatenate([left, right])
    inside = near[(near > first) & (near < last)]
    return np.unique(np.concatenate([edges, inside]))


# --- Laplace ------------------------------------------------------------------------------------


def laplace_losses(loss: float, q: float) -> tuple[tuple[np.ndarray, np.ndarray], list[Piece]]:
    """Returns atoms and pieces of Laplace noise at 0 and at a distance of `loss` scales.

    The release is sampled with probability q.

    Without sampling, the loss is `loss` with probability 1/2 and -`loss` with probability
    exp(-loss) / 2. Between them its density is exp((l - loss) / 2) / 4.
    """

    def sampled(losses: np.ndarray, log_masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the losses and masses of the sampled release from those of the whole one."""
        sampled_losses = sampled_loss(losses, q)
        # The mass under Q, times the ratio of P to Q.
        return sampled_losses, log_masses - losses + sampled_losses

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        # The centre is 0 or an end. Subtracting it first keeps the digits of the offset.
        log_density = (centre - loss + offsets) / 2 - math.log(4)
        return sampled(centre + offsets, log_density)

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        return _unsampled(losses, q) - centre

    width = min(loss / 16, 2.0)
    intervals: Intervals = []
    for centre, edges in _laplace_edges(loss, width):
        bend = _log_odds(q) - centre
        intervals.append((centre, _with_transition(np.unique(edges), bend, 1.0, width)))
    extremes = np.array([loss, -loss])
    log_masses = np.array([0.0, -loss]) - math.log(2)
    atoms = sampled(extremes, log_masses)
    return atoms, [Piece(1.0, intervals, width, density, inverse)]


def _laplace_edges(loss: float, width: float) -> Intervals:
    """Returns one interval from -loss to loss, or two near its ends where it is very long."""
    reach = min(loss, _LAPLACE_REACH)
    # Panels become short towards the ends.
    graded = reach * (1 - 0.5 ** np.arange(30))
    if reach == loss:
        even = np.arange(-loss, loss, width)
        edges = np.concatenate([-graded, graded, even, [loss]])
        return [(0.0, edges)]
    even = np.arange(0, reach, width)
    edges = np.concatenate([even, reach - graded, [reach]])
    return [(-loss, edges), (loss, -edges)]


# --- Gaussians ----------------------------------------------------------------------------------


def reach_of(depth: float) -> float:
    """Returns the distance, in standard deviations, beyond which lies a mass of exp(-depth)."""
    return math.sqrt(2 * depth)


def _intervals(
    means: Sequence[float], bends: Sequence[float], sigma: float, depth: float
) -> Intervals:
    """Returns intervals around all means / sigma.

    `bends` are the transitions, relative to the mean 0.
    """
    reach = reach_of(depth)
    width = 3 / reach
    ranges = [(mean, -reach, reach) for mean in means]
    if len(means) > 1 and 1 / sigma < 4 * reach:
        # The intervals around the means would overlap, so one covers all.
        low = min(means) / sigma - reach
        high = max(means) / sigma + reach
        ranges = [(0.0, low, high)]
    intervals: Intervals = []
    for centre, low, high in ranges:
        panels = math.ceil((high - low) / width)
        edges = np.linspace(low, high, panels + 1)
        for bend in bends:
            edges = _with_transition(edges, bend - centre / sigma, sigma, width)
        intervals.append((centre, edges))
    return intervals


def _log_normal(x: np.ndarray) -> np.ndarray:
    logarithms: np.ndarray = -x * x / 2 - math.log(2 * math.pi) / 2
    return logarithms


def one_sided(weight: float, sigma: float, q: float, depth: float) -> Piece:
    """Returns the losses of (1 - q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2).

    Offsets are in sigmas.
    """

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        # log N(1) / N(0) at x = centre + sigma offset is (x - 1/2) / sigma^2.
        loss_of_whole = offsets / sigma + (centre - 0.5) / sigma / sigma
        loss = sampled_loss(loss_of_whole, q)
        log_density_at_1 = math.log(q) + _log_normal(offsets + (centre - 1) / sigma)
        if q == 1:
            return loss, log_density_at_1
        log_density_at_0 = math.log1p(-q) + _log_normal(offsets + centre / sigma)
        return loss, np.logaddexp(log_density_at_0, log_density_at_1)

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        return sigma * _unsampled(losses, q) + (0.5 - centre) / sigma

    # Both parts of the mixture are equal there.
    bend = 0.5 / sigma + sigma * _log_odds(q)
    means = (1.0,) if q == 1 else (0.0, 1.0)
    intervals = _intervals(means, [bend], sigma, depth)
    return Piece(weight, intervals, 3 / reach_of(depth), density, inverse)


def two_sided(weight: float, sigma: float, q: float, depth: float) -> Piece:
    """Returns the losses of (1 - q) N(0) + q N(1) against (1 - q) N(0) + q N(-1).

    The standard deviation is sigma. Offsets are in sigmas.
    """
    if q == 1:
        # N(1) against N(-1) at sigma is N(1) against N(0) at sigma / 2.
        return one_sided(weight, sigma / 2, 1.0, depth)

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        loss_of_1 = offsets / sigma + (centre - 0.5) / sigma / sigma
        loss_of_minus_1 = -offsets / sigma - (centre + 0.5) / sigma / sigma
        loss = sampled_loss(loss_of_1, q) - sampled_loss(loss_of_minus_1, q)
        log_density_at_1 = math.log(q) + _log_normal(offsets + (centre - 1) / sigma)
        log_density_at_0 = math.log1p(-q) + _log_normal(offsets + centre / sigma)
        return loss, np.logaddexp(log_density_at_0, log_density_at_1)

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        # exp(x / sigma^2) solves a quadratic equation, so that x / sigma^2 is
        # loss / 2 + asinh((1 - q) / q * exp(1 / (2 sigma^2)) * sinh(loss / 2)).
        half = np.abs(losses) / 2
        log_sinh = half + log_of(-np.expm1(-2 * half)) - math.log(2)
        log_argument = _log_odds(q) + 0.5 / sigma / sigma + log_sinh
        # Of arguments above 1, asinh is taken by their logarithms, which do not overflow.
        root = np.sqrt(1 + np.exp(-2 * np.maximum(log_argument, 0.0)))
        large = log_argument + np.log1p(root)
        small = np.arcsinh(np.exp(np.minimum(log_argument, 0.0)))
        shift = half + np.where(log_argument > 0, large, small)
        offsets: np.ndarray = sigma * np.sign(losses) * shift - centre / sigma
        return offsets

    bend = 0.5 / sigma + sigma * _log_odds(q)
    intervals = _intervals((-1.0, 0.0, 1.0), [bend, -bend], sigma, depth)
    return Piece(weight, intervals, 3 / reach_of(depth), density, inverse)


def truncated_batches(
    leaf: TruncatedSubsampledGaussianDpEvent, adjacency: Adjacency, depth: float
) -> list[Piece]:
    """Returns the mixture of two pairs that dominates truncated batches.

    A batch that is truncated replaces a record by another one. Any other batch gains or loses a
    record (Ganesh et al. 2025, arXiv 2508.15089).
    """
    records = leaf.dataset_size
    most = leaf.truncated_batch_size
    q = leaf.sampling_probability
    sigma = leaf.noise_multiplier
    whole_batch = two_sided if adjacency == "replace_one" else one_sided
    # The probability that the other records fill the batch.
    cut = float(stats.binom.sf(most - 1, records - 1, q))
    if cut == 0:
        return [whole_batch(1.0, sigma, q, depth)]
    pieces = [whole_batch(1 - cut, sigma, q, depth)] if cut < 1 else []
    # Given that, the probability that the record is in a truncated batch.
    share = min(1.0, float(stats.binom.sf(most, records, q)) * most / cut / records)
    if share > 0:
        return [*pieces, two_sided(cut, sigma / 2, share, depth)]
    return pieces or [whole_batch(1.0, sigma, q, depth)]


def owned_records(leaf: OwnedGaussianDpEvent, depth: float) -> Piece:
    """Returns the losses of the mixture of N(j, sigma^2), j = 0..k, against N(0, sigma^2).

    j has the distribution Binomial(k, q). Offsets are in sigmas.
    """
    sigma = leaf.noise_multiplier
    q = leaf.sampling_probability
    most = leaf.records
    if q == 1:
        return one_sided(1.0, sigma / most, 1.0, depth)
    numbers = range(1, most + 1)
    log_none = most * math.log1p(-q)
    log_weights = stats.binom.logpmf(numbers, most, q)

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        gain = np.zeros(offsets.shape)  # of the likelihood ratio above 1
        log_ratio = np.full(offsets.shape, log_none)
        log_density = log_none + _log_normal(offsets + centre / sigma)
        for j, log_weight in zip(numbers, log_weights, strict=True):
            loss = j * (offsets / sigma + (centre - j / 2) / sigma / sigma)
            gain += math.exp(log_weight) * np.expm1(np.minimum(loss, 600.0))
            log_ratio = np.logaddexp(log_ratio, log_weight + loss)
            log_normal = _log_normal(offsets + (centre - j) / sigma)
            log_density = np.logaddexp(log_density, log_weight + log_normal)
        # Small losses keep their digits by the gain.
        small = np.log1p(np.maximum(gain, -0.75))
        return np.where(np.abs(log_ratio) < 0.5, small, log_ratio), log_density

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        # Without the term of j = 0, the logarithm of the ratio is convex in x / sigma^2 and rises
        # with a slope from 1 to k. Newton's method from above therefore falls to the root.
        terms = log_weights - np.square(numbers) / 2 / sigma / sigma
        with np.errstate(invalid="ignore", divide="ignore"):
            targets = losses + np.log(-np.expm1(log_none - losses))
        is_reached = targets > -math.inf
        target = targets[is_reached]
        tilt = np.full(target.shape, math.inf)
        for j, term in zip(numbers, terms, strict=True):
            tilt = np.minimum(tilt, (target - term) / j)
        for _ in range(_NEWTON_STEPS):
            shares = [term + j * tilt for j, term in zip(numbers, terms, strict=True)]
            total = functools.reduce(np.logaddexp, shares)
            slope = np.zeros(target.shape)
            for j, share in zip(numbers, shares, strict=True):
                slope += j * np.exp(share - total)
            tilt = tilt - (total - target) / slope
        offsets = np.full(losses.shape, -math.inf)
        offsets[is_reached] = sigma * tilt - centre / sigma
        return offsets

    log_ratios = np.diff(log_weights, prepend=log_none)
    bends = (np.array(numbers) - 0.5) / sigma - sigma * log_ratios
    means = [float(j) for j in range(most + 1)]
    intervals = _intervals(means, bends.tolist(), sigma, depth)
    return Piece(1.0, intervals, 3 / reach_of(depth), density, inverse)
