"""The pair of distributions that a curve of deltas dominates.

The hockey-stick divergence H(a) of a pair, a = exp(epsilon), is convex and falls with a. It is
delta at epsilon = log a. Below 1, H(a) = 1 - a + a delta'(log 1 / a), where delta' is delta of the
reversed pair. So bounds of both directions at some epsilons are points above H. H lies below the
lower convex hull of points above it. The hull is the divergence of a discrete pair, whose losses
are the epsilons ("connect the dots", Doroshenko et al. 2022, arXiv 2207.04380). A mechanism is
therefore dominated by this pair, and pairs of mechanisms compose (Zhu, Dong, Wang 2022, arXiv
2106.08567, theorem 10).
"""

from typing import NamedTuple

import numpy as np


class CurvePair(NamedTuple):
    """A discrete pair.

    Attributes:
        atoms: Finite losses, ascending, and logarithms of their masses under the first
            distribution, float64 [N] each.
        only_first: The mass of the first distribution where the second has none.
        only_second: The mass of the second distribution where the first has none.
    """

    atoms: tuple[np.ndarray, np.ndarray]
    only_first: float
    only_second: float


def hull_pair(epsilons: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> CurvePair:
    """Returns the pair whose deltas are the hull of two curves.

    Args:
        epsilons: 0 and further numbers, ascending [N].
        forward: Bounds on delta at `epsilons` [N].
        backward: Bounds on delta of the reversed pair at the first of `epsilons`, or at all.
    """
    # a = exp(-epsilon), ascending, without a = 1.
    below = np.exp(-epsilons[len(backward) - 1 : 0 : -1])
    # Delta is 1 at a = 0.
    points = np.concatenate([[0.0], below, np.exp(epsilons)])
    # H(a) = 1 - a + a delta'(log 1 / a).
    bounds_below = 1 - below + below * backward[:0:-1]
    # At a = 1 both directions have one divergence, the total variation.
    at_one = min(forward[0], backward[0])
    bounds = np.concatenate([[1.0], bounds_below, [at_one], forward[1:]])
    # H falls with a, so each bound holds for all later points.
    bounds = np.minimum.accumulate(bounds)
    corners = _lower_hull(points, bounds)
    points = points[corners]
    bounds = bounds[corners]
    slopes = np.append(np.diff(bounds) / np.diff(points), 0.0)
    # The second distribution has its mass where the slope changes.
    second = np.maximum(np.diff(slopes), 0.0)
    losses = np.log(points[1:])
    is_atom = second > 0
    # Under the first distribution a mass is exp(loss) times that under the second.
    log_masses = np.log(second[is_atom]) + losses[is_atom]
    # Near a = 0, H(a) is 1 - a times the mass of the second where the first has any.
    only_second = float(max(0.0, 1 + slopes[0]))
    return CurvePair((losses[is_atom], log_masses), float(bounds[-1]), only_second)


def _lower_hull(points: np.ndarray, bounds: np.ndarray) -> list[int]:
    """Returns the indices of the corners of the lower convex hull, ascending."""
    # Python's own numbers, because NumPy takes ten times as long for one at a time.
    x = points.tolist()
    y = bounds.tolist()
    corners: list[int] = []
    for index in range(len(x)):
        while len(corners) > 1:
            first, middle = corners[-2:]
            rise_to_middle = (y[middle] - y[first]) * (x[index] - x[first])
            rise_to_new = (y[index] - y[first]) * (x[middle] - x[first])
            # The middle corner stays if it is below the line from the first one to the new one.
            if rise_to_middle < rise_to_new:
                break
            corners.pop()
        corners.append(index)
    return corners
