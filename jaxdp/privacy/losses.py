"""The privacy loss distribution of every leaf event: its pair of output distributions.

`jaxdp.privacy.loss_distribution` says what a loss is, and what is guaranteed of it.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from jaxdp.privacy.curve_pairs import hull_pair
from jaxdp.privacy.events import (
    MOST_NOISE,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    MonteCarloDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    SampledWithoutReplacementDpEvent,
    SingleEpochTreeAggregationDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from jaxdp.privacy.loss_densities import (
    laplace_losses,
    one_sided,
    owned_records,
    reach_of,
    truncated_batches,
    two_sided,
)
from jaxdp.privacy.loss_distribution import LossDistribution, Piece
from jaxdp.privacy.relations import Adjacency, distance_factor
from jaxdp.privacy.renyi_pairs import RenyiCurve, renyi_pair

# Tails are left out beyond a mass of about exp(-depth). The largest one keeps masses above
# float64's smallest number.
DEPTHS = (80.0, 160.0, 320.0, 600.0)
# Larger sensitivities of discrete Laplace noise are rounded up to this many losses.
_MOST_ATOMS = 2**16
# Below this noise multiplier a sampled release is charged as a whole one.
_TINY_NOISE = 1e-6
# With more records of one owner a sampled release is charged as a whole one, too.
_MOST_RECORDS = 256
# A smaller loss or probability is charged as this one.
_LEAST = 1e-100
# The most noise on samples without replacement, whose rule takes expm1 of a square.
_MOST_NOISE_OF_SAMPLES = 1e7


def has_distribution(leaf: DpEvent, adjacency: Adjacency) -> bool:
    """Returns whether a leaf has a rule here."""
    match leaf:
        case PureDpEvent() | GaussianDpEvent() | LaplaceDpEvent() | DiscreteLaplaceDpEvent():
            return True
        case TruncatedSubsampledGaussianDpEvent() | PoissonSampledDpEvent(event=GaussianDpEvent()):
            return True
        case MonteCarloDpEvent():
            return adjacency in ("add_remove", "zero_out")
        case RandomizedResponseDpEvent():
            return adjacency != "add_remove"
        case PoissonSampledDpEvent(event=LaplaceDpEvent()):
            return adjacency != "replace_one"
        case OwnedGaussianDpEvent():
            return adjacency == "zero_out"
    return False


def is_symmetric(leaf: DpEvent, adjacency: Adjacency) -> bool:
    """Returns whether both directions of a leaf have the same losses."""
    match leaf:
        case MonteCarloDpEvent() | OwnedGaussianDpEvent():
            return False
        case RandomizedResponseDpEvent() | PoissonSampledDpEvent():
            return adjacency == "replace_one"
        case TruncatedSubsampledGaussianDpEvent():
            return adjacency == "replace_one"
    return True


def tamed(leaf: DpEvent) -> DpEvent:
    """Returns a leaf that costs at least as much, whose parameters have squares within float64.

    A sample of releases with hardly any noise is charged as the whole: by joint convexity a sampled
    pair has a smaller divergence than the pair itself.
    """
    match leaf:
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=sigma)) if (
            sigma < _TINY_NOISE
        ):
            return leaf.event
        case TruncatedSubsampledGaussianDpEvent(noise_multiplier=sigma) if sigma < _TINY_NOISE:
            # A replaced record under half the noise is the worse part.
            return GaussianDpEvent(sigma / 4)
        case OwnedGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            if sigma < _TINY_NOISE or leaf.records > _MOST_RECORDS:
                return GaussianDpEvent(min(sigma, MOST_NOISE) / leaf.records)
            sigma = min(sigma, MOST_NOISE)
            return OwnedGaussianDpEvent(max(q, _LEAST), sigma, leaf.records)
        case GaussianDpEvent() | LaplaceDpEvent():
            return type(leaf)(min(leaf.noise_multiplier, MOST_NOISE))
        case SingleEpochTreeAggregationDpEvent(noise_multiplier=sigma, step_counts=steps):
            return SingleEpochTreeAggregationDpEvent(min(sigma, MOST_NOISE), steps)
        case TruncatedSubsampledGaussianDpEvent():
            return TruncatedSubsampledGaussianDpEvent(
                leaf.dataset_size,
                max(leaf.sampling_probability, _LEAST),
                leaf.truncated_batch_size,
                min(leaf.noise_multiplier, MOST_NOISE),
            )
        case PoissonSampledDpEvent(sampling_probability=q, event=event):
            return PoissonSampledDpEvent(max(q, _LEAST), tamed(event))
        case SampledWithoutReplacementDpEvent(event=GaussianDpEvent(noise_multiplier=sigma)):
            event = GaussianDpEvent(min(sigma, _MOST_NOISE_OF_SAMPLES))
            size = leaf.sample_size
            return SampledWithoutReplacementDpEvent(leaf.source_dataset_size, size, event)
        case PureDpEvent(epsilon=loss):
            return type(leaf)(max(loss, _LEAST))
        case DiscreteLaplaceDpEvent(noise_parameter=rate, sensitivity=sensitivity):
            return DiscreteLaplaceDpEvent(max(rate, _LEAST), sensitivity)
    return leaf


def total_variation(leaf: DpEvent, adjacency: Adjacency) -> float:
    """Returns a bound on the delta of a leaf at epsilon 0."""
    factor = float(distance_factor(adjacency))
    match leaf:
        case PureDpEvent(epsilon=loss):
            return math.tanh(loss / 2)  # (e^epsilon - 1) / (e^epsilon + 1)
        case GaussianDpEvent(noise_multiplier=sigma):
            # 2 Phi(mu / 2) - 1 with mu = factor / sigma.
            return math.erf(factor / min(sigma, MOST_NOISE) / math.sqrt(8))
        case LaplaceDpEvent(noise_multiplier=scale):
            return -math.expm1(-factor / scale / 2)
        case PoissonSampledDpEvent(sampling_probability=q, event=event):
            return float(q * total_variation(event, adjacency))
        case OwnedGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            records = leaf.records
            whole = math.erf(records / min(sigma, MOST_NOISE) / math.sqrt(8))
            # The probability that some record is sampled, times the distance if all are.
            return whole if q == 1 else -math.expm1(records * math.log1p(-q)) * whole
    return 1.0


@functools.lru_cache(maxsize=512)
def distribution(
    leaf: DpEvent, adjacency: Adjacency, reverse: bool, depth: float
) -> LossDistribution:
    """Returns the losses of a leaf. `depth` is one of `DEPTHS`."""
    factor = float(distance_factor(adjacency))
    # What no interval covers: at most two tails of two Gaussians and two gaps between them. Masses
    # may underflow too.
    tails = 8 * float(special.ndtr(-reach_of(depth))) + 1e-300
    atoms: tuple[np.ndarray, np.ndarray] | None = None
    pieces: Sequence[Piece] = ()
    uncovered = 0.0
    match leaf:
        case PureDpEvent(epsilon=loss):
            atoms = pure_pair(loss)
        case RandomizedResponseDpEvent():
            atoms = randomized_response(leaf, adjacency)
        case MonteCarloDpEvent():
            epsilons = np.array(leaf.epsilons)
            curves = hull_pair(epsilons, np.array(leaf.forward), np.array(leaf.backward))
            atoms = curves.atoms
            uncovered = curves.only_second if reverse else curves.only_first
            # Wrong bounds bound nothing, as an infinite loss does.
            uncovered += leaf.failure_probability
        case RenyiCurve():
            atoms, uncovered, _ = renyi_pair(leaf, depth)
        case DiscreteLaplaceDpEvent():
            atoms = _discrete_laplace(leaf.noise_parameter, int(factor) * leaf.sensitivity)
        case LaplaceDpEvent(noise_multiplier=scale):
            atoms, pieces = laplace_losses(factor / scale, 1.0)
        case PoissonSampledDpEvent(event=LaplaceDpEvent(noise_multiplier=scale)):
            atoms, pieces = laplace_losses(1 / scale, leaf.sampling_probability)
        case GaussianDpEvent(noise_multiplier=sigma):
            pieces = [one_sided(1.0, sigma / factor, 1.0, depth)]
            uncovered = tails
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=sigma)):
            pair = two_sided if adjacency == "replace_one" else one_sided
            pieces = [pair(1.0, sigma, leaf.sampling_probability, depth)]
            uncovered = tails
        case OwnedGaussianDpEvent():
            pieces = [owned_records(leaf, depth)]
            uncovered = tails
        case TruncatedSubsampledGaussianDpEvent():
            pieces = truncated_batches(leaf, adjacency, depth)
            uncovered = tails
        case _:
            raise AssertionError(f"no loss distribution for {leaf!r}")
    return LossDistribution(atoms, pieces, uncovered, reverse)


def pure_pair(epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and log probabilities of binary randomised response, the worst pure pair."""
    signs = np.array([1.0, -1.0])
    return signs * epsilon, np.array([0.0, -epsilon]) - np.log1p(np.exp(-epsilon))


