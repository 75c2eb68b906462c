"""The privacy losses of one leaf event, as atoms and as densities over intervals.

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
from typing import Any

import numpy as np

# A point is (offset, centre). An offset from a far centre keeps its digits.
Density = Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]]
Inverse = Callable[[np.ndarray, float], np.ndarray]

# The relative error of one mass: the quadrature, and rounding of logarithms up to 700.
MASS_ERROR = 1e-11
# The most points of a lattice that is kept.
_MOST_KEPT_POINTS = 2**16
# The lattices and the trimmed copies that a distribution keeps, the newest ones.
_KEPT_LATTICES = 2
_KEPT_COPIES = 4
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

    def ends(self) -> list[float]:
        """Returns the losses at the ends of all intervals."""
        losses: list[float] = []
        for centre, edges in self.intervals:
            losses += self.density(edges[[0, -1]], centre)[0].tolist()
        return losses

    def nodes(self, grid: float | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns losses and logarithms of masses at the nodes of all panels.

        Panels end at multiples of `grid`.
        """
        losses = [np.zeros(0)]
        log_masses = [np.zeros(0)]
        for centre, edges in self.intervals:
            if grid is not None:
                edges = self._with_grid(edges, centre, grid)
            for offsets, weights in _panels(edges, self.width):
                loss, log_density = self.density(offsets, centre)
                losses.append(loss)
                with np.errstate(divide="ignore"):
                    log_masses.append(log_density + np.log(self.weight * weights))
        return np.concatenate(losses), np.concatenate(log_masses)

    def _with_grid(self, edges: np.ndarray, centre: float, grid: float) -> np.ndarray:
        """Returns the edges and the offsets between them whose loss is a multiple of `grid`."""
        first, last = self.density(edges[[0, -1]], centre)[0] / grid
        grid_losses = np.arange(math.ceil(first), math.floor(last) + 1) * grid
        cuts = self.inverse(grid_losses, centre)
        inner_cuts = cuts[(cuts > edges[0]) & (cuts < edges[-1])]
        return np.sort(np.concatenate([edges, inner_cuts]))


@functools.cache
def legendre_rule(points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes, in [-1, 1], and the weights of a Gauss-Legendre rule.

    NumPy solves an eigenproblem for the nodes, which takes longer than most sums over them.
    """
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return nodes, weights


def _panels(edges: np.ndarray, width: float) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yields nodes and weights of the panels, by classes of their width."""
    half = np.diff(edges) / 2
    middle = (edges[1:] + edges[:-1]) / 2
    least = -math.inf
    for most, points in _RULES:
        in_class = (2 * half > least * width) & (2 * half <= most * width)
        least = most
        nodes, weights = legendre_rule(points)
        offsets = middle[in_class, None] + half[in_class, None] * nodes
        yield offsets.ravel(), (half[in_class, None] * weights).ravel()


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
        largest: The largest absolute value of a loss.
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
        sign = -1 if reverse else 1
        ends: list[float] = []
        for piece in pieces:
            ends += [sign * loss for loss in piece.ends()]
        self.lowest = min([float(self.losses.min()), *ends])
        self.highest = max([float(self.losses.max()), *ends])
        self.largest = max(abs(self.lowest), abs(self.highest))
        # The probability of the largest losses that are taken for infinite.
        self._trimmed_mass = 0.0
        self._trimmed: dict[float, LossDistribution] = {}
        self._moments: dict[float, float] = {}
        self._lattices: dict[float, tuple[int, np.ndarray]] = {}

    def trimmed(self, spare: float) -> "LossDistribution":
        """Returns the distribution whose largest losses are infinite.

        Their probability is at most `spare`.

        Losses that are rarer than delta could otherwise dominate the moments, and so the tilted
        masses, whose rounding would then hide delta.
        """
        if spare in self._trimmed:
            return self._trimmed[spare]
        _keep_newest(self._trimmed, _KEPT_COPIES - 1)
        # The copy shares the lattices, which `on_grid` trims by itself.
        trimmed = copy.copy(self)
        trimmed._trimmed_mass = spare
        trimmed.uncovered = self.uncovered + spare * (1 + 1e-9)
        trimmed._trimmed = {}
        trimmed._moments = {}
        largest_first = np.argsort(self.losses)[::-1]
        is_dropped = np.cumsum(np.exp(self.log_masses[largest_first])) <= spare
        remaining = np.sort(largest_first[~is_dropped])
        trimmed.losses = self.losses[remaining]
        trimmed.log_masses = self.log_masses[remaining]
        self._trimmed[spare] = trimmed
        return trimmed

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
            spread = np.logaddexp(log_of(1 - share), log_of(share) + order * grid)
            return _log_sum(self.log_masses + order * grid * below + spread)

    def on_grid(self, grid: float) -> tuple[int, np.ndarray]:
        """Returns (first, masses): the probability of the loss (first + i) * grid is masses[i]."""
        first, masses = self._full_lattice(grid)
        is_dropped = np.cumsum(masses[::-1]) <= self._trimmed_mass
        return first, masses[: len(masses) - int(is_dropped.sum())]

    def _full_lattice(self, grid: float) -> tuple[int, np.ndarray]:
        if grid in self._lattices:
            return self._lattices[grid]
        losses, log_masses = self._nodes(grid)
        below, share = _split(losses, grid)
        first = int(below.min())
        places = (below - first).astype(np.int64)
        masses = np.exp(log_masses)
        size = int(places.max()) + 2
        lattice = np.bincount(places, masses * (1 - share), size)
        lattice += np.bincount(places + 1, masses * share, size)
        if size <= _MOST_KEPT_POINTS:
            _keep_newest(self._lattices, _KEPT_LATTICES - 1)
            self._lattices[grid] = first, lattice
        return first, lattice

    def _nodes(self, grid: float | None) -> tuple[np.ndarray, np.ndarray]:
        nodes = [self._atoms, *(piece.nodes(grid) for piece in self._pieces)]
        losses = np.concatenate([loss for loss, _ in nodes])
        log_masses = np.concatenate([log_mass for _, log_mass in nodes])
        if self._reverse:
            # Q's mass is P's times exp(-loss).
            log_masses = log_masses - losses
            losses = -losses
        is_possible = log_masses > -math.inf
        return losses[is_possible], log_masses[is_possible]


def _keep_newest(cache: dict[float, Any], count: int) -> None:
    """Removes the oldest entries of a cache until at most `count` are left."""
    while len(cache) > count:
        cache.pop(next(iter(cache)))


def log_of(values: np.ndarray) -> np.ndarray:
    """Returns logarithms, -inf for 0 without a warning."""
    with np.errstate(divide="ignore"):
        logarithms: np.ndarray = np.log(values)
    return logarithms


def _log_sum(exponents: np.ndarray) -> float:
    """Returns log(sum(exp(exponents))), infinite if one of them is."""
    largest = float(exponents.max())
    if not math.isfinite(largest):
        return math.inf
    return largest + math.log(float(np.exp(exponents - largest).sum()))


def _split(losses: np.ndarray, grid: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the multiple of `grid` below each loss, and the share of the mass that goes above.

    The share is of the mass under P. It goes to the next multiple.
    """
    below = np.floor(losses / grid)
    gap = np.clip(losses - below * grid, 0.0, grid)  # rounding may leave it
    # The share that goes above keeps the mass under Q too: share e^-grid + 1 - share = e^-gap.
    return below, np.expm1(-gap) / np.expm1(-grid)
