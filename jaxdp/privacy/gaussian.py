"""The exact privacy curve of Gaussian releases (Balle and Wang 2018, arXiv 1805.06530, theorem 8).

Gaussians of multipliers s_i compose to one: the pair N(0, 1), N(mu, 1) with mu^2 = sum_i s_i^-2.
With u = epsilon / mu - mu / 2, delta = phi(u) (R(u) - R(u + mu)). Here phi is the normal density
and R is Mills' ratio, R(x) = (1 - Phi(x)) / phi(x). This form loses no digits where delta or
epsilon is extreme.
"""

import math

import numpy as np
from scipy import special

from jaxdp.privacy.loss_distribution import legendre_rule

# What the formulas below may err in log delta.
_MARGIN = 1e-10
_UNIT = 2.0**-53


def log_delta(mu: float, u: float) -> float:
    """Returns the logarithm of delta at epsilon = mu (u + mu / 2)."""
    if u < -20:  # Mills' ratio overflows. Delta is 1 up to a few units of float64.
        upper = float(special.log_ndtr(-u))
        lower = float(special.log_ndtr(-u - mu)) + mu * (u + mu / 2)
        return upper + math.log1p(-math.exp(lower - upper))
    log_density = -u * u / 2 - math.log(2 * math.pi) / 2
    if mu > 0.01:
        return log_density + math.log(_mills(u) - _mills(u + mu))
    # The difference is the integral of 1 - x R(x), which cancels less.
    nodes, weights = legendre_rule(5)
    x = u + mu * (nodes + 1) / 2
    slope = np.array([1 - value * _mills(value) for value in x])
    return log_density + math.log(mu / 2 * float(weights @ slope))


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * float(special.erfcx(x / math.sqrt(2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon of N(0, 1) against N(mu, 1), rounded up, at a delta in (0, 1)."""
    target = math.log(delta) - _MARGIN
    if log_delta(mu, -mu / 2) <= target:
        return 0.0
    # u = -mu / 2 is epsilon 0. The bracket grows from there until it holds the target.
    low = max(-mu / 2, -1.0)
    high = low + 1.0
    while low > -mu / 2 and log_delta(mu, low) <= target:
        low = max(-mu / 2, 2 * low)
    while log_delta(mu, high) > target:
        high = 2 * high if high > 0 else 1.0
    # Bisection, until no float lies between the ends.
    while low < (middle := (low + high) / 2) < high:
        if log_delta(mu, middle) > target:
            low = middle
        else:
            high = middle
    return mu * (high + mu / 2) * (1 + 4 * _UNIT)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Returns the delta of N(0, 1) against N(mu, 1), rounded up, at a finite epsilon >= 0."""
    # Rounded down, so that delta is rounded up.
    u = epsilon / mu - mu / 2 - 4 * _UNIT * (epsilon / mu + mu)
    if u > 40:  # Delta is below the smallest float.
        return 5e-324
    return min(1.0, max(math.exp(log_delta(mu, u) + _MARGIN), 5e-324))
