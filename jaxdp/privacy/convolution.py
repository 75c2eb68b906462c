"""Composition of privacy losses by exponentially tilted Fourier transforms.

The losses of independent releases add up. Their masses are multiplied by exp(tilt * loss) before
the transform, which moves the bulk of the sum to the epsilon that is asked for. So the rounding
errors of the transform are small relative to delta, however small delta is (Keich 2005, "sFFT";
Wilson and Keich 2016, "aFFT-C").

Formal guarantees: every delta is an upper bound for the discretised losses, which dominate the true
ones. It has these parts. docs/design/proofs.md has the proofs.

* the tilted sum over the window of the transform, times exp(count * MASS_ERROR) for the error of
  the masses,
* a bound on the rounding of the transform at each frequency, and so in the 2-norm,
* a Chernoff bound on the losses above the window. What lies below it only adds to delta,
* the probability of losses that are taken for infinite: far tails, and losses much rarer than
  delta.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import fft, signal

from jaxdp.privacy.events import DpEvent
from jaxdp.privacy.loss_distribution import MASS_ERROR, LossDistribution
from jaxdp.privacy.losses import DEPTHS, distribution, is_symmetric
from jaxdp.privacy.relations import Adjacency

_UNIT = 2.0**-53
# Discretisation may add this share of epsilon.
_TOLERANCE = 3e-4
# Beyond either end of the window lies exp(-_OUTSIDE) of the tilted mass.
_OUTSIDE = 22.0
# Losses above the window have a probability of exp(-_BEYOND) of delta.
_BEYOND = 16.0
# The share of delta that may go to losses that are taken for infinite, once for far tails and once
# for rare losses.
_SPARE = 1e-7
# A finer grid that gains less than this share ends the search.
_STEADY = 5e-4
_MOST_POINTS = 2**21
# By how much the excess of the next grid is smaller. A first halving of the grid shows whether it
# is fine enough.
_FINER = (4, 16, 16, 16)
# Half of the smallest float rounds to 0.
_LEAST_LOG_DELTA = -746.0
# exp overflows above this distance of grid points.
_LONG = 500.0
# The most grid points between the ends of one kind of release.
_MOST_CELLS = 2**18
# The products of an order and the largest loss that are looked at.
_LEAST_EXPONENT = 2.0**-40
_MOST_EXPONENT = 2.0**24
# What a moment that is a sum over nodes may err, relative to delta.
_MOMENT_MARGIN = 1e-3


class Losses:
    """The losses of a composition in one direction.

    Attributes:
        parts: The distribution and the count of each kind of release.
        uncovered: A bound on the probability of a loss that no grid covers.
        largest: The largest absolute value of a loss.
        rounding: A bound on the rounding of the sum of all losses.
        deviation: The standard deviation of the sum.
    """

    def __init__(self, parts: Sequence[tuple[LossDistribution, int]]):
        self.parts = parts
        self.uncovered = math.fsum(count * part.uncovered for part, count in parts)
        self.largest = max(part.largest for part, _ in parts)
        self.rounding = 16 * _UNIT * math.fsum(count * part.largest for part, count in parts)
        deviations = []
        for part, count in parts:
            masses = np.exp(part.log_masses)
            # Scaled, so that squares of small and large losses stay within float64.
            losses = part.losses / part.largest
            variance = float(masses @ (losses - masses @ losses) ** 2)
            deviations.append(part.largest * math.sqrt(count * max(variance, 1e-30)))
        self.deviation = math.hypot(*deviations)

    def log_moment(self, order: float) -> float:
        """Returns the logarithm of the mean of exp(order * sum)."""
        return math.fsum(count * part.log_moment(order) for part, count in self.parts)

    def rounded_moment(self, order: float, grid: float) -> float:
        """Returns `log_moment` for losses that are split between multiples of `grid`."""
        return math.fsum(count * part.rounded_moment(order, grid) for part, count in self.parts)


def losses_of(
    counts: Mapping[DpEvent, int], adjacency: Adjacency, delta: float, reverse: bool
) -> Losses:
    """Returns the losses of a composition in one direction.

    Tails are left out far below `delta`.
    """
    # A delta near 1 needs digits of 1 - delta.
    infinite = _SPARE * delta * (1 - delta)
    for depth in DEPTHS:
        leaves = []
        for leaf, count in counts.items():
            # One entry of the cache serves both directions of a symmetric leaf.
            is_reversed = reverse and not is_symmetric(leaf, adjacency)
            leaves.append((distribution(leaf, adjacency, is_reversed, depth), count))
        if math.fsum(count * part.uncovered for part, count in leaves) <= infinite:
            break
    trimmed = []
    for part, count in leaves:
        # A power of two, so that growing counts use the same distribution.
        exponent = math.frexp(infinite / len(leaves) / count)[1] - 1
        # Smaller shares are almost below float64, and nothing is left out.
        if exponent > -1000:
            part = part.trimmed(2.0**exponent)
        trimmed.append((part, count))
    return Losses(trimmed)


# --- Bounds by moments --------------------------------------------------------------------------


def _log_moment_factor(order: float) -> float:
    """Returns log of the largest (1 - exp(-x)) exp(-order x), by which a moment bounds delta."""
    return -order * math.log1p(1 / order) - math.log1p(order)


def _best_order(losses: Losses, cost: Callable[[float], float], start: float) -> float:
    """Returns the order 2**(k / 2) of the least cost near `start`. The cost has one valley."""
    cost = functools.cache(cost)
    first = math.ceil(2 * math.log2(_LEAST_EXPONENT / losses.largest))
    last = math.floor(2 * math.log2(_MOST_EXPONENT / losses.largest))
    place = max(first, min(last, round(2 * math.log2(start))))

    def at(k: int) -> float:
        return cost(2.0 ** (k / 2)) if first <= k <= last else math.inf

    # Long steps first, because the start may be far from the valley.
    for step in (8, 4, 2, 1):
        while True:
            best = min((place, place - step, place + step), key=at)
            if best == place:
                break
            place = best
    return float(2.0 ** (place / 2))


def moment_epsilon(losses: Losses, delta: float) -> tuple[float, float]:
    """Returns an epsilon by the best moment, and its order.

    This is the conversion of Renyi DP by Canonne, Kamath and Steinke 2020 (arXiv 2004.00010,
    proposition 12), at orders that fit the scale of the losses.
    """
    room = delta * (1 - _MOMENT_MARGIN) - losses.uncovered
    if room <= 0:
        return math.inf, 1.0
    log_room = math.log(room)

    def cost(order: float) -> float:
        return (losses.log_moment(order) + _log_moment_factor(order) - log_room) / order

    # Near the best order of a Gaussian of this deviation.
    start = math.sqrt(2 + 2 * abs(math.log(delta))) / losses.deviation
    order = _best_order(losses, cost, start)
    return cost(order), order


def moment_log_delta(losses: Losses, epsilon: float) -> tuple[float, float]:
    """Returns log of a delta by the best moment, and its order.

    The probability of a loss that no grid covers is left out.
    """

    def cost(order: float) -> float:
        return losses.log_moment(order) - order * epsilon + _log_moment_factor(order)

    order = _best_order(losses, cost, 1 / losses.deviation)
    return cost(order) + _MOMENT_MARGIN, order


# --- The transform ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tail:
    """The upper tail of a composition on a grid.

    Attributes:
        first: The number of the first grid point.
        grid: The distance of grid points.
        tilt: The order of the tilt.
        log_scale: The logarithm of the moment at the tilt, for the grid's losses.
        sums: For each point, the tilted sum over larger losses by which delta exceeds 0 there.
        error: A bound on the rounding of `sums`.
        log_missing: The logarithm of the probability of losses above the window or without a grid.
        log_factor: The logarithm of the factor for the error of masses.
        excess: What the grid adds to the logarithm of the moment at the tilt.
    """

    first: int
    grid: float
    tilt: float
    log_scale: float
    sums: np.ndarray
    error: float
    log_missing: float
    log_factor: float
    excess: float

    @functools.cached_property
    def log_deltas(self) -> np.ndarray:
        """The logarithms of delta at the epsilons of all grid points."""
        epsilons = (self.first + np.arange(len(self.sums))) * self.grid
        with np.errstate(divide="ignore"):
            log_sums = np.log(self.sums + self.error)
        log_sums += self.log_scale - self.tilt * epsilons + self.log_factor
        return np.logaddexp(log_sums, self.log_missing)

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon whose delta is small enough, or infinity."""
        fitting = np.flatnonzero(self.log_deltas <= math.log(delta))
        if not len(fitting):
            return math.inf
        place = int(fitting[0])
        here = (self.first + place) * self.grid
        if place == 0 or self.grid > _LONG:
            return here
        # Between two grid points the delta of the grid's losses is linear in exp(epsilon).
        low = self.log_deltas[place - 1]
        high = self.log_deltas[place]
        share = math.expm1(math.log(delta) - low) / math.expm1(high - low)
        return float(here - self.grid + math.log1p(min(share, 1.0) * math.expm1(self.grid)))

    def log_delta(self, epsilon: float) -> float:
        """Returns the logarithm of delta at an epsilon. It is infinite outside of the window."""
        place = math.floor(epsilon / self.grid) - self.first
        if not 0 <= place < len(self.sums) - 1:
            return math.inf
        low = self.log_deltas[place]
        high = self.log_deltas[place + 1]
        if self.grid > _LONG or not low < math.inf:
            return float(low)
        distance = epsilon - (self.first + place) * self.grid
        share = min(max(math.expm1(distance) / math.expm1(self.grid), 0.0), 1.0)
        return float(low + math.log1p(share * math.expm1(high - low)))


