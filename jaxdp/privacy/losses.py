"""The privacy loss distribution of every leaf event: its pair of output distributions, as atoms and
as densities.

The privacy loss at an output is log(P / Q), where P and Q are the two densities of the pair. The
masses here are those under P. Reversing the pair gives the same losses with the opposite sign and
the masses under Q.

Formal guarantees: `LossDistribution.on_grid` returns a measure that dominates the pair. Each loss
is split between its two neighbours on the grid so that its masses under P and under Q stay
("connect the dots", Doroshenko et al. 2022, arXiv 2207.04380). What no interval covers has an
infinite loss. Integrals are sums of positive terms by Gauss-Legendre rules, with a relative error
below `MASS_ERROR`. docs/design/proofs.md has the bound.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from scipy import special, stats

from jaxdp.privacy.events import (
    MOST_NOISE,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SingleEpochTreeAggregationDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)

Adjacency = Literal["add_remove", "replace_one", "zero_out"]
# A point is (offset, centre). An offset from a far centre keeps its digits.
Density = Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]]
Inverse = Callable[[np.ndarray, float], np.ndarray]
Intervals = list[tuple[float, np.ndarray]]

# The relative error of one mass: the quadrature, and rounding of logarithms up to 700.
MASS_ERROR = 1e-11
# Tails are left out beyond a mass of about exp(-depth). The largest one keeps masses above
# float64's smallest number.
DEPTHS = (80.0, 160.0, 320.0, 600.0)
# Larger sensitivities of discrete Laplace noise are rounded up to this many losses.
_MOST_ATOMS = 2**16
# Losses of Laplace noise farther than this from both extremes have a probability below exp(-700).
_LAPLACE_REACH = 1400.0
# Below this noise multiplier a sampled release is charged as a whole one.
_TINY_NOISE = 1e-6
# A smaller loss or probability is charged as this one.
_LEAST = 1e-100
_KEPT_CELLS = 2**16
# Points of a Gauss-Legendre rule by the width of a panel, in units of the widest one.
_RULES = ((1 / 32, 4), (1 / 4, 6), (math.inf, 10))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A density over intervals, along which the loss rises.

    Attributes:
        weight: The probability of this piece.
        intervals: (centre, edges) of each interval, where edges are offsets that divide it into
            smooth panels.
        width: The widest panel.
        density: A function of offsets and a centre that returns losses and logarithms of the
            density.
        inverse: A function of losses and a centre that returns offsets.
    """

    weight: float
    intervals: Sequence[tuple[float, np.ndarray]]
    width: float
    density: Density
    inverse: Inverse

    def nodes(self, grid: float | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns losses and logarithms of masses at the nodes of all panels. Panels end at
        multiples of `grid`.
        """
        losses, masses = [np.zeros(0)], [np.zeros(0)]
        for centre, edges in self.intervals:
            if grid is not None:
                first, last = self.density(edges[[0, -1]], centre)[0] / grid
                cuts = self.inverse(
                    np.arange(math.ceil(first), math.floor(last) + 1) * grid, centre
                )
                cuts = cuts[(cuts > edges[0]) & (cuts < edges[-1])]
                edges = np.sort(np.concatenate([edges, cuts]))
            for offsets, weights in _panels(edges, self.width):
                loss, log_density = self.density(offsets, centre)
                losses.append(loss)
                with np.errstate(divide="ignore"):
                    masses.append(log_density + np.log(self.weight * weights))
        return np.concatenate(losses), np.concatenate(masses)


def _panels(edges: np.ndarray, width: float) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yields nodes and weights of the panels, by classes of their width."""
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    least = -math.inf
    for most, points in _RULES:
        chosen = (2 * half > least * width) & (2 * half <= most * width)
        least = most
        nodes, weights = np.polynomial.legendre.leggauss(points)
        offsets = middle[chosen, None] + half[chosen, None] * nodes
        yield offsets.ravel(), (half[chosen, None] * weights).ravel()


class LossDistribution:
    """The privacy losses of one leaf event in one direction.

    Args:
        atoms: Losses and logarithms of their probabilities.
        pieces: The densities.
        uncovered: A bound on the probability outside of atoms and pieces, under P and under Q.
        reverse: Whether to exchange P and Q.

    Attributes:
        uncovered: The probability of an infinite loss.
        losses, log_masses: Nodes of the losses, for moments.
        lowest, highest: The ends of the finite losses.
    """

    def __init__(
        self,
        atoms: tuple[np.ndarray, np.ndarray] | None,
        pieces: Sequence[Piece],
        uncovered: float,
        reverse: bool,
    ):
        empty = np.zeros(0)
        self._atoms = atoms or (empty, empty)
        self._pieces = pieces
        self._reverse = reverse
        self.uncovered = uncovered
        self.losses, self.log_masses = self._nodes(None)
        self.lowest = float(self.losses.min())
        self.highest = float(self.losses.max())
        for piece in pieces:
            for centre, edges in piece.intervals:
                ends = piece.density(edges[[0, -1]], centre)[0] * (-1 if reverse else 1)
                self.lowest = min(self.lowest, *map(float, ends))
                self.highest = max(self.highest, *map(float, ends))
        self._spare = 0.0
        self._trimmed: dict[float, LossDistribution] = {}
        self._moments: dict[float, float] = {}
        self._lattices: dict[float, tuple[int, np.ndarray]] = {}

    @property
    def largest(self) -> float:
        """The largest absolute value of a loss."""
        return max(abs(self.lowest), abs(self.highest))

    def trimmed(self, spare: float) -> "LossDistribution":
        """Returns the distribution whose largest losses, of a probability of at most `spare`, are
        infinite.

        Losses that are rarer than delta could otherwise dominate the moments, and so the tilted
        masses, whose rounding would then hide delta.
        """
        if spare not in self._trimmed:
            if len(self._trimmed) >= 4:
                self._trimmed.pop(next(iter(self._trimmed)))
            part = copy.copy(self)
            part._spare = spare
            part.uncovered = self.uncovered + spare * (1 + 1e-9)
            part._trimmed, part._moments = {}, {}
            places = np.argsort(self.losses)[::-1]
            dropped = np.cumsum(np.exp(self.log_masses[places])) <= spare
            kept = np.sort(places[~dropped])
            part.losses, part.log_masses = self.losses[kept], self.log_masses[kept]
            self._trimmed[spare] = part
        return self._trimmed[spare]

    def log_moment(self, order: float) -> float:
        """Returns the logarithm of the mean of exp(order * loss). Infinite losses are left out."""
        if order not in self._moments:
            with np.errstate(over="ignore", invalid="ignore"):
                self._moments[order] = _log_sum(self.log_masses + order * self.losses)
        return self._moments[order]

    def rounded_moment(self, order: float, grid: float) -> float:
        """Returns `log_moment` of the losses after they are split between multiples of `grid`."""
        below, share = _split(self.losses, grid)
        with np.errstate(over="ignore", invalid="ignore"):
            spread = np.logaddexp(_log(1 - share), _log(share) + order * grid)
            return _log_sum(self.log_masses + order * grid * below + spread)

    def on_grid(self, grid: float) -> tuple[int, np.ndarray]:
        """Returns (first, masses): the probability of the loss (first + i) * grid is masses[i]."""
        first, masses = self._full_lattice(grid)
        dropped = np.cumsum(masses[::-1]) <= self._spare
        return first, masses[: len(masses) - int(dropped.sum())]

    def _full_lattice(self, grid: float) -> tuple[int, np.ndarray]:
        if grid not in self._lattices:
            losses, log_masses = self._nodes(grid)
            below, share = _split(losses, grid)
            first = int(below.min())
            places, masses = (below - first).astype(np.int64), np.exp(log_masses)
            size = int(places.max()) + 2
            lattice = np.bincount(places, masses * (1 - share), size)
            lattice += np.bincount(places + 1, masses * share, size)
            if size > _KEPT_CELLS:
                return first, lattice
            while len(self._lattices) >= 2:
                self._lattices.pop(next(iter(self._lattices)))
            self._lattices[grid] = first, lattice
        return self._lattices[grid]

    def _nodes(self, grid: float | None) -> tuple[np.ndarray, np.ndarray]:
        parts = [self._atoms, *(piece.nodes(grid) for piece in self._pieces)]
        losses = np.concatenate([part[0] for part in parts])
        log_masses = np.concatenate([part[1] for part in parts])
        if self._reverse:
            losses, log_masses = -losses, log_masses - losses
        kept = log_masses > -math.inf
        return losses[kept], log_masses[kept]


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logarithms: np.ndarray = np.log(values)
    return logarithms


def _log_sum(exponents: np.ndarray) -> float:
    largest = float(exponents.max())
    if not math.isfinite(largest):
        return math.inf
    return largest + math.log(float(np.exp(exponents - largest).sum()))


def _split(losses: np.ndarray, grid: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the multiple of `grid` below each loss, and the share of its mass under P that goes
    to the next one.
    """
    below = np.floor(losses / grid)
    gap = np.clip(losses - below * grid, 0.0, grid)
    return below, np.expm1(-gap) / np.expm1(-grid)


# --- The leaves ---------------------------------------------------------------------------------


def has_distribution(leaf: DpEvent, adjacency: Adjacency) -> bool:
    """Returns whether a leaf has a rule here."""
    match leaf:
        case PureDpEvent() | GaussianDpEvent() | LaplaceDpEvent() | DiscreteLaplaceDpEvent():
            return True
        case TruncatedSubsampledGaussianDpEvent():
            return True
        case RandomizedResponseDpEvent():
            return adjacency != "add_remove"
        case PoissonSampledDpEvent(event=GaussianDpEvent()):
            return True
        case PoissonSampledDpEvent(event=LaplaceDpEvent()):
            return adjacency != "replace_one"
    return False


def is_symmetric(leaf: DpEvent, adjacency: Adjacency) -> bool:
    """Returns whether both directions of a leaf have the same losses."""
    match leaf:
        case RandomizedResponseDpEvent():
            return adjacency == "replace_one"
        case PoissonSampledDpEvent():
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
            return GaussianDpEvent(
                sigma / 4
            )  # A replaced record under half the noise is the worse part.
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
        case SampledWithoutReplacementDpEvent(source_dataset_size=records, sample_size=size):
            event = tamed(leaf.event)
            if isinstance(
                event, GaussianDpEvent | LaplaceDpEvent
            ):  # The rule takes expm1 of a square.
                event = type(event)(min(event.noise_multiplier, 1e7))
            return SampledWithoutReplacementDpEvent(records, size, event)
        case RepeatAndSelectDpEvent(event=event, mean=mean, shape=shape):
            return RepeatAndSelectDpEvent(tamed(event), mean, shape)
        case PureDpEvent(epsilon=loss):
            return PureDpEvent(max(loss, _LEAST))
        case DiscreteLaplaceDpEvent(noise_parameter=rate, sensitivity=sensitivity):
            return DiscreteLaplaceDpEvent(max(rate, _LEAST), sensitivity)
    return leaf


def total_variation(leaf: DpEvent, adjacency: Adjacency) -> float:
    """Returns a bound on the delta of a leaf at epsilon 0."""
    factor = 2.0 if adjacency == "replace_one" else 1.0
    match leaf:
        case PureDpEvent(epsilon=loss):
            return math.tanh(loss / 2)
        case GaussianDpEvent(noise_multiplier=sigma):
            return math.erf(factor / min(sigma, MOST_NOISE) / math.sqrt(8))
        case LaplaceDpEvent(noise_multiplier=scale):
            return -math.expm1(-factor / scale / 2)
        case PoissonSampledDpEvent(sampling_probability=q, event=event):
            return float(q * total_variation(event, adjacency))
    return 1.0


@functools.lru_cache(maxsize=512)
def distribution(
    leaf: DpEvent, adjacency: Adjacency, reverse: bool, depth: float
) -> LossDistribution:
    """Returns the losses of a leaf. `depth` is one of `DEPTHS`."""
    factor = 2.0 if adjacency == "replace_one" else 1.0
    reverse = reverse and not is_symmetric(leaf, adjacency)
    # What no interval covers: at most two tails of two Gaussians and two gaps between them. Masses
    # may underflow too.
    uncovered = 8 * float(special.ndtr(-_reach(depth))) + 1e-300
    match leaf:
        case PureDpEvent(epsilon=loss):
            return LossDistribution(pure_pair(loss), (), 0.0, reverse)
        case RandomizedResponseDpEvent():
            return LossDistribution(randomized_response(leaf, adjacency), (), 0.0, reverse)
        case DiscreteLaplaceDpEvent():
            atoms = _discrete_laplace(leaf.noise_parameter, int(factor) * leaf.sensitivity)
            return LossDistribution(atoms, (), 0.0, reverse)
        case LaplaceDpEvent(noise_multiplier=scale):
            return LossDistribution(*_laplace(factor / scale, 1.0), 0.0, reverse)
        case PoissonSampledDpEvent(event=LaplaceDpEvent(noise_multiplier=scale)):
            return LossDistribution(*_laplace(1 / scale, leaf.sampling_probability), 0.0, reverse)
        case GaussianDpEvent(noise_multiplier=sigma):
            return LossDistribution(
                None, [_gaussian(1.0, sigma / factor, 1.0, depth)], uncovered, reverse
            )
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=sigma)):
            make = _opposite if adjacency == "replace_one" else _gaussian
            piece = make(1.0, sigma, leaf.sampling_probability, depth)
            return LossDistribution(None, [piece], uncovered, reverse)
        case TruncatedSubsampledGaussianDpEvent():
            return LossDistribution(None, _truncated(leaf, adjacency, depth), uncovered, reverse)
    raise AssertionError(f"no loss distribution for {leaf!r}")


def pure_pair(epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and log probabilities of binary randomised response, the worst pure pair."""
    signs = np.array([1.0, -1.0])
    return signs * epsilon, np.array([0.0, -epsilon]) - np.log1p(np.exp(-epsilon))


def randomized_response(
    leaf: RandomizedResponseDpEvent, adjacency: Adjacency
) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and log probabilities of the answers (true, other record's, all others)."""
    k, p = leaf.num_buckets, leaf.noise_parameter
    other = math.log(p) - math.log(k)
    if adjacency == "replace_one":
        loss = (
            math.log1p((1 - p) * k / p) if p > 1e-290 else math.log((1 - p) * k + p) - math.log(p)
        )
        rest = [other + math.log(k - 2)] if k > 2 else []
        return np.array([loss, -loss] + [0.0] * len(rest)), np.array([other + loss, other, *rest])
    # The null record's answer is uniform.
    true = math.log1p((k - 1) * (1 - p))
    others = math.log(p) + math.log1p(-1 / k)
    return np.array([true, math.log(p)]), np.array([true - math.log(k), others])


def _discrete_laplace(rate: float, sensitivity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the losses of the outputs ..., 0, 1, ..., sensitivity, ... of two-sided geometric
    noise.

    Outputs below 0 and above `sensitivity` have the extreme losses. The outputs between them have
    the probability (1 - r) / (1 + r) * r**(sensitivity - output), where r = exp(-rate). Runs of
    outputs round their losses up.
    """
    run = -(-sensitivity // _MOST_ATOMS)
    ends = np.append(np.arange(0, sensitivity, run), sensitivity - 1).astype(float)
    starts, ends = ends[:-1], ends[1:]
    tail = -math.log1p(math.exp(-rate))  # the outputs from `sensitivity` on
    with np.errstate(divide="ignore"):
        inner = tail - rate * (sensitivity - ends) + np.log(-np.expm1(-rate * (ends - starts)))
    losses = rate * (2 * np.concatenate([[0.0], ends, [float(sensitivity)]]) - sensitivity)
    return losses, np.concatenate([[tail - rate * sensitivity], inner, [tail]])


# --- Laplace ------------------------------------------------------------------------------------


def sampled_loss(loss: np.ndarray, q: float) -> np.ndarray:
    """Returns log(1 - q + q exp(loss)), the loss of a sampled release."""
    if q == 1:
        return loss
    small = np.log1p(q * np.expm1(np.minimum(loss, 1.0)))
    return np.where(loss < 1, small, np.logaddexp(math.log1p(-q), math.log(q) + loss))


def _unsampled(loss: np.ndarray, q: float) -> np.ndarray:
    """Returns the inverse of `sampled_loss`. It is -inf below the smallest value."""
    if q == 1:
        return loss
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        small = np.log1p(np.expm1(np.minimum(loss, 1.0)) / q)
        large = loss - math.log(q) + np.log1p((q - 1) * np.exp(-loss))
    result = np.where(loss < 1, small, large)
    return np.where(np.isnan(result), -math.inf, result)


def _laplace(loss: float, q: float) -> tuple[tuple[np.ndarray, np.ndarray], list[Piece]]:
    """Returns atoms and pieces of Laplace noise at 0 and at a distance of `loss` scales, sampled
    with probability q.

    Without sampling, the loss is `loss` with probability 1/2 and -`loss` with probability
    exp(-loss) / 2. Between them its density is exp((l - loss) / 2) / 4.
    """

    def weighed(ends: np.ndarray, log_masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        losses = sampled_loss(ends, q)
        return losses, log_masses - ends + losses  # the mass under Q times the ratio of P to Q

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        # The centre is 0 or an end. Subtracting it first keeps the digits of the offset.
        return weighed(centre + offsets, (centre - loss + offsets) / 2 - math.log(4))

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        return _unsampled(losses, q) - centre

    width = min(loss / 16, 2.0)
    reach = min(loss, _LAPLACE_REACH)
    graded = reach * (1 - 0.5 ** np.arange(30))
    if reach == loss:
        ends = [(0.0, np.concatenate([-graded, graded, np.arange(-loss, loss, width), [loss]]))]
    else:
        near = np.concatenate([np.arange(0, reach, width), reach - graded, [reach]])
        ends = [(-loss, near), (loss, -near)]
    intervals = [
        (centre, _with_transition(np.unique(edges), _log_odds(q) - centre, 1.0, width))
        for centre, edges in ends
    ]
    extremes = np.array([loss, -loss])
    atoms = weighed(extremes, np.array([0.0, -loss]) - math.log(2))
    return atoms, [Piece(1.0, intervals, width, density, inverse)]


def _log_odds(q: float) -> float:
    return math.inf if q == 1 else math.log1p(-q) - math.log(q)


def _with_transition(edges: np.ndarray, place: float, scale: float, width: float) -> np.ndarray:
    """Adds edges where log(1 - q + q exp(x / scale)) bends: its poles are at place +- i pi
    scale.
    """
    if not edges[0] - 4 * scale < place < edges[-1] + 4 * scale:
        return edges
    steps = [math.pi / 4 * scale]
    while steps[-1] < 2 * width and len(steps) < 200:
        steps.append(1.5 * steps[-1])
    near = np.concatenate([place - np.array(steps), place + np.array(steps)])
    return np.unique(np.concatenate([edges, near[(near > edges[0]) & (near < edges[-1])]]))


# --- Gaussians ----------------------------------------------------------------------------------


def _reach(depth: float) -> float:
    return math.sqrt(2 * depth)


def _intervals(
    means: Sequence[float], places: Sequence[float], sigma: float, depth: float
) -> Intervals:
    """Returns intervals around all means / sigma. `places` are the transitions, relative to the
    mean 0.
    """
    reach = _reach(depth)
    width = 3 / reach
    if len(means) > 1 and 1 / sigma < 4 * reach:
        groups = [(0.0, min(means) / sigma - reach, max(means) / sigma + reach)]
    else:
        groups = [(mean, -reach, reach) for mean in means]
    intervals: Intervals = []
    for centre, low, high in groups:
        edges = np.linspace(low, high, math.ceil((high - low) / width) + 1)
        for place in places:
            edges = _with_transition(edges, place - centre / sigma, sigma, width)
        intervals.append((centre, edges))
    return intervals


def _gaussian(weight: float, sigma: float, q: float, depth: float) -> Piece:
    """Returns the losses of (1 - q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2). Offsets
    are in sigmas.
    """

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        loss = sampled_loss(offsets / sigma + (centre - 0.5) / sigma / sigma, q)
        upper = math.log(q) + _log_normal(offsets + (centre - 1) / sigma)
        if q == 1:
            return loss, upper
        return loss, np.logaddexp(math.log1p(-q) + _log_normal(offsets + centre / sigma), upper)

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        return sigma * _unsampled(losses, q) + (0.5 - centre) / sigma

    place = 0.5 / sigma + sigma * _log_odds(q)
    means = (1.0,) if q == 1 else (0.0, 1.0)
    return Piece(
        weight, _intervals(means, [place], sigma, depth), 3 / _reach(depth), density, inverse
    )


def _opposite(weight: float, sigma: float, q: float, depth: float) -> Piece:
    """Returns the losses of (1 - q) N(0) + q N(1) against (1 - q) N(0) + q N(-1), of standard
    deviation sigma.
    """
    if q == 1:
        return _gaussian(weight, sigma / 2, 1.0, depth)

    def density(offsets: np.ndarray, centre: float) -> tuple[np.ndarray, np.ndarray]:
        up = offsets / sigma + (centre - 0.5) / sigma / sigma
        down = -offsets / sigma - (centre + 0.5) / sigma / sigma
        upper = math.log(q) + _log_normal(offsets + (centre - 1) / sigma)
        lower = math.log1p(-q) + _log_normal(offsets + centre / sigma)
        return sampled_loss(up, q) - sampled_loss(down, q), np.logaddexp(lower, upper)

    def inverse(losses: np.ndarray, centre: float) -> np.ndarray:
        # exp(x / sigma^2) solves a quadratic equation, so that x / sigma^2 is
        # loss / 2 + asinh((1 - q) / q * exp(1 / (2 sigma^2)) * sinh(loss / 2)).
        half = np.abs(losses) / 2
        log_sinh = half + _log(-np.expm1(-2 * half)) - math.log(2)
        log_argument = _log_odds(q) + 0.5 / sigma / sigma + log_sinh
        large = log_argument + np.log1p(np.sqrt(1 + np.exp(-2 * np.maximum(log_argument, 0.0))))
        small = np.arcsinh(np.exp(np.minimum(log_argument, 0.0)))
        shift = half + np.where(log_argument > 0, large, small)
        offsets: np.ndarray = sigma * np.sign(losses) * shift - centre / sigma
        return offsets

    place = 0.5 / sigma + sigma * _log_odds(q)
    intervals = _intervals((-1.0, 0.0, 1.0), [place, -place], sigma, depth)
    return Piece(weight, intervals, 3 / _reach(depth), density, inverse)


def _log_normal(x: np.ndarray) -> np.ndarray:
    logarithms: np.ndarray = -x * x / 2 - math.log(2 * math.pi) / 2
    return logarithms


def _truncated(
    leaf: TruncatedSubsampledGaussianDpEvent, adjacency: Adjacency, depth: float
) -> list[Piece]:
    """Returns the mixture of two pairs that dominates truncated batches (Ganesh et al. 2025, arXiv
    2508.15089).

    A batch that is truncated replaces a record by another one. Any other batch gains or loses a
    record.
    """
    n, most, q = leaf.dataset_size, leaf.truncated_batch_size, leaf.sampling_probability
    make = _opposite if adjacency == "replace_one" else _gaussian
    cut = float(stats.binom.sf(most - 1, n - 1, q))
    if cut == 0:
        return [make(1.0, leaf.noise_multiplier, q, depth)]
    share = min(1.0, float(stats.binom.sf(most, n, q)) * most / cut / n)
    pieces = [make(1 - cut, leaf.noise_multiplier, q, depth)] if cut < 1 else []
    if share > 0:
        return [*pieces, _opposite(cut, leaf.noise_multiplier / 2, share, depth)]
    return pieces or [make(1.0, leaf.noise_multiplier, q, depth)]
