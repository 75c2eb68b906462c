"""The Renyi DP of a Gaussian on a Poisson sample, as dp_accounting computes it, in less time.

A Gaussian of noise multiplier sigma on a Poisson sample of probability q has the Renyi DP

    log A(alpha) / (alpha - 1)

at the order alpha (Mironov, Talwar and Zhang 2019, "Renyi differential privacy of the sampled
Gaussian mechanism", section 3.3). A is a finite sum for a whole order, and two series for another
one. dp_accounting computes one term after the other. Here the terms are computed in arrays by the
same operations, and are added in the same order, so that the results have the same bits.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

# Where arrays of terms begin and end. A series that has not converged then counts as infinite.
_ENDS = (0, 32, 64, 128, 256, 512, 1000)
# A term is left out whose logarithm is this far below that of the sum.
_NEGLIGIBLE = 30.0


def sampled_gaussian_rdp(
    sampling_probability: float, noise_multiplier: float, orders: Sequence[float]
) -> np.ndarray:
    """Returns the Renyi DP at every order, which is infinite where a series does not converge.

    Args:
      sampling_probability: q, in (0, 1).
      noise_multiplier: sigma, positive, with a square within float64.
      orders: Each above 1.
    """
    rdp = []
    with np.errstate(all="ignore"):  # terms may be zero, or infinite at orders that are not used
        for order in orders:
            log_moment = _series if order % 1 else _sum
            rdp.append(log_moment(sampling_probability, noise_multiplier, order) / (order - 1))
    return np.array(rdp)


def _sum(q: float, sigma: float, order: float) -> float:
    """Returns log A of a whole order."""
    k = np.arange(int(order) + 1)
    log_weights = _log_binomials(order, k) + k * math.log(q) + (order - k) * math.log1p(-q)
    total = -math.inf
    for term in (log_weights + _exponents(sigma, k)).tolist():
        total = _log_add(total, term)
    return total


def _series(q: float, sigma: float, order: float) -> float:
    """Returns log A of an order that is not whole."""
    left = right = last_of_left = last_of_right = -math.inf
    for first, end in itertools.pairwise(_ENDS):
        for of_left, of_right in zip(*_terms(q, sigma, order, first, end), strict=True):
            left = _log_add(left, of_left)
            right = _log_add(right, of_right)
            if of_left < last_of_left and of_right < last_of_right:
                total = _log_add(left, right)
                if max(of_left, of_right) < total - _NEGLIGIBLE:
                    return total
            last_of_left = of_left
            last_of_right = of_right
    return math.inf


def _terms(
    q: float, sigma: float, order: float, first: int, end: int
) -> tuple[list[float], list[float]]:
    """Returns the logarithms of terms of the integrals below and above z0."""
    z0 = sigma**2 * math.log(1 / q - 1) + 0.5
    k = np.arange(first, end)
    rest = order - k
    log_binomials = _log_binomials(order, k)
    deviation = math.sqrt(2) * sigma
    below = log_binomials + k * math.log(q) + rest * math.log1p(-q)
    below = below + _exponents(sigma, k) + _log_tail((k - z0) / deviation)
    above = log_binomials + rest * math.log(q) + k * math.log1p(-q)
    above = above + _exponents(sigma, rest) + _log_tail((z0 - rest) / deviation)
    return below.tolist(), above.tolist()


def _log_binomials(n: float, k: np.ndarray) -> np.ndarray:
    """Returns the logarithms of |n over k|."""
    logs: np.ndarray = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    return logs


def _exponents(sigma: float, k: np.ndarray) -> np.ndarray:
    exponents: np.ndarray = (k * k - k) / (2 * sigma**2)
    return exponents


def _log_tail(x: np.ndarray) -> np.ndarray:
    """Returns log(erfc(x) / 2)."""
    log_tail: np.ndarray = math.log(0.5) + (math.log(2) + special.log_ndtr(-x * 2**0.5))
    return log_tail


def _log_add(x: float, y: float) -> float:
    """Returns log(exp(x) + exp(y))."""
    less, more = (x, y) if x <= y else (y, x)
    if less == -math.inf:
        return more
    return math.log1p(math.exp(less - more)) + more