def tail(losses: Losses, tilt: float, epsilon: float, log_delta: float, budget: float) -> Tail:
    """Composes losses around a point.

    Args:
        losses: The composition.
        tilt: The order of the tilt.
        epsilon: An upper bound on the epsilon of interest.
        log_delta: The logarithm of its delta.
        budget: The excess that is allowed. The grid may be coarser where it would be too long.
    """
    bottom, top = _window(losses, tilt, log_delta)
    margin = 0.05 * (top - bottom)
    bottom = min(bottom, epsilon - margin)
    top = max(top, epsilon + margin)
    grid, excess = choose_grid(losses, tilt, budget, top - bottom)
    size = int(2 ** math.ceil(math.log2(max((top - bottom) / grid + 64, 256))))
    first = math.floor(bottom / grid) - 8
    lattices = [(part.on_grid(grid), count) for part, count in losses.parts]

    spectrum = np.ones(size // 2 + 1, dtype=complex)
    log_scale = 0.0
    # Two recursions over all points lose four units each.
    log_factor = 8 * _UNIT * size
    moduli = []
    for lattice, count in lattices:
        tilted = _tilted(lattice, grid, tilt)
        transform = fft.rfft(np.bincount(tilted.places % size, tilted.masses, size))
        spectrum *= _power(transform, count)
        moduli.append((np.abs(transform), count))
        log_scale += count * tilted.log_mass
        rounding = 8 * _UNIT * (tilted.largest_exponent + abs(tilted.log_mass))
        log_factor += count * (MASS_ERROR + rounding)
    # The transform is periodic. The roll puts the first point of the window in front.
    masses = np.roll(np.maximum(fft.irfft(spectrum, size), 0.0), -(first % size))
    return Tail(
        first=first,
        grid=grid,
        tilt=tilt,
        log_scale=log_scale,
        sums=_tail_sums(masses, tilt, grid),
        error=_rounding(masses, moduli) * _weights(tilt, grid, size),
        log_missing=float(
            np.logaddexp(
                _log(losses.uncovered),
                _log_missing(lattices, grid, first + size, tilt, log_scale, log_delta),
            )
        ),
        log_factor=log_factor,
        excess=excess,
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


Lattice = tuple[int, np.ndarray]


class _Tilted(NamedTuple):
    """Masses times exp(tilt * loss), divided by their sum."""

    places: np.ndarray  # numbers of the grid points
    masses: np.ndarray
    log_mass: float  # the logarithm of the sum
    largest_exponent: float  # of tilt * loss


def _tilted(lattice: Lattice, grid: float, tilt: float) -> _Tilted:
    first, masses = lattice
    positive = np.flatnonzero(masses)
    places = first + positive
    exponents = np.log(masses[positive]) + tilt * grid * places
    largest = float(exponents.max())
    tilted_masses = np.exp(exponents - largest)
    total = float(tilted_masses.sum())
    largest_exponent = tilt * grid * float(np.abs(places).max())
    return _Tilted(places, tilted_masses / total, largest + math.log(total), largest_exponent)


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """Returns complex numbers to a positive power, by squaring.

    NumPy's own power takes ten times as long. A product errs by less than 3 units, so the power
    errs by less than 3 for each factor.
    """
    result = values if exponent % 2 else None
    while exponent := exponent // 2:
        values = values * values
        if exponent % 2:
            result = values if result is None else result * values
    assert result is not None  # The first bit of a positive number is 1.
    return result


def _rounding(masses: np.ndarray, factors: Sequence[tuple[np.ndarray, int]]) -> float:
    """Returns a bound on the 2-norm of the error of masses that a transform computed.

    Args:
        masses: The computed masses.
        factors: The moduli of the transform of each kind of release, and the count of the kind.

    Each value of a transform is a sum of masses of sum 1. It errs by at most `stages`, 7 units for
    each of log2(size) stages. Where some factors are small, the errors of the others matter little.
    Powers and products add 16 units for each release.
    """
    stages = 7 * _UNIT * math.log2(len(masses))
    log_product = np.zeros(len(masses) // 2 + 1)
    releases = sum(count for _, count in factors)
    slope = np.full(len(log_product), 16 * _UNIT * releases)
    if slope[0] > 0.1:  # The first-order bound would not hold.
        return math.inf
    for moduli, count in factors:
        largest = moduli + stages
        log_product += count * np.log(largest)
        slope += count * stages / largest
    errors = np.exp(log_product) * slope
    # The transform of real masses is symmetric, so that each value but two stands for two.
    transformed = math.sqrt(2 * float(errors @ errors) / len(masses))
    return 1.1 * (transformed + stages * float(np.linalg.norm(masses)))


def _weights(tilt: float, grid: float, size: int) -> float:
    """Returns a bound on the 2-norm of exp(-tilt x) (1 - exp(-x)) over the positive grid points."""
    square = math.exp(-2 * tilt * grid)
    rest = -math.expm1(-2 * tilt * grid)
    near = grid * grid * square * (1 + square) / rest**3
    return math.sqrt(min(square / rest, near, float(size)))


def _tail_sums(masses: np.ndarray, tilt: float, grid: float) -> np.ndarray:
    """Returns for each place j the sum of masses[k] exp(-tilt x) (1 - exp(-x)) over k > j.

    Here x is (k - j) grid.

    Two recursions with positive terms only lose no digits.
    """
    later = _decayed(masses, (tilt + 1) * grid)
    steps = np.append(later[1:], 0.0) * (math.exp(-tilt * grid) * -math.expm1(-grid))
    return _decayed(steps, tilt * grid)


def _decayed(masses: np.ndarray, rate: float) -> np.ndarray:
    """Returns for each place the sum of masses from it on, times exp(-rate * distance)."""
    sums: np.ndarray = signal.lfilter([1.0], [1.0, -math.exp(-rate)], masses[::-1])[::-1]
    return sums


def _window(losses: Losses, tilt: float, log_delta: float) -> tuple[float, float]:
    """Returns losses outside of which little tilted mass lies, and little mass above the second.

    The transform is periodic, so that outer masses return inside. They never lower delta.
    """
    here = losses.log_moment(tilt)

    def below(step: float) -> float:
        return (losses.log_moment(tilt - step) - here + _OUTSIDE) / step

    def above(step: float) -> float:
        return (losses.log_moment(tilt + step) - here + _OUTSIDE) / step

    def beyond(order: float) -> float:
        return (losses.log_moment(order) - log_delta + _BEYOND) / order

    bottom = -below(_best_order(losses, below, tilt))
    top_of_mass = above(_best_order(losses, above, tilt))
    top_of_delta = beyond(_best_order(losses, beyond, tilt))
    return bottom, max(top_of_mass, top_of_delta)


def _log_missing(
    lattices: Sequence[tuple[Lattice, int]],
    grid: float,
    end: int,
    tilt: float,
    log_scale: float,
    log_delta: float,
) -> float:
    """Returns log of a Chernoff bound on the probability that the sum reaches grid point `end`."""
    highest = sum(count * (first + len(masses) - 1) for (first, masses), count in lattices)
    if highest < end:
        return -math.inf
    edge = end * grid
    by_tilt = log_scale - tilt * edge
    if by_tilt <= log_delta - _BEYOND:
        return by_tilt
    # Other orders may bound it better.
    bounds = [by_tilt]
    for order in tilt * 2.0 ** np.array([0.5, 1, 2, 4, 6, 8, 10]):
        log_moments = [
            count * _tilted(lattice, grid, float(order)).log_mass for lattice, count in lattices
        ]
        bounds.append(float(math.fsum(log_moments) - order * edge))
    return min(bounds)


def choose_grid(losses: Losses, tilt: float, budget: float, span: float) -> tuple[float, float]:
    """Returns the coarsest power of two whose excess is at most the budget, and its excess.

    Grids that are too fine for `span` or for a kind of release are not taken.
    """
    widest = max(part.highest - part.lowest for part, _ in losses.parts)
    least = math.ceil(math.log2(max(span / _MOST_POINTS, widest / _MOST_CELLS)))
    base = losses.log_moment(tilt)
    level = max(least, math.floor(math.log2(span / 1024)))
    while True:
        excess = losses.rounded_moment(tilt, 2.0**level) - base
        if excess <= budget or level == least:
            return 2.0**level, excess
        # The excess shrinks with the square of the grid.
        too_much = math.log2(excess / budget) / 2 if excess < math.inf else 1
        level = max(least, level - max(1, math.floor(too_much)))


# --- Epsilon and delta --------------------------------------------------------------------------


def epsilon_bound(losses: Losses, delta: float, enough: float = 0.0) -> float:
    """Returns an upper bound on epsilon in one direction. It may be infinite for extreme arguments.

    A bound that is at most `enough` is not tightened.
    """
    bound, tilt = moment_epsilon(losses, delta)
    if not enough < bound < math.inf:
        return max(bound, 0.0)
    epsilon = bound
    budget = _TOLERANCE * tilt * bound
    for finer in _FINER:
        composed = tail(losses, tilt, epsilon, math.log(delta), budget)
        before = epsilon
        epsilon = min(epsilon, composed.epsilon(delta) + losses.rounding)
        if epsilon <= enough:
            return max(epsilon, 0.0)
        # The curve may be flat where the tail has several modes. So the last grid decides, and not
        # only what it adds to the moment.
        if composed.excess > budget or before - epsilon <= _STEADY * epsilon:
            break
        # The order that is best at the tighter epsilon needs a shorter window.
        tilt = moment_log_delta(losses, epsilon)[1]
        budget = min(budget, _TOLERANCE * tilt * epsilon) / finer
    return epsilon


def log_delta_bound(losses: Losses, epsilon: float) -> float:
    """Returns the logarithm of an upper bound on delta in one direction."""
    epsilon = epsilon - losses.rounding
    bound, tilt = moment_log_delta(losses, epsilon)
    if bound < _LEAST_LOG_DELTA:
        return bound if losses.uncovered == 0 else _log(losses.uncovered)
    result = float(np.logaddexp(bound, _log(losses.uncovered)))
    budget = _TOLERANCE
    for finer in _FINER:
        composed = tail(losses, tilt, epsilon, bound, budget)
        before = result
        result = min(result, composed.log_delta(epsilon))
        if composed.excess > budget or before - result <= _STEADY:
            break
        budget /= finer
    return min(result, 0.0)


def log_delta_curve(losses: Losses, epsilons: np.ndarray, deltas: Sequence[float]) -> np.ndarray:
    """Returns logarithms of upper bounds on delta in one direction, at ascending epsilons.

    Each of `deltas` gives one composition, which bounds delta everywhere and is tight near it. The
    bounds are at most 0.
    """
    bounds = np.zeros(len(epsilons))
    for delta in deltas:
        epsilon, tilt = moment_epsilon(losses, delta)
        if not epsilon < math.inf:
            continue
        composed = tail(losses, tilt, epsilon, math.log(delta), _TOLERANCE)
        shifted = epsilons - losses.rounding
        here = np.array([composed.log_delta(float(value)) for value in shifted])
        bounds = np.minimum(bounds, here)
    # Delta falls with epsilon, and the last composition ends somewhere.
    return np.minimum.accumulate(bounds)
