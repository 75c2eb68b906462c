"""The Renyi DP of private selection: the best of a secret, random number of runs.

    1. draw K, the number of runs
    2. run one mechanism K times, independently
    3. release the best of the K outputs, by a fixed order of outputs

A fixed K, or one that is known, has no such bound: the best of K runs then costs nearly as much as
all K. The bounds are those of Papernot and Steinke 2022, arXiv:2110.03620 (version 2):

* K is truncated negative binomial with the shape eta >= 0 (Definition 1): Theorem 2. It is
  geometric at eta = 1 (Liu and Talwar 2019, arXiv:1811.07971) and logarithmic at eta = 0.
* K is Poisson, the shape eta = inf: Theorem 6. Where K is 0, the output is a constant.

Both hold for every order of the outputs. So an output may be a pair of a model and its score.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta


def selection_rdp(
    orders: Sequence[float], rdp: np.ndarray, *, mean: float, shape: float
) -> np.ndarray:
    """Returns the Renyi DP of the best of K runs at every order.

    Args:
        orders: Renyi orders > 1 [N], in any order.
        rdp: The Renyi DP of one run at these orders, float64 [N], which may be infinite.
        mean: The mean of K, >= 1.
        shape: eta >= 0 of the negative binomial, or `math.inf` for Poisson.
    """
    alpha = np.asarray(orders)
    if shape == math.inf:
        # Theorem 6.
        bound = rdp + mean * _deltas(orders, rdp)
    else:
        # Theorem 2.
        log_halt = -math.log(stopping_probability(mean, shape))
        # One order for the cost of K, whatever the order of the bound.
        cost = np.min((1 - 1 / alpha) * rdp + log_halt / alpha)
        bound = rdp + (1 + shape) * cost
    bound = bound + math.log(mean) / (alpha - 1)
    # Renyi DP rises with the order, so a bound at a larger order holds at a smaller one.
    ascending = np.argsort(alpha)
    from_above = np.minimum.accumulate(bound[ascending][::-1])[::-1]
    bound[ascending] = from_above
    return bound


def _deltas(orders: Sequence[float], rdp: np.ndarray) -> np.ndarray:
    """Returns delta of one run at exp(epsilon) = 1 + 1 / (order - 1), for every order [N]."""
    deltas = []
    for order in orders:
        epsilon = math.log1p(1 / (order - 1))
        deltas.append(compute_delta(orders, rdp, epsilon)[0])
    return np.asarray(deltas)


def mean_runs(gamma: float, shape: float) -> float:
    """Returns the mean of the truncated negative binomial with gamma in (0, 1) and eta >= 0."""
    log_gamma = math.log(gamma)
    if shape == 0:
        return (1 - gamma) / (-log_gamma * gamma)
    return shape * (1 - gamma) / (-math.expm1(shape * log_gamma) * gamma)


@functools.lru_cache(maxsize=256)
def stopping_probability(mean: float, shape: float) -> float:
    """Returns the least float gamma in (0, 1] whose mean number of runs is at most `mean`.

    `RandomRuns` draws with it, so the bound is that of the drawn number.
    """
    low = 0.0
    high = 1.0
    # Bisection in units of the mean: gamma is about (1 + eta) / mean.
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        if mean_runs(middle, shape) <= mean:
            high = middle
        else:
            low = middle