def randomized_response(
    leaf: RandomizedResponseDpEvent, adjacency: Adjacency
) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and log probabilities of the answers (true, other record's, all others)."""
    # The true answer has the probability 1 - p + p / buckets, and each other one p / buckets.
    buckets = leaf.num_buckets
    p = leaf.noise_parameter
    log_other = math.log(p) - math.log(buckets)
    if adjacency == "replace_one":
        if p > 1e-290:
            loss = math.log1p((1 - p) * buckets / p)
        else:  # The quotient would overflow.
            loss = math.log((1 - p) * buckets + p) - math.log(p)
        losses = [loss, -loss]
        log_masses = [log_other + loss, log_other]
        if buckets > 2:
            losses.append(0.0)
            log_masses.append(log_other + math.log(buckets - 2))
        return np.array(losses), np.array(log_masses)
    # The null record's answer is uniform.
    loss_of_true = math.log1p((buckets - 1) * (1 - p))
    log_others = math.log(p) + math.log1p(-1 / buckets)
    losses = [loss_of_true, math.log(p)]
    return np.array(losses), np.array([loss_of_true - math.log(buckets), log_others])


def _discrete_laplace(rate: float, sensitivity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the losses of two-sided geometric noise at 0 and at `sensitivity`.

    Outputs below 0 and above `sensitivity` have the extreme losses. The outputs between them have
    the probability (1 - r) / (1 + r) * r**(sensitivity - output), where r = exp(-rate). Runs of
    outputs round their losses up.
    """
    run = -(-sensitivity // _MOST_ATOMS)
    edges = np.append(np.arange(0, sensitivity, run), sensitivity - 1).astype(float)
    starts = edges[:-1]
    ends = edges[1:]
    log_upper = -math.log1p(math.exp(-rate))  # of the outputs from `sensitivity` on
    log_lower = log_upper - rate * sensitivity
    with np.errstate(divide="ignore"):
        log_runs = np.log(-np.expm1(-rate * (ends - starts)))
    log_inner = log_upper - rate * (sensitivity - ends) + log_runs
    outputs = np.concatenate([[0.0], ends, [float(sensitivity)]])
    losses = rate * (2 * outputs - sensitivity)
    return losses, np.concatenate([[log_lower], log_inner, [log_upper]])
